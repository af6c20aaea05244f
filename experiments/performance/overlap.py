"""A step's seconds with a slow verifier: waiting for it while the policies score the answers, and before they do.

Command:  python -m experiments.performance.overlap [--seconds 0.05] [--steps 8] [--turns 2]

The same run twice a turn; the second arm waits for the verifier before it scores. Everything logged except times must
be equal to the last bit. The fastest step of each arm counts: other work on the machine only adds to it.
"""

import argparse
import contextlib
import dataclasses
import io
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

from configs import grpo
from jaxrl_llm import tasks
from jaxrl_llm.records.run_log import RunLog, read_rows
from jaxrl_llm.run import assembly, trainer
from jaxrl_llm.run.settings import Settings, validate
from jaxrl_llm.training import collect

_FIELDS = {
    "task.options": {"digits": 16, "train_size": 512, "test_size": 64},
    "model.num_hidden_layers": 2,
    "model.hidden_size": 256,
    "model.intermediate_size": 1024,
    "model.num_experts": 0,
    "warm_start.steps": 0,
    "rollout.prompts": 8,
    "updates.minibatches": 2,
    "objective.kl_coef": 0.01,
    "evaluation.prompts": 4,
    "evaluation.samples": 1,
    "checkpoint.every": 1000,
}


@dataclasses.dataclass(frozen=True)
class Slow:
    """A verifier that sleeps; its reward does not matter."""

    seconds: float

    def __call__(self, prompt: str, answer: str, gold: str, row: Any) -> float:
        time.sleep(self.seconds)
        return float(answer.count("1"))


def run(settings: Settings, overlapped: bool) -> list[dict[str, Any]]:
    """The logged rows of a run, without those of compilation."""
    verifying = collect.verifying

    def waiting(*given: Any) -> collect.Draw:
        draw = verifying(*given)
        for _, (_, _, wait) in draw.asked:
            wait()
        return draw

    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if not overlapped:
            stack.enter_context(mock.patch.object(collect, "verifying", waiting))
        log = stack.enter_context(RunLog(folder, settings.steps, stream=io.StringIO()))
        trainer.train(assembly.build(settings), log, "")
        return read_rows(folder / "metrics.jsonl")[2:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.05, help="of the verifier, for one answer")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--turns", type=int, default=2)
    given = parser.parse_args()
    config = grpo.get_config()
    with config.unlocked():
        config.update_from_flattened_dict(_FIELDS | {"steps": given.steps, "evaluation.every": given.steps})
    settings = validate(config)
    for split in ("train", "test"):  # made with the task's own verifier
        tasks.all_prompts(settings.task, split, data_dir=settings.data_dir)
    task = dataclasses.replace(settings.task, verify=Slow(given.seconds), isolated=True, solved=0.0)
    settings = dataclasses.replace(settings, task=task)
    rows: dict[str, list[dict[str, Any]]] = {"while scoring": [], "before scoring": []}
    for _ in range(given.turns):
        for arm, records in rows.items():
            records += run(settings, arm == "while scoring")
    for one, other in zip(*rows.values(), strict=True):
        for name in one:
            if not name.startswith(("time/", "rollout/tokens_per_s")) and one[name] != other[name]:
                raise ValueError(f"step {one['step']}: {name} is {one[name]} and {other[name]}; the arms must be equal")
    for arm, records in rows.items():
        seconds = [row["time/rollout_s"] + row["time/update_s"] for row in records]
        print(
            f"the verifier is waited for {arm}: {min(seconds):.2f} s a step, median {statistics.median(seconds):.2f} s"
        )


if __name__ == "__main__":
    from experiments.performance import overlap  # by its name: a worker cannot import Slow from __main__

    overlap.main()
