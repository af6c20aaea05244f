"""Tokenizers of checkpoints, and their chat templates."""

import json

from tests.reference.wrong_inputs import TINY, changed, cut, json_with, json_without, kinds
from tests.reference.wrong_inputs.checkpoints import CONFIG, GENERATE, RUNS

TOKENIZER = "checkpoint/tokenizer.json"
OF_TOKENIZER = "checkpoint/tokenizer_config.json"
CHAT = (
    f"train --config=pretrained:smoke --workdir=new {TINY} --config.task.chat=True --config.task.tokenizer=checkpoint"
)


def template(text):
    return {"checkpoint/chat_template.jinja": text}


TABLE = [
    *kinds(
        "checkpoints: tokenizer",
        GENERATE,
        [
            ("missing", "", "tokenizer.json", {TOKENIZER: None}),
            ("empty", "", "tokenizer.json", {TOKENIZER: ""}),
            ("cut", "", "tokenizer.json", {TOKENIZER: cut}),
            ("a list", "", "tokenizer.json", {TOKENIZER: "[]"}),
            ("of another model", "", "tokenizer.json", {TOKENIZER: json_with(model={"type": "Nothing"})}),
            ("its config a list", "", "tokenizer_config.json", {OF_TOKENIZER: "[]"}),
            ("its config cut", "", "tokenizer_config.json", {OF_TOKENIZER: cut}),
            ("its config latin-1", "", "tokenizer_config.json", {OF_TOKENIZER: b'{"a": "\xe9"}'}),
            ("its end a number", "", "", {OF_TOKENIZER: json_with(eos_token=3)}, RUNS),
            ("its end a word that it does not have", "", "eos_token", {OF_TOKENIZER: json_with(eos_token="<none>")}),
            ("an end id in words", "", "eos_token_id", {"checkpoint/generation_config.json": '{"eos_token_id": "x"}'}),
            ("end ids nested", "", "eos_token_id", {"checkpoint/generation_config.json": '{"eos_token_id": [[2]]}'}),
            (
                "an end id beyond the vocabulary",
                "",
                "end_ids",
                {"checkpoint/generation_config.json": '{"eos_token_id": 999999}'},
            ),
            (
                "generation_config.json a list",
                "",
                "generation_config.json",
                {"checkpoint/generation_config.json": "[]"},
            ),
            (
                "no end at all",
                "",
                "end_ids",
                {
                    OF_TOKENIZER: json_without("eos_token"),
                    "checkpoint/generation_config.json": "{}",
                    CONFIG: json_without("eos_token_id"),
                },
            ),
            (
                "a vocabulary of another checkpoint",
                "",
                "the tokenizer of checkpoint",
                {
                    TOKENIZER: changed(
                        lambda text: json.dumps(
                            json.loads(text)
                            | {
                                "added_tokens": [],
                                "model": json.loads(text)["model"]
                                | {
                                    "vocab": {
                                        **json.loads(text)["model"]["vocab"],
                                        **{f"new{i}": 9000 + i for i in range(9)},
                                    }
                                },
                            }
                        ).encode()
                    )
                },
            ),
        ],
    ),
    *kinds(
        "checkpoints: chat template",
        CHAT,
        [
            (
                "none",
                "",
                "task.chat",
                {
                    OF_TOKENIZER: json_without("chat_template"),
                    "checkpoint/chat_template.jinja": lambda path: path.unlink(missing_ok=True),
                },
            ),
            (
                "a number",
                "",
                "chat_template",
                {
                    OF_TOKENIZER: json_with(chat_template=3),
                    "checkpoint/chat_template.jinja": lambda path: path.unlink(missing_ok=True),
                },
            ),
            (
                "a list of numbers",
                "",
                "chat_template",
                {
                    OF_TOKENIZER: json_with(chat_template=[3]),
                    "checkpoint/chat_template.jinja": lambda path: path.unlink(missing_ok=True),
                },
            ),
            ("latin-1", "", "chat_template.jinja", template(b"\xe9{{ messages[0].content }}")),
            ("a bracket that is not closed", "", "template", template("{{ messages[0")),
            ("a statement that is not closed", "", "template", template("{% if x %}")),
            ("a filter that is not there", "", "template", template("{{ messages | nothing }}")),
            ("text and a number added", "", "template", template("{{ 1 + 'a' }}")),
            ("a division by 0", "", "template", template("{{ 1 // 0 }}")),
            ("a name that is not there", "", "template", template("{{ nothing.of }}")),
            ("another file included", "", "template", template("{% include 'x' %}")),
            ("a macro that calls itself", "", "template", template("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}")),
            ("10^10 turns", "", "template", template("{% for i in range(10000000000) %}x{% endfor %}")),
            (
                "a loop that never ends",
                "",
                "template",
                template("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"),
            ),
            ("a number of 10^8 digits", "", "template", template("{{ 10**100000000 }}")),
            ("a text of 1 GB", "", "template", template("{{ 'x' * 1000000000 }}")),
            ("what is private", "", "template", template("{{ messages.__class__.__mro__ }}")),
            ("a list that is changed", "", "template", template("{{ messages.append(1) }}")),
            ("its own error", "", "no system here", template("{{ raise_exception('no system here') }}")),
            ("nothing", "", "template", template("")),
            ("the prompt dropped", "", "template", template("hello{{ '' if add_generation_prompt else '' }}")),
            (
                "the prompt cut",
                "",
                "prompt_altered",
                template("{{ messages[0].content[:-3] }}"),
                {"expects": "warning"},
            ),
            (
                "the prompt escaped",
                "",
                "prompt_altered",
                template("{{ messages[0].content | upper }}"),
                {"expects": "warning"},
            ),
        ],
    ),
]
