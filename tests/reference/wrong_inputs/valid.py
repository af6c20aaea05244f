"""The valid inputs that wrong ones are made from: DIRs, a checkpoint, data, a sweep; made by the tree itself."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxrl_llm.models import load_pretrained
from tests.reference import gguf_files
from tests.reference.data_forms import FILES
from tests.reference.wrong_inputs import TINY, rows_of

ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1), "more": 0} for i in range(40)]
PAIRS = [{"prompt": f"{i}=", "chosen": f"{i + 1}", "rejected": f"{i}"} for i in range(40)]
SWEEP = """
from jaxrl_llm.sweep import Sweep, chain, each, product


def get_sweep(variant=""):
    arms = chain([{"arm": "A", "objective.name": "grpo"}], [{"arm": "B", "objective.name": "gspo"}])
    return Sweep("?", product(arms, each("seed", range(1))), "A", config="grpo:smoke", minutes=1)
"""
CONFIG = """
from configs import base


def get_config(variant=""):
    config = base.get_config("smoke")
    return config
"""
TASK = """
import numpy as np

from configs import base
from jaxrl_llm import tasks


@tasks.register
def shout(*, letters: int = 3) -> tasks.Task:
    def sample(rng):
        word = "".join(rng.choice(list("abcdefgh"), size=letters))
        return f"{word}=", word[::-1]

    def verify(prompt, answer, gold, row):
        return float(answer == gold)

    return tasks.Task(name="shout", prompt_length=letters + 1, answer_length=letters + 1,
                      tokenizer=tasks.CharTokenizer("abcdefgh="), sample=sample, verify=verify)


def get_config(variant=""):
    config = base.get_config("smoke")
    config.task.name = "shout"
    config.task.options = {"letters": 3, "train_size": 64, "test_size": 16}
    return config
"""
REWARD = "def score(prompt, answer, gold, row):\n    return float(answer == gold)\n"


def make(folder: Path, command: Callable[[str, Path], Any]) -> None:
    """Fill the folder; `command(line, place)` runs one of the tree in a place."""
    folder.mkdir(parents=True)
    (folder / "sweep.py").write_text(SWEEP)
    (folder / "own.py").write_text(CONFIG)
    (folder / "shout.py").write_text(TASK)
    (folder / "reward.py").write_text(REWARD)
    (folder / "pairs.jsonl").write_text(rows_of(*PAIRS))
    for form in ("rows.jsonl", "rows.parquet", "rows.arrow"):
        FILES[form](folder / form, ROWS)
    kept = "--config.steps=2 --config.checkpoint.every=1 --config.checkpoint.keep=2"
    command(f"train --config=grpo:smoke --workdir=run {TINY} {kept}", folder)
    command("export --workdir=run --to=mixture", folder)
    command(f"train --config=pretrained:smoke --workdir=chat {TINY}", folder)
    made = folder.parent / "cache" / "jaxrl_llm" / "stand_ins"
    shutil.copytree(next(made.glob("checkpoint-*[0-9a-f]")), folder / "checkpoint")
    shutil.copytree(next(made.glob("gsm8k-*[0-9a-f]")), folder / "gsm8k")
    gguf_files.write(
        folder / "model.gguf", *load_pretrained(folder / "checkpoint"), "qwen3", tokenizer=folder / "checkpoint"
    )
    _study(folder / "run", folder / "study")


def _study(run: Path, study: Path) -> None:
    """Two finished runs of a sweep, without checkpoints."""
    runs = [{"folder": arm, "arm": arm, "condition": "", "seed": 0} for arm in "AB"]
    for arm in "AB":
        shutil.copytree(run, study / arm, ignore=shutil.ignore_patterns("checkpoints"))
    plan = {"question": "?", "baseline": "A", "pairs": "runs", "runs": runs}
    (study / "sweep.json").write_text(json.dumps(plan))
