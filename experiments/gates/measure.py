"""Measure what the form of an MoE's gate does to policy optimisation, at matched drift and under a dose of mismatch.

    python -m experiments.gates.measure drift  [--seeds 10] [--minutes 30] [--json OUT.jsonl]
    python -m experiments.gates.measure repair [--seeds 10] [--minutes 30] [--json OUT.jsonl]
    python -m experiments.gates.measure levels

`drift` and `repair` add a line to results/drift.jsonl and results/repair.jsonl for every run; runs that are there are
not made again, and with --minutes no run begins later. `levels` prints the bias of the sampler's choice that gives each
dose of k3. protocol.md has the question and the hypotheses, `python -m experiments.gates.tables` the tables.
"""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.gates.forms import CONTROL, FORMS, AnyGateConfig, begun, buffer
from experiments.numerics import dose_zero
from experiments.numerics.dose_zero import round_to
from experiments.routing_replay.noise import measured, sampled_and_scored
from jaxrl_llm import objectives
from jaxrl_llm.config import loading, start_up
from jaxrl_llm.ground import metrics as M
from jaxrl_llm.ground.machine import forget_programs
from jaxrl_llm.models import Router, is_recorded
from jaxrl_llm.run.assembly import Run, build
from jaxrl_llm.run.settings import validate
from jaxrl_llm.run.trainer import take_step
from jaxrl_llm.training.answers import Answers
from jaxrl_llm.training.experience import diagnose
from jaxrl_llm.training.expert_load import load as spread
from jaxrl_llm.training.expert_load import tokens_sent
from jaxrl_llm.training.layout import UpdateConfig
from jaxrl_llm.training.optimizer import OptimizerConfig, make_optimizer
from jaxrl_llm.training.rollouts import Rollouts
from jaxrl_llm.training.state import make_state, settled
from jaxrl_llm.training.step import Learner

FOLDER = Path(__file__).parent / "results"
EXPERTS, UNITS = 32, 16  # experts, and units of each
CHOSEN = (8, 2)
SETTING: dict[str, Any] = {
    "task.options": {"digits": 6, "train_size": 4096, "test_size": 512},
    "model.num_experts": EXPERTS,
    "model.moe_intermediate_size": UNITS,
    "model.shared_expert_intermediate_size": EXPERTS,  # as many units as the routed experts give up for it
    "rollout.prompts": 32,
    "updates.minibatches": 8,
    "evaluation.prompts": 256,
    "evaluation.samples": 8,
    "optimizer.clip_norm": 1.0,
    "log.diagnostics_every": 0,
}
WARM_RATE, WARM_ROWS, MOST, EVERY, TARGET = 3e-3, 64, 300, 10, 0.7
BIAS_STEP = 0.02  # by which a bias moves towards an even load, every EVERY steps of the warm start
RATES = (2.5e-5, 7.5e-5, 2e-4, 6e-4)


@dataclasses.dataclass(frozen=True)
class Cell:
    """A gate, with or without a shared expert, and the experts that a token uses."""

    gate: str
    shared: bool
    chosen: int


def made(chosen: int, seed: int, fields: dict[str, Any] | None = None) -> Run:
    """The run of a seed, with further fields; its programs serve every gate."""
    given = {"seed": seed, "model.num_experts_per_tok": chosen, **SETTING, **(fields or {})}
    s = validate(loading.load(loading.find("grpo"), [(name, str(value)) for name, value in given.items()]))
    return build(dataclasses.replace(s, model=AnyGateConfig(**vars(s.model))))


@functools.cache
def start(cell: Cell, seed: int) -> tuple[Any, int, float]:
    """The parameters of a supervised warm start on the host, its steps, and the largest load of an expert (1: even).

    It ends once the answers to 32 prompts reach TARGET, which is looked at every EVERY steps. There a selection bias
    moves by BIAS_STEP towards an even load, as in DeepSeek-V3 (arXiv 2412.19437, section 2.1.2); afterwards it stays.
    """
    run = made(cell.chosen, seed)
    source, s = run.source, run.settings
    assert isinstance(source, Rollouts)
    learner = Learner(
        run.model, objectives.make("sft"), make_optimizer(OptimizerConfig(WARM_RATE), MOST), rows="padded"
    )
    answers = Answers(learner, s.task, s.data_dir, seed, WARM_ROWS, UpdateConfig(minibatches=1))
    params = begun(run.model.init_sharded(jax.random.key(seed)), cell.gate, cell.shared)
    state = settled(make_state(run.model, jax.device_put(params), learner.optimizer))
    given, prompts, load = answers.stream(), source.stream(), float("nan")
    for step in range(1, MOST + 1):
        drawn = answers.next(given, step, state)
        ((layout,),) = drawn.epochs
        state, _ = learner.update(state, drawn.rollout, layout)
        if step % EVERY:
            continue
        rollout = source.judged(source.sample(prompts, step, state)).rollout
        routing: Any = rollout.routes.sampled
        rewards: Any = rollout.rewards
        load = float(np.mean(M.finalize(spread(tokens_sent(routing.experts, EXPERTS)))["routing/load_max_by_layer"]))
        if float(jnp.mean(rewards)) >= TARGET:
            break
        if "bias" in cell.gate:
            _balance(state.trained.policy["moe"]["mlp"], np.asarray(routing.experts))
    return jax.device_get(state.trained.policy), step, load


