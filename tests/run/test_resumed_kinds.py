"""Runs of every kind resume bit for bit: critics, replays, corrections and layouts that have state of their own."""

import functools

import pytest

from tests.reference import tiny_run
from tests.reference.exact_rollouts import EVERY

KINDS = {
    "separate critic": ("ppo", {"critic.kind": "separate", "objective.reward_kl_coef": 0.01}),
    "R3 packed": ("gspo", {"replay.mode": "R3", "updates.layout": "packed", "updates.micro_batch_rows": 16}),
    "R3 logits": ("grpo", {"replay.mode": "R3", "replay.what": "logits", "updates.minibatches": 4}),
    "R2 logits": (
        "grpo",
        {"replay.mode": "R2", "replay.what": "logits", "updates.epochs": 2, "objective.kl_coef": 0.01},
    ),
    "one update, bfloat16 rollout": (
        "grpo",
        {"updates.minibatches": 1, "rollout.dtype": "bfloat16", "objective.correction": "tis"},
    ),
    "warm-up": ("grpo", {"optimizer.warmup_steps": 5}),
    "cut samples": ("grpo", {"rollout.top_k": 8, "rollout.top_p": 0.9, "updates.minibatches": 1}),
    "exact": (
        "grpo",
        {"model.numerics": "exact", "model.dtype": "bfloat16", "rollout.dtype": "bfloat16", "replay.mode": "R3"},
    ),
    "DAPO": ("dapo", {"updates.length_buckets": 2, "updates.shuffle": "groups", "updates.aux_coef": 0.01}),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        pytest.param(
            *kind,
            id=name,
            marks=[pytest.mark.long] * (name not in ("separate critic", "R3 packed", "warm-up", "exact")),
        )
        for name, kind in KINDS.items()
    ],
)
def test_other_kinds_of_run_resume_too(folder, tmp_path, name, changes):
    """Interrupted by its number of steps after 1, gone on to 3, and the same as the run without a break."""
    tiny_run.assert_parts_are_the_whole(tmp_path, functools.partial(tiny_run.make_config, folder, name, **changes))
    assert [row["step"] for row in tiny_run.metrics(tmp_path / "parts")] == [0, 1, 2, 3]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("dtype", "experts", "seeds"), EVERY)
def test_an_exact_run_resumes(folder, tmp_path, dtype, experts, seeds):
    """Every model, type and seed of the exact tests; the mixture under R3."""
    fields = {"model.numerics": "exact", "model.dtype": dtype, "rollout.dtype": dtype}
    fields |= {"replay.mode": "R3"} if experts else {"model.num_experts": 0}
    for seed in range(seeds):
        make = functools.partial(tiny_run.make_config, folder, seed=seed, **fields)
        tiny_run.assert_parts_are_the_whole(tmp_path / str(seed), make)
