"""The study's page, README's findings and the introduction of docs/results.md quote the tables and nothing else."""

import re

import pytest

from experiments import results_page
from experiments.routing_replay import study_page
from experiments.routing_replay.table_rows import SLOT, filled, row_of, rows_under, rows_with, spans

TABLE = """
Whole runs: two arms,
by seed.

| rate | arm | n | pooled difference | detectable | stands |
| -- | -- | -- | -- | -- | -- |
| lr 0.1 | A | 10 | +0.030 [+0.010, +0.050] | 0.030 | claim |
| lr 0.1 | B | 8 | -0.004 [-0.012, +0.004] | 0.011 | no effect found |
| lr 0.2 | A | 10 | -0.250 [-0.300, -0.200] | 0.060 | batches differ |
"""


@pytest.fixture
def rows():
    return rows_under(TABLE, "Whole runs: two arms, by")


def test_a_slot_is_a_cell(rows):
    def cell(*names):
        return row_of(rows, *names[:-1])[names[-1]]

    text = filled("A {lr 0.1; A; result}. B {lr 0.1; B; marked}, off by {lr 0.1; B; size}.", cell)
    assert text == ("A +0.030 [+0.010, +0.050], n = 10: **claim**. B -0.004 [-0.012, +0.004] (0.011), off by 0.004.\n")
    assert row_of(rows, "lr 0.1", "B")["verdict"] == "no effect found (could detect 0.011)"
    assert row_of(rows, "lr 0.2", "A")["verdict"] == "batches differ"


def test_a_span_is_ordered_by_number(rows):
    assert spans(rows)["pooled difference"] == "-0.250 to +0.030"
    assert spans(rows_with(rows, "lr 0.1"))["n"] == "8 to 10"
    assert "stands" not in spans(rows)


@pytest.mark.parametrize("cells", [("lr 0.1",), ("lr 0.3", "A")], ids=["two rows", "no row"])
def test_a_slot_names_one_row(rows, cells):
    with pytest.raises(ValueError, match="rows have"):
        row_of(rows, *cells)


def test_a_caption_names_one_table():
    with pytest.raises(ValueError, match="0 tables"):
        rows_under(TABLE, "Whole runs: three")
    with pytest.raises(ValueError, match="2 tables"):
        rows_under(TABLE * 2, "Whole runs")


def test_names_that_stand_twice_have_their_neighbours():
    (row,) = rows_under(
        "Ends.\n\n| | N = 8 | gain | N = 32 | gain |\n| -- | -- | -- | -- | -- |\n|  | 1 | 2 | 3 |  |\n", "Ends"
    )
    assert (row["N = 8 gain"], row["N = 32 gain"]) == ("2", "")


def texts():
    readme = study_page.README.read_text()
    results = results_page.PAGE.read_text()
    rest = results[results.index("\n## ") :]
    return {
        "the study": ((study_page.HERE / "README.md").read_text(), study_page.page()),
        "README": (readme, study_page.readme(readme)),
        "results": (results.removesuffix(rest), results_page.introduction(rest)),
    }


@pytest.mark.parametrize("name", ["the study", "README", "results"])
def test_every_number_is_that_of_its_table(name):
    written, computed = texts()[name]
    assert written == computed


@pytest.mark.parametrize(
    ("name", "number", "wrong"),
    [
        ("the study", "0.759 -> 0.423", "0.759 -> 0.432"),  # an end
        ("the study", "40.77 % of its experts", "47.70 % of its experts"),  # a share
        ("the study", "n = 128: **claim**", "n = 182: **claim**"),
        ("the study", "(could detect 0.009)", "(could detect 0.006)"),
        ("the study", "| 1e-4, 2.5e-5 |", "| 1e-4, 5e-5 |"),  # a rate
        ("README", "GRPO loses 0.083", "GRPO loses 0.043"),
        ("README", "+0.240 [+0.180, +0.300]", "+0.240 [+0.108, +0.300]"),
        ("results", "from 0.762 to 0.554", "from 0.762 to 0.545"),
    ],
)
def test_a_wrong_number_is_seen(name, number, wrong):
    written, computed = texts()[name]
    assert number in written
    assert written.replace(number, wrong) != computed


# Numbers that no table has: rates, papers and pull requests, the two levels of a test and the published k3.
SETTINGS = re.compile(
    r"\d(?:\.\d)?e-\d|\d{4}\.\d{5}|#\d+|p (?:of equal means is )?below 0\.05|(?:95|80) %|dose 0\.\d+|bias of 0\.1 "
)
RESULT = re.compile(r"[-+]?\d*\.\d+|\d+ %|n = \d+|\d+ (?:of \d+|seeds|trajectories|groups)|\d -> \d")


