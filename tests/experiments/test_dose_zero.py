"""The tables of the study of dose zero, from runs by hand; and what each of its arms computes."""

import pytest

from experiments.numerics import dose_zero
from experiments.numerics import dose_zero_tables as tables
from experiments.numerics.dose_zero import ARMS, IN_BFLOAT16, arms, made

END = {"exact": 0.8, "fast": 0.7, "fast + R3": 0.7, "exact + R3": 0.8}


@pytest.fixture
def rows():
    """Five seeds of a mixture, of which fast loses 0.10 and R3 wins back nothing, to a thousandth."""
    found = []
    for rate in ("tuned", "too high"):
        for place, (arm, end) in enumerate(END.items()):
            for seed in range(5):
                accuracy = [0.75, end + 0.05 * seed + 0.001 * ((seed + place) % 3)]
                equal, k3 = ([1.0] * 2, [0.0] * 2) if "exact" in arm else ([0.0, 0.1], [1e-3, 3e-3])
                found.append({"model": "mixture", "rate": rate, "arm": arm, "seed": seed, "accuracy": accuracy})
                found[-1] |= {"check/sampler_equal": equal, "kl/sampler": k3, "routing/flips_sampler_old": equal}
    return found


def test_a_difference_is_paired_and_judged_by_the_rule_of_its_rate(rows):
    """Ends of fast minus exact: -0.1 and 0.001 times (1, 1, -2, 1, 1) by seed, mean -0.0996, standard error 0.0006."""
    d = tables.difference(rows, "mixture", "too high", ("fast", "exact"))
    assert (d.n, d.mean, tables.standard_error(d)) == (5, pytest.approx(-0.0996), pytest.approx(0.0006))
    found = {(cells[1], cells[2]): cells[-1] for cells in tables.differences(rows)}
    assert found == {
        ("tuned", "fast minus exact"): "open",
        ("tuned", "fast + R3 minus fast"): "harmless",
        ("tuned", "exact + R3 minus exact"): "harmless",
        ("too high", "fast minus exact"): "holds",
        ("too high", "fast + R3 minus fast"): "open",
        ("too high", "exact + R3 minus exact"): "harmless",
    }
    assert tables.verdict(tables.difference(rows[:8], "mixture", "tuned", ("fast", "exact")), "tuned", -1) == ""


def test_the_mismatch_of_an_arm_is_a_mean_over_steps_and_seeds(rows):
    table = tables.mismatch(rows)
    assert table[1][:3] + table[1][4:] == ["mixture", "too high", "fast", "0.750 -> 0.801", "5.00%", "2.0e-03", "5.00%"]
    assert table[0][5:7] == ["100.00%", "0"]
    assert len(tables.figure(rows).axes) == 2


def test_the_page_has_the_tables_of_the_data():
    rows, page = tables.read(tables.RESULTS), tables.RESULTS.parents[1].joinpath("README.md").read_text()
    first, second = tables.parted(rows)
    assert (len(first), len(second)) == (320, 110)
    for cells in [*tables.differences(first), *tables.batches(rows), *tables.mismatch(first)]:
        assert f"| {' | '.join(cells)} |" in page
    exact = [row for row in rows if "exact" in row["arm"]]
    assert all({*row["check/sampler_equal"]} == {1} and {*row["kl/sampler"]} == {0} for row in exact)


def test_every_arm_is_a_run_of_its_numerics():
    """In bfloat16, sampler and trainer; a dense model has no experts to replay."""
    assert set(arms("mixture")) - set(arms("dense")) == {"fast + R3", "exact + R3"}
    for arm in ("exact + R3", "GSPO fast"):
        fields = {**IN_BFLOAT16, "warm_start.steps": 0, **ARMS[arm]}
        settings = made("mixture", fields, 3).settings
        assert (settings.model.numerics, settings.seed) == ("exact" if "exact" in arm else "fast", 3)


@pytest.mark.slow
def test_a_run_of_an_exact_arm_has_no_mismatch(monkeypatch, tmp_path):
    monkeypatch.setattr(dose_zero, "STEPS", 2)
    small = {"warm_start.steps": 2, "warm_start.cache_dir": str(tmp_path), "evaluation.prompts": 8, "steps": 2}
    monkeypatch.setattr(dose_zero, "SETTING", dose_zero.SETTING | small)
    row = dose_zero.trained("mixture", "exact + R3", 8e-4, 0)
    assert (row["check/sampler_equal"], row["kl/sampler"], row["routing/flips_sampler_old"]) == (
        [1] * 2,
        [0] * 2,
        [0] * 2,
    )
    assert len(row["accuracy"]) == len(row["reward/mean"]) == 2
