"""The cost of samplers that choose other experts, and what remedies win back, from runs by hand."""

import pytest

from experiments.routing_replay import samplers
from tests.reference.synthetic_runs import study_of

# Sampler -> arm -> accuracy at the end by the trainer's and by the sampler's router, and k3.
ENDS = {
    "exact": {"GRPO": (0.9, None, 1e-13)},
    "bias": {"GRPO": (0.7, 0.8, 0.1), "GRPO+R3": (0.8, 0.75, 0.001)},
    "bfloat16": {"GRPO": (0.9, None, 1e-4)},
    "router frozen, exact": {"GRPO": (0.8, None, 1e-13)},
    "router frozen, bias": {"GRPO": (0.75, None, 0.1)},
}


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Ten seeds from 800, each 0.01 above the one before; GRPO with another sampler ends 0.01 above or below that."""
    runs = {}
    for sampler, arms in ENDS.items():
        for arm, (exact, under, k3) in arms.items():
            for seed in range(800, 810):
                more = 0.01 * (seed - 800)
                off = 0.01 * (-1) ** (seed // 2) if arm == "GRPO" and "exact" not in sampler and seed < 808 else 0.0
                end = {
                    "step": 1,
                    "eval/pass_at_1": exact + more + off,
                    "kl/sampler": k3,
                    "routing/flips_sampler_old": 0.4,
                }
                end |= {} if under is None else {"eval/sampler_pass_at_1": under + more + off}
                runs[arm, sampler, seed] = [{"step": 0, "eval/pass_at_1": 0.6 + more}, end]
    return study_of(tmp_path_factory.mktemp("sweep"), runs)


def test_the_cost_is_by_seed_and_router(study):
    found = {tuple(one.labels): one for one in samplers.cost(study)}
    gains = "+0.300 [+0.300, +0.300]"
    assert found.keys() == {
        (gains, "bias", "trainer's"),
        (gains, "bias", "sampler's"),
        (gains, "bfloat16", "trainer's"),  # by rounding alone the sampler's router has no number
        ("+0.200 [+0.200, +0.200]", "router frozen, bias", "trainer's"),  # minus the exact sampler with it frozen
    }
    assert found["+0.200 [+0.200, +0.200]", "router frozen, bias", "trainer's"].whole.mean == pytest.approx(-0.05)
    whole = found[gains, "bias", "trainer's"]
    assert (whole.whole.n, whole.whole.mean) == (10, pytest.approx(-0.2))
    assert {name: batch.n for name, batch in whole.batches.items()} == {"seeds below 805": 5, "seeds from 805": 5}


def test_what_is_won_back_is_to_the_same_sampler(study):
    found = {tuple(one.labels): one.whole.mean for one in samplers.won_back(study)}
    assert found == {
        ("bias", "trainer's", "GRPO+R3"): pytest.approx(0.1),
        ("bias", "sampler's", "GRPO+R3"): pytest.approx(-0.05),
    }


def test_the_gap_that_a_remedy_leaves_stands_beside_it(study):
    rows = samplers.gaps(study)
    first = [["exact", "GRPO"], ["bias", "GRPO"], ["bias", "GRPO+R3"], ["bfloat16", "GRPO"]]
    assert [row[:2] for row in rows[:4]] == first
    assert rows[2][2:] == ["10", "40.00 %", "1.0e-03 (1 %)", "0.845", "0.795"]
