"""python -m jaxrl_llm.evaluation --workdir DIR: mean reward, pass@1, pass@k and samples of a finished or running DIR.

Reads the DIR's own config.json and newest intact checkpoint (or --step), writes nothing into it but evaluation.jsonl.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import logging

from jaxrl_llm import run_dir, start_up, tasks
from jaxrl_llm.command_line import REFUSED, Parser, complain
from jaxrl_llm.ranges import at_least
from jaxrl_llm.rollout.pass_rate import Evaluator, pass_at_k
from jaxrl_llm.trainer import exported_params

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="jaxrl-llm evaluate", description="Mean reward, pass@1, pass@k and samples of any DIR.")
    parser.add_argument("--workdir", required=True, type=Path, help="the DIR of a run")
    parser.add_argument("--step", type=int, help="which checkpoint; default: the newest that is intact")
    parser.add_argument("--split", choices=("test", "train"), default="test", help="prompts of which split")
    parser.add_argument("--prompts", type=int, default=128, help="how many prompts")
    parser.add_argument("--samples", type=int, default=16, help="answers a prompt")
    parser.add_argument("--k", default="1,4,16", help="values of k for pass@k")
    parser.add_argument("--show", type=int, default=5, help="prompts printed with their answers")
    given = parser.parse_args(arguments)
    logging.set_verbosity(logging.ERROR)
    try:
        return _evaluate(given)
    except (ValueError, OSError) as error:
        return complain(error, REFUSED)


def _evaluate(given: argparse.Namespace) -> int:
    for name, low in (("prompts", 1), ("samples", 1), ("show", 0)):
        at_least(f"--{name}", getattr(given, name), low)
    if not re.fullmatch(r"\d+(,\d+)*", given.k):
        raise ValueError(f"--k={given.k} must be whole numbers with commas between them, for example 1,4,16")
    ks = [k for k in map(int, given.k.split(",")) if k <= given.samples]
    if not ks or min(ks) < 1:
        raise ValueError(f"--k={given.k} needs a value between 1 and --samples={given.samples}")
    start_up.start_jax()
    run, step, state = run_dir.restored(given.workdir, given.step, note=_warn)
    settings = run.settings
    prompts = tasks.all_prompts(settings.task, given.split, limit=given.prompts, data_dir=settings.data_dir)
    evaluator = Evaluator(run.model, settings.task, prompts, given.samples, settings.answer_length)
    found, rows = evaluator(exported_params(run, state))
    solved = settings.task.solved
    right = [sum(reward >= solved for reward in row["sampled_reward"]) for row in rows]
    result = {"step": step, "split": given.split, "prompts": len(rows)}
    result |= {name: found[name] for name in ("eval/greedy", "eval/greedy_reward", "eval/reward")}
    result |= {f"eval/pass_at_{k}": pass_at_k(right, given.samples, k) for k in ks}
    for row in rows[: given.show]:
        answers = "  ".join(f"{text}{'' if reward >= solved else ' ✗'}" for text, reward in _pairs(row)[:4])
        print(f"{row['prompt']}  greedy: {row['greedy']}{'' if row['reward'] >= solved else ' ✗'}   sampled: {answers}")
    print(json.dumps(result))
    with open(given.workdir / "evaluation.jsonl", "a") as log:
        log.write(json.dumps(result) + "\n")
    return 0


def _warn(text: str) -> None:
    print(text, file=sys.stderr)


def _pairs(row: dict) -> list[tuple[str, float]]:
    return list(zip(row["sampled"], row["sampled_reward"], strict=True))


if __name__ == "__main__":
    sys.exit(main())
