"""Whole runs under exact numerics, to the last bit: layouts, a lag, a reference's scores and an evaluation.

The resume of such a run is one of the kinds of test_resumed_kinds.py.
"""

import dataclasses

import jax
import pytest

from jaxrl_llm.run import assembly
from jaxrl_llm.run.settings import validate
from tests.reference import tiny_run
from tests.reference.exact_rollouts import EVERY

FIRST = ("bfloat16", 8, 1)


def exact(dtype="bfloat16", experts=8, **changes):
    """Fields of a run; a dense one leaves out what only a mixture has."""
    model = {"model.numerics": "exact", "model.dtype": dtype, "rollout.dtype": dtype, "warm_start.steps": 0}
    if experts:
        return model | changes
    return model | {"model.num_experts": 0} | {k: v for k, v in changes.items() if not k.startswith("replay.")}


def trained(folder, seed, **fields):
    """The rows of a run's steps."""
    tiny_run.train(folder / f"run{seed}", tiny_run.make_config(folder, seed=seed, **fields))
    return [row for row in tiny_run.metrics(folder / f"run{seed}") if "loss/total" in row]


every = pytest.mark.parametrize(
    ("dtype", "experts", "seeds"), [FIRST, *(pytest.param(*case, marks=pytest.mark.long) for case in EVERY)]
)


@every
@pytest.mark.slow
def test_scores_of_a_reference_are_those_of_the_forward_in_the_gradient(tmp_path, dtype, experts, seeds):
    """In the first update of a run the policy is its reference, which another program scores."""
    one = {"objective.kl_coef": 0.01, "updates.minibatches": 1, "updates.micro_batch_rows": 32, "steps": 1}
    for seed in range(seeds):
        (row,) = trained(tmp_path, seed, **exact(dtype, experts, **one))
        assert (row["check/sampler_equal"], row["kl/ref"]) == (1, 0)


@every
@pytest.mark.slow
def test_an_evaluation_is_the_same_with_any_number_of_slots(tmp_path, dtype, experts, seeds):
    run = assembly.build(validate(tiny_run.make_config(tmp_path, **exact(dtype, experts))))
    for seed in range(seeds):
        params = jax.tree.map(lambda x: 1.5 * x, run.model.init_sharded(jax.random.key(seed)))
        rates, rows = dataclasses.replace(run.evaluator, slots=0)(params)
        assert len({text for row in rows for text in row["sampled"]}) > len(rows)
        assert dataclasses.replace(run.evaluator, slots=5)(params) == (rates, rows)


RUNS = {
    "packed, top p": {"updates.layout": "packed", "rollout.top_k": 8, "rollout.top_p": 0.9},
    "R3 of logits": {"replay.mode": "R3", "replay.what": "logits"},
    "shared": {"updates.layout": "shared", "updates.shuffle": "groups"},
    "LoRA, few slots": {"lora.rank": 2, "rollout.slots": 5, "replay.mode": "R3"},
    "a temperature": {"rollout.temperature": 0.8},
}
CHOSEN = {"shared": ("bfloat16", 0, 1), "a temperature": ("float32", 8, 1)}  # what CI takes; others: FIRST


@pytest.mark.parametrize(
    ("changes", "dtype", "experts", "seeds"),
    [
        pytest.param(changes, *case, id="-".join([name, *map(str, case)]), marks=[pytest.mark.long] * (case[2] > 1))
        for name, changes in RUNS.items()
        for case in [CHOSEN.get(name, FIRST), *EVERY]
        if not (case[1] and name == "shared")  # that layout serves dense models
    ],
)
@pytest.mark.slow
def test_sampler_and_trainer_of_a_run(tmp_path, changes, dtype, experts, seeds):
    fields = {"updates.micro_batch_rows": 16, "steps": 2}
    for seed in range(seeds):
        rows = trained(tmp_path, seed, **exact(dtype, experts, **fields | changes))
        assert [(row["check/sampler_equal"], row.get("routing/flips_sampler_old", 0)) for row in rows] == [(1, 0)] * 2


@every
@pytest.mark.slow
def test_answers_of_a_policy_that_has_not_moved(tmp_path, dtype, experts, seeds):
    """`check/sampler_equal` leaves out tokens of an older policy, which at a rate of 0 is the one of now."""
    still = {"rollout.lag": 1, "optimizer.learning_rate": 0.0, "steps": 3, "replay.mode": "R3"}
    for seed in range(seeds):
        rows = trained(tmp_path, seed, **exact(dtype, experts, **still))
        assert [row["rollout/age_max"] for row in rows] == [0, 1, 1]
        assert [(row["kl/sampler"], row.get("routing/flips_sampler_old", 0)) for row in rows] == [(0, 0)] * 3