def _balance(layers: dict[str, Any], experts: np.ndarray) -> None:
    """Move the bias [l e] of each expert that was used less than the mean up, and of the others down."""
    used = np.stack([np.bincount(of.ravel(), minlength=EXPERTS + 1)[:EXPERTS] for of in experts])
    old = layers["router_bias"]
    moved = np.asarray(old) + BIAS_STEP * np.sign(used.mean(1, keepdims=True) - used)
    layers["router_bias"] = jax.device_put(moved.astype(np.float32), old.sharding)


@functools.lru_cache(1)
def rated(config: OptimizerConfig) -> optax.GradientTransformation:
    """AdamW at rate 1 followed by a factor that its state holds, so that one program serves every rate.

    Without weight decay AdamW's change is proportional to the rate.
    """
    assert not config.weight_decay
    at_one = make_optimizer(dataclasses.replace(config, learning_rate=1.0), 1, masters=False)

    def update(changes: Any, rate: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        return jax.tree.map(lambda change: rate * change, changes), rate

    by_rate = optax.GradientTransformation(lambda _: jnp.ones(()), update)  # pyright: ignore[reportArgumentType]
    return optax.chain(at_one, by_rate)


def drifted(cell: Cell, seed: int) -> dict[str, Any]:
    """Measure what the updates of one rollout do to the ratio, at every rate: lists over RATES."""
    params, steps, load = start(cell, seed)
    run = made(cell.chosen, seed)
    run = dataclasses.replace(run, learner=dataclasses.replace(run.learner, optimizer=rated(run.settings.optimizer)))
    source = run.source
    assert isinstance(source, Rollouts)
    scorer = source.scorer.learner
    first = run.state(jax.device_put(params))
    drawn = source.next(source.stream(), 1, first)
    (layouts,), rollout = drawn.epochs, drawn.rollout
    assert rollout.old_logprobs is not None
    mask = np.asarray(rollout.loss_mask)
    found: dict[str, list[float]] = {name: [] for name in ("kl", "flips", "share", "shapley", "tail", "beyond")}
    for rate in RATES:
        state = settled(run.state(jax.device_put(params)))
        state = state.replace(opt_state=(state.opt_state[0], jnp.float32(rate)))
        for layout in layouts:
            state, _ = run.learner.update(state, rollout, layout)
        told = M.finalize(diagnose(scorer, state.policy, first.policy, rollout, layouts))
        current = scorer.score(state.policy, rollout, layouts, {"logprobs", "routing"})["logprobs"]
        size = np.abs(np.asarray(current - rollout.old_logprobs))[mask]
        for name, value in {
            "kl": told["routing/kl_fresh"],
            "flips": told["routing/flips_fresh"],
            "share": told["routing/share_of_variance"],
            "shapley": told["routing/share_of_variance_shapley"],
            "tail": np.quantile(size, 0.999),
            "beyond": told["routing/log_ratio_above_ln2"],
        }.items():
            found[name].append(round_to(float(value)))
    rewards: Any = rollout.rewards
    right, least = float(jnp.mean(rewards)), _least(cell, scorer, first.policy, rollout, layouts)
    return {
        "steps": steps,
        "accuracy": right,
        "least": round_to(least),
        "load": round_to(load),
        "tokens": int(mask.sum()),
        **found,
    }


def _least(cell: Cell, scorer: Learner, policy: Any, rollout: Any, layouts: Any) -> float:
    """The least weight of a token's experts over their mean weight, a mean over layers and tokens."""
    routing = scorer.score(policy, rollout, layouts, {"routing", "router_logits"})["routing"]
    gate = dataclasses.replace(scorer.model.config.gate, form=buffer(cell.gate))
    known = np.asarray(is_recorded(routing.experts))
    weights = np.asarray(gate.weights(routing.logits, jnp.where(known[..., None], routing.experts, 0)))[known]
    return float(np.mean(weights.min(-1) / weights.mean(-1)))


STEPS, REPAIRED_RATE = 16, 2e-4
DOSED = (Cell("softmax, renormalised", False, 8), Cell("sigmoid, bias, groups", False, 8))
OTHERS = (Cell("softmax, as it is", False, 8), Cell("sigmoid, bias", False, 8))
REPAIR: dict[str, Any] = {"updates.minibatches": 4, "optimizer.learning_rate": REPAIRED_RATE, "steps": STEPS}
ARMS: dict[str, dict[str, Any]] = {
    "none": {},
    "R2": {"replay.mode": "R2"},
    "R3": {"replay.mode": "R3"},
    "frozen router": {"optimizer.router_factor": 0.0},
    "GSPO": {"objective.name": "gspo", "objective.clip_low": 8e-3, "objective.clip_high": 1e-2},
    "TIS": {"objective.correction": "tis"},
}
REMEDIES = tuple(arm for arm in ARMS if arm != "none")
Dose = float | str  # k3 at the warm start by a bias of the sampler's choice, or the sampler's dtype
EXACT, BFLOAT16 = 0.0, "bfloat16"
K3 = (1e-1, 1e-2, 1.5e-3)
DOSES: Sequence[Dose] = (*K3, BFLOAT16)
LAGS = (0, 2, 8)
# Bias of the choice that gives each dose of k3, by `levels`: a line through two levels on logarithmic axes.
LEVELS: dict[str, dict[Dose, float]] = {
    "softmax, renormalised": {1e-1: 1.27, 1e-2: 0.511, 1.5e-3: 0.241},
    "sigmoid, bias, groups": {1e-1: 0.8, 1e-2: 0.115, 1.5e-3: 0.0233},
    "softmax, as it is": {1e-1: 3.04},
    "sigmoid, bias": {1e-1: 1.79},
}
WATCHED = ("reward/mean", "kl/sampler", "kl/old", "routing/flips_sampler_old")


def mismatched(gate: str, dose: Dose) -> dict[str, Any]:
    """Fields of a sampler that rounds, or whose choice of experts alone is moved."""
    if dose == BFLOAT16:
        return {"rollout.dtype": BFLOAT16}
    return {"rollout.router_bias": LEVELS[gate][dose], "rollout.router_gates": "exact"} if dose else {}


def repaired(cell: Cell, dose: Dose, lag: int, arm: str, seed: int) -> dict[str, Any]:
    """Accuracy at the start and after STEPS rollouts, and what is watched as a mean over them."""
    fields = {**REPAIR, "rollout.lag": lag, **mismatched(cell.gate, dose), **ARMS[arm]}
    run = made(cell.chosen, seed, fields)
    params = start(cell, seed)[0]
    state, stream = settled(run.state(jax.device_put(params))), run.source.stream()
    after, rows = 0.0, []  # of a run that diverges
    with contextlib.suppress(FloatingPointError):
        for step in range(1, STEPS + 1):
            state, pending = take_step(run, state, stream, step)
            rows.append(pending.row())
            pending.check()
        after = run.evaluator.pass_rate(state.policy.plain(run.model))
    watched = {name: round_to(float(np.mean([row[name] for row in rows]))) for name in WATCHED if name in rows[0]}
    return {"accuracy": [accuracy(cell, seed), after], **watched}


@functools.cache
def accuracy(cell: Cell, seed: int) -> float:
    """Held-out sampled accuracy of a start."""
    return made(cell.chosen, seed).evaluator.pass_rate(jax.device_put(start(cell, seed)[0]))


def tell_levels() -> None:
    """Print the k3 of a seed that no run has, by bias, and the bias of each dose."""
    levels = (0.3, 1.2)
    for cell in (*DOSED, *OTHERS):
        run = made(cell.chosen, 99, REPAIR)
        state = run.state(jax.device_put(start(cell, 99)[0]))
        found = []
        for level in levels:
            router = Router(bias=level, gates="exact")
            found.append(jax.device_get(measured(sampled_and_scored(run, state, router))))
        k3 = [float(row["k3"]) for row in found]
        for level, row in zip(levels, found, strict=True):
            print(f"{cell.gate}, bias {level:g}: k3 {row['k3']:.2g}, {row['experts']:.1%} of experts differ")
        line = np.polyfit(np.log(k3), np.log(levels), 1)
        print({dose: round_to(float(np.exp(np.polyval(line, np.log(dose))))) for dose in K3}, flush=True)


Job = tuple[dict[str, Any], Callable[[], dict[str, Any]]]


def drift_jobs(seeds: int) -> Iterator[Job]:
    """All seeds with 8 experts a token before those with 2, and the control behind the gates."""
    for chosen, gates in itertools.product(CHOSEN, (FORMS, CONTROL)):
        for seed, shared, gate in itertools.product(range(seeds), (False, True), gates):
            cell = Cell(gate, shared, chosen)
            yield {**dataclasses.asdict(cell), "seed": seed}, functools.partial(drifted, cell, seed)


BATCHES = range(5), range(5, 10)  # seeds
Runs = tuple[Sequence[Cell], Sequence[Dose], Sequence[int], Sequence[str]]  # gates, doses, lags, arms
NO_DOSE: Runs = DOSED, [EXACT], [0], ["none"]
HIGH: Runs = DOSED, [1e-1], [0], [*ARMS]
MIDDLE: Runs = DOSED, [1e-2], [0], [*ARMS]
LOW: Runs = DOSED, [1.5e-3], [0], [*ARMS]
FURTHER: Sequence[Runs] = [
    (DOSED, [EXACT], [0], REMEDIES),
    *(
        (DOSED, [dose], [lag], arms)
        for arms in (["none"], ["TIS", "R3"], ["GSPO", "R2", "frozen router"])
        for dose, lag in ((EXACT, 8), (1e-1, 8), (BFLOAT16, 0), (EXACT, 2), (1e-1, 2))
    ),
    (OTHERS, [EXACT], [0], ["none"]),
    (OTHERS, [1e-1], [0], [*ARMS]),
]
CROSS: Sequence[Runs] = [(DOSED, [dose], [lag], [*ARMS]) for lag in (8, 2) for dose in (1e-2, BFLOAT16, 1.5e-3)]
LAGGED: Sequence[Runs] = [
    (OTHERS, [EXACT], [0], REMEDIES),
    *((OTHERS, [dose], [lag], [*ARMS]) for dose, lag in ((EXACT, 8), (1e-1, 8), (EXACT, 2), (1e-1, 2))),
]
QUEUE: list[tuple[Runs, range]] = [
    *((runs, BATCHES[0]) for runs in (NO_DOSE, HIGH, MIDDLE)),
    *((runs, BATCHES[1]) for runs in (NO_DOSE, HIGH)),
    *((runs, BATCHES[0]) for runs in FURTHER),
    *((runs, BATCHES[1]) for runs in (MIDDLE, *FURTHER)),
    *((LOW, seeds) for seeds in BATCHES),
    *((runs, seeds) for part in (CROSS[:3], CROSS[3:], LAGGED) for seeds in BATCHES for runs in part),
]


def repair_jobs(seeds: int) -> Iterator[Job]:
    """The queue in order, all runs of a seed and gate before the next."""
    for (cells, doses, lags, arms), batch in QUEUE:
        for seed, cell, dose, lag, arm in itertools.product(batch, cells, doses, lags, arms):
            where = {**dataclasses.asdict(cell), "seed": seed, "dose": dose, "lag": lag, "arm": arm}
            if seed < seeds:
                yield where, functools.partial(repaired, cell, dose, lag, arm, seed)


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a file; those of part 2 that name no lag have none."""
    return [{"lag": 0} | row if "arm" in row else row for row in dose_zero.read(path)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("drift", "repair", "levels"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--only", default="", help="FIELD=VALUE: of all runs those, for example chosen=8 or dose=0.1")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no run begins later")
    given = parser.parse_args()
    start_up.start_jax()
    if given.part == "levels":
        tell_levels()
        return
    path = given.json or FOLDER / f"{given.part}.jsonl"
    known, began = read(path), time.monotonic()
    for where, measure in {"drift": drift_jobs, "repair": repair_jobs}[given.part](given.seeds):
        field, _, value = given.only.partition("=")
        if any(where.items() <= row.items() for row in known) or (field and str(where[field]) != value):
            continue
        if time.monotonic() - began > 60 * given.minutes:
            break
        row = where | measure()
        with path.open("a") as lines:
            print(json.dumps(row), file=lines)
        print(row, flush=True)
        forget_programs()


if __name__ == "__main__":
    main()
