"""The tables of the experiments' pages come out of their committed data: rows recomputed, word for word."""

import functools
import tarfile
from pathlib import Path

import numpy as np
import pytest

from experiments.lineage.figures import table
from experiments.preferences.tables import change_table, model_table, over_table
from experiments.routing_replay import branches
from experiments.routing_replay.dose import table as doses
from experiments.routing_replay.rates import table as rates
from jaxrl_llm.reporting.comparisons import batch_table, compare
from jaxrl_llm.reporting.read import CLIPPED, load
from jaxrl_llm.reporting.tables import routing_table

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
SAMPLED = "held-out sampled, end"


@functools.cache
def page(experiment):
    """The lines of a page, without emphasis; a table's row on one line."""
    return (EXPERIMENTS / experiment / "README.md").read_text().replace("**", "").splitlines()


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")

    @functools.cache
    def unpacked(experiment, archive, name):
        with tarfile.open(EXPERIMENTS / experiment / "results" / f"{archive}.tar.xz") as packed:
            members = [m for m in packed if m.name.startswith(f"{name}/") and not m.name.endswith(".png")]
            packed.extractall(folder, members, filter="data")
        return load(folder / name)

    return unpacked


def differences(study, condition):
    """{arm: "-0.018 [-0.037, +0.001]"} of held-out sampled accuracy; "0" where a pair of arms is identical."""
    compared = [c for c in compare(study, condition) if c.outcome.name == SAMPLED]
    return {
        c.arm: "0"
        if c.difference.identical
        else f"{c.outcome.signed(c.difference.mean)} {c.outcome.interval(c.difference.low, c.difference.high)}"
        for c in compared
    }


def row(experiment, arm, *parts):
    """Whether a line of the page begins with the arm and holds all parts."""
    return any(
        line.startswith("|") and arm in line and all(part in line for part in parts) for line in page(experiment)
    )


def test_both_batches_of_seeds(study):
    seeds = study("routing_replay", "seeds", "seeds")
    header, rows = batch_table(seeds, "")
    assert header[2:4] == ["b4eed2e", "a1a26ae"]
    checked = 0
    for outcome, arm, first, second, p in rows:
        if arm != "GRPO+R3" and outcome != "rollouts without collapse":  # R3 equals R2, the page says
            cells = [cell.removesuffix(" (5)") for cell in (first, second)]
            assert row("routing_replay", arm, f"| {outcome} | {arm} | {cells[0]} | {cells[1]} |", f"| {p} |"), arm
            checked += 1
    assert checked == 9


LINEAGE = [  # metric, arm, mean, difference; what the page makes of it
    ("training reward, 6 tokens", "PPO", "0.707", "-0.075 [-0.115, -0.0346]", "0.075 [0.035, 0.115] below"),
    ("training reward, 21 tokens", "PPO", "0.755", "-0.044 [-0.105, +0.0166]", "0.044 [-0.017, +0.105] at 21"),
    ("entropy (nats per token)", "+ clip-higher", "0.306", "+0.0164 [-0.0324, +0.0652]", "+0.016 [-0.032, +0.065]"),
    ("gradient weight, rare tokens with A > 0", "+ clip-higher", "0.703", "+0.0784 [+0.00622, +0.15]", "0.62 and"),
    ("held-out, one of four samples right", "+ dynamic sampling", "0.552", "+0.0977 [+0.0463, +0.149]", "+0.098 ["),
    ("variance of the token ratio", "GRPO, dense model", "0.0275", "-0.000864 [-0.0781, +0.0764]", "0.028 too, -0.001"),
    ("gradient weight, A < 0", "GSPO", "0.176", "-0.754 [-0.768, -0.741]", "0.93, -0.754 [-0.768, -0.741]"),
]


def test_the_lineage(study):
    page = " ".join((EXPERIMENTS.parent / "docs" / "lineage.md").read_text().split())
    lines = table(study("lineage", "lineage", "lineage")).splitlines()
    for metric, arm, mean, difference, quoted in LINEAGE:
        assert any(f"| {metric} | {arm} | {mean} | {difference} |" in line for line in lines), (metric, arm)
        assert quoted in page


