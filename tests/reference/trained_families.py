"""Runs of `train --config pretrained` from a tiny random checkpoint of each family, and what they show.

    python -m tests.reference.trained_families [FAMILY ...]

prints the rows of a table of docs/models.md. A run takes ten rollouts on a mesh of four devices, in packed rows and
micro-batches, and is stopped and resumed once; a mixture replays R3 and, in ten steps more, R2, then logits in two that
train adapters. The reward is the share of characters that are digits below five, and answers are
sampled at a temperature of 4, since a random model is sure of its tokens.
"""

import contextlib
import dataclasses
import io
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_llm import export
from jaxrl_llm.main import train
from jaxrl_llm.models import load_pretrained
from jaxrl_llm.models.checkpoints.pretrained_config import from_published
from jaxrl_llm.run.tokenizer_files import tokenizer_files
from jaxrl_llm.tasks.tokenizers.plain_tokenizers import CharTokenizer
from tests.reference import tiny_run
from tests.reference.families import GOLDEN, write_folder

GOLDENS = json.loads(GOLDEN.read_text())
ONE_EACH = [name for name in GOLDENS if "-" not in name and name != "llama3"]  # one form of each family
STEPS, SHORT = 10, 2
REWARD = """def small(prompt, answer, gold, row):
    return sum(one in "01234" for one in answer) / max(len(answer), 1)
"""
FIELDS = {
    "task.verify_truncated": True,
    "task.options.digits": 3,
    "task.options.train_size": 512,
    "task.options.test_size": 64,
    "rollout.prompts": 4,
    "rollout.group_size": 4,
    "rollout.temperature": 4.0,
    "rewards.verifier_weight": 0.0,
    "updates.layout": "packed",
    "updates.minibatches": 2,
    "updates.micro_batch_rows": 4,
    "evaluation.every": 100,
    "evaluation.prompts": 4,
    "evaluation.samples": 1,
    "log.diagnostics_every": 0,
    "optimizer.learning_rate": 1e-3,
}
_DENSE = {"": {}, "LoRA": {"lora.rank": 2}}
_MIXTURE = {
    "R3": {"replay.mode": "R3"},
    "R2": {"replay.mode": "R2"},
    "logits, LoRA": {
        "replay.mode": "R3",
        "replay.what": "logits",
        "lora.rank": 2,
        "lora.targets": "attention,mlp,router",
    },
}


@dataclasses.dataclass(frozen=True)
class Trained:
    """gap: largest |log pi_old - log mu| of a token in all runs of a family. flips: share of the experts that sampler
    and trainer choose otherwise; None: no experts. moved: largest change of a parameter in ten steps. rewards: means of
    the first and the last of ten rollouts. runs: those of `_MIXTURE` or `_DENSE`."""

    gap: float
    flips: float | None
    moved: float
    rewards: tuple[float, float]
    runs: tuple[str, ...]


def trained(family: str, folder: Path) -> Trained:
    """Train, stop, resume and export. Raises AssertionError: a resumed run differs, or an export does not load."""
    golden, checkpoint = GOLDENS[family], folder / "checkpoint"
    checkpoint.mkdir(parents=True)
    for name, content in tokenizer_files(CharTokenizer("0123456789=abcdefghijk")).items():
        (checkpoint / name).write_bytes(content)
    write_folder(checkpoint, golden["config"], golden["shapes"])
    (folder / "reward.py").write_text(REWARD)
    mixture = "moe" in from_published(golden["config"]).kinds
    fields = FIELDS | {
        "model.pretrained": str(checkpoint),
        "mesh.shape": (1, 2, 2, 1) if mixture else (1, 2, 1, 2),
        "rewards.functions": (f"{folder}/reward.py:small",),
    }
    runs = _MIXTURE if mixture else _DENSE
    rows = {
        name: run(folder / f"run{name}", fields | own | {"steps": SHORT if "lora.rank" in own else STEPS})
        for name, own in runs.items()
    }
    (first, own), whole = next(iter(runs.items())), next(iter(rows.values()))
    run(folder / "parts", fields | own | {"steps": STEPS // 2})
    assert run(folder / "parts", fields | own | {"steps": STEPS})[STEPS // 2 :] == whole[STEPS // 2 :]
    with contextlib.redirect_stdout(io.StringIO()):
        assert export.main(["--workdir", str(folder / f"run{first}"), "--to", str(folder / "exported")]) == 0
    every = [row for of in rows.values() for row in of]
    return Trained(
        gap=max(row["mismatch/max"] for row in every),
        flips=max(row["routing/flips_sampler_old"] for row in every) if mixture else None,
        moved=_moved(checkpoint, folder / "exported"),
        rewards=(whole[0]["reward/total"], whole[-1]["reward/total"]),
        runs=tuple(runs),
    )


def run(folder: Path, fields: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of the steps, without what depends on the clock."""
    with contextlib.redirect_stdout(io.StringIO()):
        train("pretrained", folder, fields)
    return [row for row in tiny_run.metrics(folder) if "reward/total" in row]


def _moved(before: Path, after: Path) -> float:
    (model, old), (again, new) = load_pretrained(before), load_pretrained(after)
    assert again == model
    return max(float(np.abs(a - b).max()) for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True))


def table_row(family: str, found: Trained) -> str:
    flips = "" if found.flips is None else f"{found.flips:g}"
    first, last = found.rewards
    runs = ", ".join(filter(None, found.runs))
    return f"| `{family}` | {found.gap:.1e} | {flips} | {first:.2f}, {last:.2f} | {found.moved:.3f} | {runs} |"


if __name__ == "__main__":
    import tests.conftest  # noqa: F401 (four CPU devices, and code that is quick to compile)

    for family in sys.argv[1:] or ONE_EACH:
        with tempfile.TemporaryDirectory() as place:
            print(table_row(family, trained(family, Path(place))), flush=True)
