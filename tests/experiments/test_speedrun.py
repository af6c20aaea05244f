"""The speedrun: when an entry has arrived, what a race says of two entries, what an entry may set; committed races."""

import json
import math
from pathlib import Path

import pytest

from experiments.speedrun import race

FOLDER = Path(race.__file__).parent
RESULTS = sorted(FOLDER.glob("results/*.json"))


def run(cpu_s, accuracy):
    return {"rehearsal_cpu_s": 9.0, "cpu_s": cpu_s, "accuracy": accuracy}


@pytest.mark.parametrize(
    ("accuracy", "rollout"),
    [
        ([0.7, 0.91, 0.89, 0.90, 0.92], 4),  # a lucky evaluation alone does not count
        ([0.95, 0.95], 1),
        ([0.7, 0.91], None),
        ([0.7], None),
    ],
)
def test_the_target_is_confirmed_by_a_second_evaluation(accuracy, rollout):
    assert race.arrived(accuracy) == rollout


def test_the_clock_stops_at_the_arrival():
    assert race.seconds(run([1.0, 2.0, 4.0, 8.0], [0.7, 0.8, 0.9, 0.9, 0.9])) == 7.0
    assert math.isnan(race.seconds(run([1.0, 2.0], [0.7, 0.8, 0.8])))


def raced(*ratios):
    """A race in which the baseline takes 4 s in each seed and the entry as many times that as `ratios` say."""
    there = [0.9, 0.9]
    runs = [{"baseline": run([4.0], there), "other": run([4.0 * r], there if r else [0.1, 0.1])} for r in ratios]
    return {"entries": {"baseline": {}, "other": {}}, "seeds": [{"seed": i, "runs": r} for i, r in enumerate(runs)]}


@pytest.mark.parametrize(
    ("ratios", "told", "word"),
    [
        # log-ratios -ln 2 -+ 0.1: the geometric mean is a half, t(0.975, 4) = 2.776, sd 0.1, error 0.1 / sqrt(5)
        ([0.5 * math.exp(x) for x in (-0.1, 0, 0, 0, 0.1)], "0.50 [0.46, 0.55]", "faster"),
        ([2.0, 2.0, 2.0, 2.0, 2.1], "2.02 [1.97, 2.08]", "slower"),
        ([0.5, 2.0, 1.0, 1.0, 1.0], "1.00 [0.54, 1.84]", "undecided"),
        ([0.5, 0.5, 0.6], "0.53 [0.41, 0.69]", "estimate only: 3 of 5 seeds"),
        ([0.5, 0.5, 0.0, 0.5, 0.5], "0.50 [0.50, 0.50]", "no arrival in 1 of 5"),
    ],
)
def test_the_table_of_a_race(ratios, told, word):
    lines = race.table(raced(*ratios)).splitlines()
    assert lines[2].startswith("| baseline | 1, 1, ")
    assert lines[3].endswith(f"| {told} | {word} |")


def test_several_entries_are_corrected_for_their_number():
    """p 0.026 of one entry alone; the smaller of two is doubled (Holm)."""
    ratios = [0.8, 1.0, 0.9, 0.8, 0.8]
    alone = raced(*ratios)
    assert race.table(alone).endswith("| faster |")
    for one, other in zip(alone["seeds"], [1.1, 0.9, 1.0, 1.2, 0.8], strict=True):
        one["runs"]["third"] = run([4.0 * other], [0.9, 0.9])
    alone["entries"]["third"] = {}
    assert [line.split(" | ")[-1] for line in race.table(alone).splitlines()[3:]] == ["undecided |", "undecided |"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"model.hidden_size": 8}', "sets model.hidden_size, which all entries share"),
        ('{"warm_start.steps": 800}', "sets warm_start.steps"),
        ('{"steps": 9}', "sets steps"),
        ("[1]", "holds [1]; write an object of fields"),
        ("{", "is no JSON"),
    ],
)
def test_an_entry_that_is_refused(tmp_path, text, said):
    entry = tmp_path / "mine.json"
    entry.write_text(text)
    with pytest.raises(ValueError, match=r"mine\.json") as refused:
        race.fields_of(entry)
    assert said in str(refused.value)


@pytest.mark.parametrize("entry", sorted(FOLDER.glob("entries/*.json")), ids=lambda path: path.stem)
def test_an_entry_is_a_config(entry):
    settings = race.settings_of(race.fields_of(entry), seed=3)
    assert (settings.seed, settings.warm_start.seed, settings.steps) == (3, 3, race.ROLLOUTS)
    assert settings.model.num_experts == 16


@pytest.mark.parametrize("result", RESULTS, ids=lambda path: path.stem)
def test_the_page_has_the_race(result):
    """Its table, and the entries as they were raced."""
    raced = json.loads(result.read_text())
    page = (FOLDER / "README.md").read_text()
    assert race.table(raced) in page
    assert f"{raced['date']}" in page
    assert raced["commit"][:7] in page
    for name, fields in raced["entries"].items():
        assert race.fields_of(FOLDER / "entries" / f"{name}.json") == fields
