"""Published checkpoints through the real command: what a reader refuses is in tests/models and tests/tasks."""

from pathlib import Path

import numpy as np
import safetensors.numpy

from tests.reference.wrong_inputs import TINY, cut, json_with, kinds

GENERATE = "generate --checkpoint=checkpoint --prompt='1+1=' --max-tokens=1"
CHAT = (
    f"train --config=pretrained:smoke --workdir=new {TINY} --config.task.chat=True --config.task.tokenizer=checkpoint"
)
WEIGHTS, TEMPLATE = "checkpoint/model.safetensors", "checkpoint/chat_template.jinja"
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def not_finite(path: Path):
    """The weights with a NaN."""
    arrays = safetensors.numpy.load_file(path)
    name = min(arrays)
    arrays[name] = np.full_like(arrays[name], np.nan)
    safetensors.numpy.save_file(arrays, path)


RUNS = {"expects": "runs"}
TABLE = [
    *kinds(
        "checkpoints",
        GENERATE,
        [
            ("a checkpoint as it should be", "", "", {}, RUNS),
            ("another family", "", "model_type='mamba'", {"checkpoint/config.json": json_with(model_type="mamba")}),
            ("weights that are missing", "", "model.safetensors", {WEIGHTS: None}),
            ("weights that are cut", "", "model.safetensors", {WEIGHTS: cut}),
            ("a weight that is NaN", "", "not finite", {WEIGHTS: not_finite}),
            ("a tokenizer that is cut", "", "tokenizer.json", {"checkpoint/tokenizer.json": cut}),
        ],
    ),
    *kinds(
        "checkpoints",
        "generate --checkpoint=model.gguf --prompt='1+1=' --max-tokens=1",
        [
            ("a GGUF file as it should be", "", "", {}, RUNS),
            ("a GGUF file that is cut", "", "model.gguf", {"model.gguf": cut}),
        ],
    ),
    *kinds(
        "checkpoints",
        CHAT,
        [
            ("a template that never ends", "", "template", {TEMPLATE: ENDLESS}),
            ("a template's own error", "", "no system here", {TEMPLATE: "{{ raise_exception('no system here') }}"}),
        ],
    ),
]
