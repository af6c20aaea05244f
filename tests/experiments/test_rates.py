"""The highest stable rate of `curves`: where the end crosses the start, and what happens at the edges."""

import numpy as np
import pytest

from experiments.routing_replay.rates import Curves, at_best, highest_stable, table
from tests.reference.synthetic_runs import study_of

RATES = (1e-5, 1e-4, 1e-3)


def test_the_crossing_lies_on_the_line_over_the_logarithm():
    """From +0.1 at 1e-4 to -0.3 at 1e-3 the line crosses zero at a quarter of the decade."""
    rate, edge = highest_stable(RATES, (0.2, 0.1, -0.3))
    assert (rate, edge) == (pytest.approx(10**-3.75), False)


@pytest.mark.parametrize(("gains", "expected"), [((-0.1, 0.0, 0.2), (1e-3, True)), ((-0.1, -0.2, -0.3), (1e-5, True))])
def test_an_edge_is_an_edge(gains, expected):
    """An arm that bears every rate from its best on, though at a lower one nothing moves; and one that bears none."""
    assert highest_stable(RATES, gains) == expected


def test_the_table_of_a_sweep(tmp_path):
    """Two seeds of GRPO cross at 10**-3.75 and 10**-3.25, of GSPO at the last rate; the third seed is not complete."""
    gains = {
        ("GRPO", 0): (0.2, 0.1, -0.3),
        ("GRPO", 1): (0.2, 0.3, -0.1),
        ("GSPO", 0): (0.1, 0.1, 0.1),
        ("GSPO", 1): (0.2, 0.2, 0.2),
        ("GRPO", 2): (0.2,),
    }
    runs = {}
    for (arm, seed), values in gains.items():
        for rate, gain in zip(RATES, values, strict=False):
            ends = ((0, 0.5), (30, 0.5 + gain))
            runs[arm, f"N = 8, lr {rate:g}", seed] = [{"step": step, "eval/pass_at_1": x} for step, x in ends]
    study = study_of(tmp_path, runs)
    assert Curves(study, "N = 8").seeds == ["0", "1"]
    grpo, gspo = table(study)
    np.testing.assert_allclose(Curves(study, "N = 8").stable(0)[0], [10**-3.75, 10**-3.25])
    assert grpo[:5] == ["N = 8", "GRPO", "0.700", "0.700", "0.300"]
    assert grpo[5].startswith("0.00032 [")
    assert grpo[6:] == ["0 of 2", "", ""]
    assert gspo[6] == "2 of 2"
    assert gspo[7].startswith("3.16 [")  # half a decade above GRPO
    # A loss of 0.3 counted as 0.05: from +0.1 the line crosses zero at 2/3 of the decade, from +0.3 to -0.05 at 6/7.
    np.testing.assert_allclose(Curves(study, "N = 8").stable(0, 0.05)[0], [10 ** (-4 + 2 / 3), 10 ** (-4 + 6 / 7)])
    best = at_best(study)
    assert [row[:4] for row in best] == [["N = 8", "GRPO", "1e-05", "0.700"], ["N = 8", "GSPO", "1e-05", "0.650"]]
    assert best[1][4].startswith("-0.050 [")
