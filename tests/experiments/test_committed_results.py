"""The tables of the experiments' pages come out of their committed data: rows recomputed, word for word."""

import functools
import re
from pathlib import Path

import numpy as np
import pytest

from experiments import results_page
from experiments.lineage.figures import table
from experiments.preferences.tables import change_table, model_table, over_table
from experiments.routing_replay import tables
from experiments.routing_replay.table_parts import unpacked
from jaxrl_llm.report.comparisons import compare

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
SAMPLED = "held-out sampled, end"
pytestmark = pytest.mark.skipif(
    not any(EXPERIMENTS.glob("*/results/*.tar.xz")), reason="a source distribution is without the archives of runs"
)


@functools.cache
def page(experiment, name="README.md"):
    """The lines of a page, without emphasis; a table's row on one line."""
    return (EXPERIMENTS / experiment / name).read_text().replace("**", "").splitlines()


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")

    @functools.cache
    def of(experiment, archive, name):
        return unpacked(EXPERIMENTS / experiment / "results" / f"{archive}.tar.xz", name, folder)

    return of


def differences(study, condition):
    """{arm: "-0.018 [-0.037, +0.001]"} of held-out sampled accuracy; "0" where a pair of arms is identical."""
    compared = [c for c in compare(study, condition) if c.outcome.name == SAMPLED]
    return {
        c.arm: "0"
        if c.difference.identical
        else f"{c.outcome.signed(c.difference.mean)} {c.outcome.interval(c.difference.low, c.difference.high)}"
        for c in compared
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", tables.PAGES)
def test_routing_replay(name, folder):
    """Every page of tables is what the committed data give, letter for letter."""
    assert (tables.RESULTS / f"{name}.md").read_text() == tables.page(name, folder)


NUMBER = r"([-+]?\d+\.\d+)"
INTERVAL = re.compile(rf"{NUMBER}\s+\[{NUMBER},\s+{NUMBER}\]")


def intervals(lines):
    """Every 0.065 [0.043, 0.086] in the lines; "0.029 below" is the same as -0.029."""
    for found in INTERVAL.finditer(" ".join(lines)):
        middle, low, high = map(float, found.groups())
        yield (middle, low, high) if middle >= 0 else (-middle, -high, -low)


def test_every_interval_of_the_protocol_stands_in_a_table():
    """`test_study_page` holds the page itself to its rows, number by number."""
    written = [line for path in sorted(tables.RESULTS.glob("*.md")) for line in path.read_text().splitlines()]
    quoted = set(intervals(page("routing_replay", "protocol.md")))
    assert quoted
    assert quoted <= set(intervals(written))


LINEAGE = [  # metric, arm, mean, difference; what the page makes of it
    ("training reward, 6 tokens", "PPO", "0.707", "-0.075 [-0.115, -0.0346]", "by 0.075 [0.035, 0.115] at 6"),
    ("training reward, 21 tokens", "PPO", "0.755", "-0.044 [-0.105, +0.0166]", "by 0.044 [-0.017, +0.105] at 21"),
    ("entropy (nats per token)", "+ clip-higher", "0.306", "+0.0164 [-0.0324, +0.0652]", "+0.016 [-0.032, +0.065]"),
    ("gradient weight, rare tokens with A > 0", "+ clip-higher", "0.703", "+0.0784 [+0.00622, +0.15]", "0.70 instead"),
    ("held-out, one of four samples right", "+ dynamic sampling", "0.552", "+0.0977 [+0.0463, +0.149]", "+0.098 ["),
    ("variance of the token ratio", "GRPO, dense model", "0.0275", "-0.000864 [-0.0781, +0.0764]", "0.028 too, -0.001"),
    ("gradient weight, A < 0", "GSPO", "0.176", "-0.754 [-0.768, -0.741]", "0.93, -0.754 [-0.768, -0.741]"),
]


@pytest.mark.slow
def test_the_lineage(study):
    page = " ".join((EXPERIMENTS.parent / "docs" / "lineage.md").read_text().replace("\\", "").split())
    lines = table(study("lineage", "lineage", "lineage")).splitlines()
    for metric, arm, mean, difference, quoted in LINEAGE:
        assert any(f"| {metric} | {arm} | {mean} | {difference} |" in line for line in lines), (metric, arm)
        assert quoted in page


@pytest.mark.slow
def test_preferences(study):
    """Every row of the comparison with the rule, of over-optimisation and of the reward models is in the tables.

    What the page quotes of them is there too.
    """
    lines = [line.strip("| ") for line in page("preferences", "results/tables.md")]
    for name, make in (("methods", change_table), ("over", over_table), ("noise", model_table)):
        for cells in make(study("preferences", "preferences", name)):
            assert " | ".join(cells).strip("| ") in lines, (name, cells)
    assert set(intervals(page("preferences"))) <= set(intervals(lines))


def test_real_model(study):
    found = differences(study("real_model", "real_model", "real_model"), "")
    assert f"sampled {found['DAPO']}" in "\n".join(page("real_model"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kl", "clip_range", "temperatures", "aggregation", "dapo_parts"])
def test_ablations(study, name):
    one = study("ablations", "ablations", name)
    lines = page("ablations", "results/tables.md")
    for condition in one.conditions:
        for arm, difference in differences(one, condition).items():
            assert difference in "\n".join(lines), (condition, arm)
    assert set(intervals(page("ablations"))) <= set(intervals(lines))


def test_the_results_page_in_part(tmp_path):
    """A task's table, the comparison with TRL and the races; `test_the_results_page` has all."""
    page = results_page.PAGE.read_text()
    assert results_page.section("Sums of two numbers, a published model", tmp_path) in page
    assert results_page.in_trl() in page
    assert results_page.speedrun() in page


@pytest.mark.slow
def test_the_results_page():
    assert results_page.PAGE.read_text() == results_page.page()


def test_what_was_not_logged_is_not_kept():
    """Seconds are of rollouts and updates; the median over runs, where every run has them."""

    class Kept:
        def __init__(self, *update):
            self.update = np.array(update)

        def series(self, key):
            return None, self.update if key == "time/update_s" else np.array([1.0, 1.0])

    assert results_page.seconds([Kept(1.0, 2.0), Kept(3.0, 4.0), Kept(9.0, 9.0)]) == "9"
    assert results_page.seconds([Kept(1.0), Kept()]) == "not kept"
