"""The table of the page on turns comes out of its committed curves, and those out of DIRs of its sweeps."""

import functools

import pytest

from experiments.turns import curves
from tests.reference.synthetic_runs import study_of


def test_the_page_shows_the_curves():
    page = (curves.FILE.parents[1] / "README.md").read_text()
    assert curves.table(curves.curves()) in page


def test_a_sweep_replaces_its_game_and_pairs_its_seeds(tmp_path, monkeypatch):
    """Ends of GSPO minus GRPO: 0.1, 0.1, 0.2, 0.2, 0.4 have mean 0.2 and standard error sqrt(0.06 / 4 / 5) = 0.0548,
    and t of 4 degrees is 2.776."""
    gains, runs = (0.1, 0.1, 0.2, 0.2, 0.4), {}
    for seed, gain in enumerate(gains):
        for arm, end in (("GRPO", 0.5), ("GSPO", 0.5 + gain)):
            ends = [{"step": step, "eval/greedy": 1.0, "eval/reward": value} for step, value in ((0, 0.25), (2, end))]
            runs[arm, "", seed] = [ends[0], {"step": 1}, ends[1]]
    study_of(tmp_path / "guess", runs)
    monkeypatch.setattr(curves, "FILE", tmp_path / "curves.csv")
    curves.FILE.write_text(
        ",".join(curves.FIELDS) + "\nguess,GRPO,7,0,0.1,0.1\ncalculator,PPO,0,0,0.5,0.5\ncalculator,GRPO,0,0,1,1\n"
    )
    curves.write([tmp_path / "guess"])
    found = curves.curves()
    assert {game: {arm: list(own) for arm, own in arms.items()} for game, arms in found.items()} == {
        "calculator": {"PPO": ["0"], "GRPO": ["0"]},
        "guess": {"GRPO": [*"01234"], "GSPO": [*"01234"]},
    }
    table = curves.table(found)
    assert "| guess | GSPO | 5 | 2 | 1.000 -> 1.000 | 0.250 -> 0.700 | 1 | +0.200 [+0.048, +0.352], detectable" in table
    assert "| calculator | PPO | 1 | 0 | 0.500 -> 0.500 | 0.500 -> 0.500 | 1 | -0.500 (n = 1) |" in table
    curves.draw(found, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_the_lines_of_the_figure_are_the_values_of_their_policies():
    """Uniform guesses among the numbers that are left, every number being the hidden one with equal chance."""

    @functools.cache
    def uniform(left, turns):
        if not left or not turns:
            return 0.0
        below = sum(place * uniform(place, turns - 1) for place in range(left))  # and as much above
        return 1 / left + 2 * below / left**2

    assert uniform(31, 5) == pytest.approx(curves.PLAY["guess"]["uniform"], abs=5e-4)
    assert curves.PLAY["guess"]["blind"] == pytest.approx(5 / 31, abs=5e-4)
