"""Loss of accuracy to the mismatch of sampler and trainer: runs without any (exact) against runs with it (fast).

python -m experiments.numerics.dose_zero [--seeds 10] [--json OUT.jsonl] [--minutes 35]
python -m experiments.numerics.dose_zero --seeds 20 --rates "too high" --without "exact + R3,GSPO exact,GSPO fast"

adds a line for every run to results/dose_zero.jsonl; runs that are there are not made again. protocol.md has the
question and the hypotheses, `python -m experiments.numerics.dose_zero_tables` the tables and the figure.
"""

import argparse
import contextlib
import functools
import itertools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_llm.config import loading, start_up
from jaxrl_llm.ground.machine import forget_programs
from jaxrl_llm.rollout.pass_rate import Evaluator
from jaxrl_llm.run.assembly import Run, build
from jaxrl_llm.run.settings import validate
from jaxrl_llm.run.trainer import take_step
from jaxrl_llm.training.state import settled

RESULTS = Path(__file__).parent / "results" / "dose_zero.jsonl"
STEPS = 16
SETTING: dict[str, Any] = {
    "task.options": {"digits": 6, "train_size": 4096, "test_size": 512},
    "rollout.prompts": 16,
    "updates.minibatches": 4,
    "steps": STEPS,
    "evaluation.prompts": 512,
    "optimizer.clip_norm": 1.0,
    "log.diagnostics_every": 0,
    "warm_start.steps": 100,
}
MODELS: dict[str, dict[str, Any]] = {
    "mixture": {"model.num_experts": 8, "model.num_experts_per_tok": 2},
    "dense": {"model.num_experts": 0, "model.intermediate_size": 64},
}
RATES = {"too high": 8e-4, "tuned": 1e-4}  # in the order of the runs
IN_BFLOAT16 = {"model.dtype": "bfloat16", "rollout.dtype": "bfloat16"}
_EXACT = {"model.numerics": "exact"}
_GSPO = {"objective.name": "gspo", "objective.clip_low": 8e-3, "objective.clip_high": 1e-2}
_IN_PARTS = {"updates.micro_batch_rows": 8}
ARMS: dict[str, dict[str, Any]] = {
    "exact": _EXACT,
    "fast": {},
    "fast + TIS": {"objective.correction": "tis"},
    "fast + R3": {"replay.mode": "R3"},
    "exact + R3": {**_EXACT, "replay.mode": "R3"},
    "GSPO exact": {**_EXACT, **_GSPO},
    "GSPO fast": _GSPO,
    "exact, 8 rows at a time": {**_EXACT, **_IN_PARTS},
    "fast, 8 rows at a time": _IN_PARTS,
}
FIRST = ("exact", "fast", "fast + TIS", "fast + R3")  # run for all seeds before the others
WATCHED = ("reward/mean", "kl/sampler", "routing/flips_sampler_old", "check/sampler_equal")


def arms(model: str) -> list[str]:
    """The arms of a model; a dense one has no experts to replay."""
    return [arm for arm in ARMS if model == "mixture" or "R3" not in arm]


def made(model: str, fields: dict[str, Any], seed: int) -> Run:
    """The run of a model, fields beside the setting and a seed."""
    given = {"seed": seed, "warm_start.seed": seed, **SETTING, **MODELS[model], **fields}
    return build(validate(loading.load(loading.find("grpo"), [(name, str(value)) for name, value in given.items()])))


@functools.lru_cache(1)
def start(model: str, seed: int) -> tuple[Any, Evaluator, float]:
    """Parameters of the warm start, and what evaluates them and all that is trained from them: float32, for all arms
    the same; and the accuracy of the start."""
    run = made(model, {}, seed)
    params = run.start(print).policy.plain(run.model)
    return jax.device_get(params), run.evaluator, run.evaluator.pass_rate(params)


def trained(model: str, arm: str, rate: float, seed: int) -> dict[str, Any]:
    """Train one run; held-out sampled accuracy at the start and at the end, and what is watched, by step."""
    run = made(model, {"optimizer.learning_rate": rate, **IN_BFLOAT16, **ARMS[arm]}, seed)
    params, evaluator, before = start(model, seed)
    state, stream = settled(run.state(jax.device_put(params))), run.source.stream()
    after, steps = 0.0, []  # of a run that diverges
    with contextlib.suppress(FloatingPointError):
        for step in range(1, STEPS + 1):
            state, pending = take_step(run, state, stream, step)
            row = pending.row()
            steps.append({name: float(row[name]) for name in WATCHED if name in row})
            pending.check()
        after = evaluator.pass_rate(state.policy.plain(run.model))
    series = {name: [round_to(one[name]) for one in steps] for name in steps[0]}
    return {"accuracy": [before, after], **series}


def round_to(value: float) -> float:
    """Four digits, which the tables need at most."""
    return float(np.format_float_scientific(value, 3)) if value else 0.0


def read(path: Path) -> Sequence[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--rates", default=",".join(RATES))
    parser.add_argument("--without", default="", help="arms that are left out")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no run begins later")
    given = parser.parse_args()
    start_up.start_jax()
    known = {(row["model"], row["arm"], row["rate"], row["seed"]) for row in read(given.json)}
    began = time.monotonic()
    for model in MODELS:
        own = [arm for arm in arms(model) if arm not in given.without.split(",")]
        for rate in given.rates.split(","):
            for chosen in ([arm for arm in own if arm in FIRST], [arm for arm in own if arm not in FIRST]):
                for seed, arm in itertools.product(range(given.seeds), chosen):
                    if (model, arm, rate, seed) in known or time.monotonic() - began > 60 * given.minutes:
                        continue
                    result = trained(model, arm, RATES[rate], seed)
                    row = {"model": model, "arm": arm, "rate": rate, "seed": seed, **result}
                    with given.json.open("a") as lines:
                        print(json.dumps(row), file=lines)
                    print(model, seed, rate, arm, *(f"{x:.3f}" for x in row["accuracy"]), flush=True)
                    forget_programs()


if __name__ == "__main__":
    main()