@pytest.mark.parametrize(
    "text",
    [
        (study_page.HERE / "study_page.txt").read_text(),
        (study_page.HERE / "study_findings.txt").read_text(),
        results_page.INTRODUCTION,
    ],
    ids=["the study", "README", "results"],
)
def test_no_result_is_typed(text):
    typed = SETTINGS.sub("", SLOT.sub("", text))
    assert [match[0] for match in RESULT.finditer(typed)] == []


def test_a_typed_result_is_seen():
    for typed in ("gains +0.031 over", "7 to 16 %", "n = 10", "9 of 30 collapse", "over 30 seeds"):
        assert RESULT.search(SETTINGS.sub("", typed)), typed


def above_zero(cell):
    return float(re.findall(r"[-+]\d+\.\d+", cell)[1]) > 0


def test_what_the_page_says_of_all_whole_runs():
    """One gain on sorting where GRPO learns is a claim; GSPO's claims at equal rates end below their start.

    On countdown at the rates tuned on sorting GSPO minus GRPO is a claim in all four conditions.
    """
    runs, ends = study_page.table("runs"), study_page.table("ends")
    untuned = [row for row in rows_with(runs, "GSPO minus GRPO") if re.match("countdown.*tuned", row["model, rate"])]
    assert [row["stands"] for row in untuned] == ["claim"] * 4
    gains = [row for row in runs if row["stands"] == "claim" and above_zero(row["pooled difference"])]
    gains = {(row["model, rate"], row["arms"]): row for row in gains if row["arms"].endswith("minus GRPO")}
    learnt = [name for name, row in gains.items() if above_zero(row["a run of GRPO gains"])]
    sorting = [name for name in learnt if name[0].startswith("sorting")]
    assert sorting == [("sorting, mixture, N = 32, lr 0.0002", "GRPO clip 1e-08, both sides minus GRPO")]
    above = [condition for condition, arms in gains if arms == "GSPO minus GRPO" and "tuned" not in condition]
    assert above
    for condition in above:
        for arm in ("GRPO", "GSPO"):
            row = row_of(ends, condition, arm)
            assert float(row["end"]) < float(row["start"]), condition


ARMS = ("GRPO", "GSPO", "GRPO clip 1e-08, both sides", "GRPO, negatives cut")


def ends_of(condition):
    return {arm: row_of(study_page.table("ends"), condition, arm) for arm in ARMS}


def test_what_the_page_says_of_gspo_at_too_high_a_rate():
    """It loses least on sorting at N = 32; at N = 8 no arm loses; it ends lowest on countdown."""

    def end(row):
        return float(row["end"])

    sorting = ends_of("sorting, mixture, N = 32, lr 0.0004")
    assert max(sorting, key=lambda arm: end(sorting[arm])) == "GSPO"
    assert all(end(row) < float(row["start"]) for row in sorting.values())
    assert all(end(row) >= float(row["start"]) for row in ends_of("sorting, mixture, N = 8, lr 0.0004").values())
    countdown = ends_of("countdown, mixture, N = 32, lr 0.0004")
    assert min(countdown, key=lambda arm: end(countdown[arm])) == "GSPO"


def test_what_the_page_says_of_routing():
    """One interval of R2's ten lacks zero; the least share comes with the load-balance loss."""
    effects = {row["setting"]: re.findall(r"[-+]\d+\.\d+", row["effect of R2"]) for row in study_page.table("dose")}
    assert len(effects) == 10
    assert [name for name, (_, low, high) in effects.items() if low[0] == high[0]] == ["8 layers"]
    shares = {row["setting"]: [] for row in study_page.table("shapes")}
    for row in study_page.table("shapes"):
        shares[row["setting"]].append(float(row["share"].split()[0]))
    least = min(shares, key=lambda name: min(shares[name]))
    assert least.endswith("balance 0.01")
    without = min((name for name in shares if name.endswith("balance 0")), key=lambda name: min(shares[name]))
    assert (without, min(shares[without])) == ("4 layers, top-4 of 16, balance 0", 8.1)


def test_measured_over_fit():
    """12.0 % of 14.7 % is 0.8, 72.5 % of 14.4 % is 5.0."""
    found = {row["run"]: row["measured / fit"] for row in study_page.table("upcycled")}
    assert found["GRPO, lr 2e-05, seed 720"] == "0.8"
    assert found["GRPO, lr 3e-06, seed 720"] == "5.0"
