"""The figure of a learnt reward against the KL to the start."""

import numpy as np
import pytest

from jaxrl_llm.report.diagnostic_figures import no_learnt_reward, reward_against_kl
from jaxrl_llm.report.read import Run, Study
from tests.reference.synthetic_runs import write_rows


@pytest.fixture
def study(tmp_path):
    """Two seeds of an arm whose model's score rises with sqrt(KL) while the verifier's falls; one arm without KL."""
    for seed in range(2):
        rows = [
            {"step": k, "kl/ref_answer": float(k * k), "reward/reward_model": k + seed, "reward/mean": 1 - 0.1 * k}
            for k in range(1, 6)
        ]
        write_rows(tmp_path / f"no KL{seed}", rows)
    write_rows(tmp_path / "rule", [{"step": k, "reward/mean": 0.5} for k in range(1, 6)])
    runs = [Run(tmp_path / f"no KL{seed}", "no KL", seed=str(seed)) for seed in range(2)]
    return Study("", [*runs, Run(tmp_path / "rule", "rule", "other")], "no KL")


def test_means_over_seeds_against_the_root_of_the_kl(study):
    left, right = reward_against_kl(study, "").axes
    for ax, expected in ((left, [1.5, 2.5, 3.5, 4.5, 5.5]), (right, [0.9, 0.8, 0.7, 0.6, 0.5])):
        *seeds, middle = ax.get_lines()
        assert len(seeds) == 2
        np.testing.assert_allclose(middle.get_xdata(), [1, 2, 3, 4, 5])
        np.testing.assert_allclose(middle.get_ydata(), expected)


def test_why_there_is_nothing_to_draw(study):
    assert no_learnt_reward(study, "") == []
    assert no_learnt_reward(study, "other") == [
        "learnt reward against KL (reward/reward_model, kl/ref_answer not logged)"
    ]
