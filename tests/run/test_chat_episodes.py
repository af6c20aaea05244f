"""A run from a chat checkpoint whose template knows tools: calls are answered by messages of a tool, and learnt."""

import json
import re
import shutil

import pytest

from configs import stand_ins
from jaxrl_llm import evaluation, generate, main
from jaxrl_llm.tasks import load_tokenizer
from jaxrl_llm.tasks.environments import python_tool
from jaxrl_llm.tasks.environments.python_tool import PythonEnvironment
from tests.reference.tiny_run import metrics, samples

pytestmark = pytest.mark.slow
TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools:{% for t in tools %} {{ t.function.name }}{% endfor %}<|im_end|>\n"
    "{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SIZES = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 8, "qk_norm": "head"}


def call(code):
    return f"<tool_call>{json.dumps({'name': 'python', 'arguments': {'code': code}})}</tool_call>"


@pytest.fixture
def checkpoint(tmp_path):
    """A Qwen3-shaped checkpoint with random parameters, a tokenizer and a template with tools."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(stand_ins.checkpoint(SIZES), folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    return folder


class Ruled(PythonEnvironment):
    """Begins with a rule of its own, and asks in other words than the row."""

    def init(self, row):
        super().init(row)
        return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"How much is {row['prompt']}"}]


def learned(checkpoint, folder):
    """The last row of a run whose demonstrations call the tool."""
    said = [call("print(6*7)"), [{"role": "tool", "content": "42"}], "42"]
    rows = [{"prompt": f"6*7 {i}", "answer": "42", "demonstration": said} for i in range(128)]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    options = {"path": str(folder / "rows.jsonl"), "turns": 2, "prompt_length": 96, "answer_length": 80}
    fields = {
        "model.pretrained": checkpoint,
        "task.name": "python",
        "task.options": json.dumps(options | {"observation_length": 48}),
        "task.chat": True,
        "task.data_dir": folder / "data",
        "warm_start.cache_dir": folder / "cache",
        "warm_start.steps": 60,
        "warm_start.learning_rate": 1e-2,
        "warm_start.batch_size": 8,
        "rollout.prompts": 4,
        "rollout.group_size": 4,
        "evaluation.prompts": 4,
        "evaluation.samples": 2,
        "checkpoint.every": 1,
        "steps": 1,
    }
    given = [f"--config.{name}={value}" for name, value in fields.items()]
    assert main.main(["--config=pretrained", f"--workdir={folder / 'run'}", *given]) == 0
    row = metrics(folder / "run")[-1]
    assert row["check/old_sampler_mean"] < 1e-5
    assert row["rollout/turns_mean"] > 1.2
    assert row["reward/verifier_errors"] == 0


def test_a_chat_checkpoint_learns_to_call_a_tool(checkpoint, tmp_path, capsys):
    learned(checkpoint, tmp_path)
    dialogues = [row["answer"] for row in samples(tmp_path / "run") if "answer" in row]
    heard = [one for one in dialogues if "</tool_call>\n> " in one]
    assert heard, dialogues
    assert generate.main(["--workdir", str(tmp_path / "run"), "--episode", "0", "--greedy"]) == 0
    assert "<tool_call>" in capsys.readouterr().out


def test_a_chat_begins_with_the_messages_of_its_environment(checkpoint, tmp_path, monkeypatch):
    """In processes of their own: the model reads them in the template, from the warm start to a recorded episode."""
    monkeypatch.setattr(python_tool, "PythonEnvironment", Ruled)
    learned(checkpoint, tmp_path)
    assert all(re.fullmatch(r"How much is 6\*7 \d+", row["prompt"]) for row in samples(tmp_path / "run"))
    given = ["--workdir", str(tmp_path / "run"), "--prompts", "2", "--samples", "1", "--k", "1", "--show", "0"]
    assert evaluation.main([*given, "--record", str(tmp_path / "traces.jsonl")]) == 0
    tokenizer = load_tokenizer(str(checkpoint))
    for line in (tmp_path / "traces.jsonl").read_text().splitlines():
        (trace,) = json.loads(line)["traces"]
        system, user = trace["nodes"][:2]
        assert system["message"] == {"role": "system", "content": "Be brief."}
        text = tokenizer.backend.decode(user["token_ids"], skip_special_tokens=False)
        head, _, rest = text.partition("<|im_start|>system\nBe brief.<|im_end|>\n")
        assert "Tools: python" in head
        assert rest == f"<|im_start|>user\n{user['message']['content']}<|im_end|>\n<|im_start|>assistant\n"
