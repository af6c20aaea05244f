"""What stands of branches beside earlier sweeps: a claim has an interval on one side of zero in two of them."""

from pathlib import Path

import pytest

from experiments.routing_replay.tables import replicated
from jaxrl_llm.report.read import Branch, Study

SPREAD = (-0.02, -0.01, 0.0, 0.0, 0.01, 0.02)  # of six trajectories: sd 0.014, an interval of 0.0148 on either side


def study(**gains):
    """One state of each trajectory, from which GRPO stays at 0.5 and every other arm gains so much on average."""
    runs = []
    for arm, gain in {"GRPO": 0.0, **gains}.items():
        for seed, own in enumerate(SPREAD):
            end = 0.5 + (gain + own if arm != "GRPO" else 0.0)
            rows = [{"step": 1, "eval/pass_at_1": 0.5}, {"step": 2, "eval/pass_at_1": end}]
            runs.append(Branch(Path("none"), arm, "lr 1", str(seed), "1", written=rows))
    return Study("", runs, "GRPO", {"rollouts": 1})


@pytest.mark.parametrize(
    ("gain", "before", "stands"),
    [
        (0.1, 0.05, "claim"),
        (-0.1, -0.05, "claim"),
        (0.1, 0.01, "estimate"),  # the earlier interval includes zero
        (0.1, -0.05, "estimate"),  # the earlier one lies on the other side
        (0.01, 0.05, "not seen"),
    ],
)
def test_what_stands(gain, before, stands):
    baseline, arm = replicated(study(SAT=gain), study(SAT=before))
    assert baseline == ["lr 1", "GRPO", "6", "nan %", "(0.500 -> 0.500)", "", "", "", ""]
    assert arm[4].startswith(f"{gain:+.3f} [{gain - 0.0148:+.3f}, {gain + 0.0148:+.3f}]")
    assert arm[6].startswith(f"{before:+.3f} [")
    assert arm[-1] == stands


def test_an_arm_that_no_earlier_sweep_has_is_an_estimate():
    assert replicated(study(SAT=0.1), study(GSPO=0.1))[1][-3:] == ["", "", "estimate"]


def test_against_another_arm():
    """GSPO less SAT: the spreads are equal and cancel, so that the difference is exact."""
    _, row = replicated(study(GSPO=0.1, SAT=0.04), study(GSPO=0.1, SAT=0.04), baseline="SAT", others=["GSPO"])
    assert row[:2] == ["lr 1", "GSPO"]
    assert row[4].startswith("+0.060 [+0.060, +0.060]")
    assert row[-1] == "claim"