def test_preferences(study):
    """Every row of the comparison with the rule, of over-optimisation and of the reward models is in the page."""
    lines = [line.strip("| ") for line in page("preferences")]
    for name, make in (("methods", change_table), ("over", over_table), ("noise", model_table)):
        for cells in make(study("preferences", "preferences", name)):
            assert " | ".join(cells).strip("| ") in lines, (name, cells)


def test_the_arms_of_seeds(study):
    seeds = study("routing_replay", "seeds", "seeds")
    for arm in seeds.arms:
        runs = seeds.select(arm, "")

        def mean(key, runs=runs, **kwargs):
            return np.mean([run.average(key, **kwargs) for run in runs])

        start = np.mean([run.value("eval/greedy", at=0) for run in runs])
        ends = f"| {start:.3f} -> {mean('eval/greedy', last=1):.3f} | {mean('eval/pass_at_1', last=1):.3f} |"
        assert row("routing_replay", f"| {arm} |", ends, f"| {mean('reward/mean', last=5):.3f} |"), arm
        clipped = mean(CLIPPED)
        if clipped:
            assert row("routing_replay", f"| {arm} |", ends, f"| {clipped * 100:.1f} % |"), arm


def test_full_at_every_n(study):
    full = study("routing_replay", "full", "full")
    for condition in full.conditions:
        for arm, difference in differences(full, condition).items():
            assert row("routing_replay", arm, f"| {difference} |"), (condition, arm)


def test_branches(study):
    """Both tables, every row."""
    branch = study("routing_replay", "branch", "branch")
    for cells in (*branches.table(branch, second=4), *branches.routing(branch)):
        assert row("routing_replay", f"| {cells[1]} |", f"| {' | '.join(cells)} |"), cells


@pytest.mark.parametrize("name", ["control", "strong", "strong2"])
def test_noisy_samplers(study, name):
    """Every line of the table of differences."""
    noisy = study("routing_replay", name, name)
    for cells in branches.table(noisy, second=8) if name == "strong2" else branches.matrix(noisy)[1:]:
        assert f"| {' | '.join(cells)} |" in page("routing_replay"), cells


def test_doses(study):
    """Every setting of the table of doses."""
    for cells in doses(study("routing_replay", "dose", "dose"), "GRPO+R2"):
        assert f"| {' | '.join(cells)} |" in page("routing_replay"), cells


def test_rate_curves(study):
    for cells in rates(study("routing_replay", "curves", "curves")):
        assert f"| {' | '.join(cells)} |" in page("routing_replay"), cells


@pytest.mark.parametrize("name", ["mismatch", "what"])
def test_mismatch_and_what(study, name):
    found = differences(study("routing_replay", "mismatch_what", name), "")
    text = "\n".join(page("routing_replay"))
    assert len(found) > 1
    for arm, difference in found.items():
        assert difference in text, arm


def test_routing_shares_weighted_by_variance(study):
    """The page's table of shares: one row for each of these sweeps and settings, with GRPO and GRPO+R2."""
    places = [("seeds", "seeds", ""), ("mismatch_what", "mismatch", "")]
    places += [("full", "full", f"N = {n}") for n in (8, 16, 32)]
    for archive, name, condition in places:
        _, rows = routing_table(study("routing_replay", archive, name), condition)
        by_arm = {cells[0]: cells for cells in rows}
        grpo, replay = by_arm["GRPO"], by_arm["GRPO+R2"]
        parts = [f"| {one[2].replace('%', ' %')} | {one[4].replace('%', ' %')} |" for one in (grpo, replay)]
        assert row("routing_replay", f"`{name}`", condition, *parts), (name, condition, parts)


def test_real_model(study):
    found = differences(study("real_model", "real_model", "real_model"), "")
    assert f"sampled {found['DAPO']}" in "\n".join(page("real_model"))


@pytest.mark.parametrize("name", ["clip_range", "temperatures", "aggregation", "dapo_parts", "kl"])
def test_ablations(study, name):
    one = study("ablations", "ablations", name)
    text = "\n".join(page("ablations"))
    for condition in one.conditions:
        for arm, difference in differences(one, condition).items():
            assert difference in text, (condition, arm)
