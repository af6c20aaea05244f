"""What the tables of a report say: pairs, corrections, commits, branches, and the configuration as it was used."""

import itertools
import json

import numpy as np
import pytest

from jaxrl_llm.report.comparisons import compare, sentence
from jaxrl_llm.report.read import load
from jaxrl_llm.report.tables import arm_table, config_table, difference_table, resolved
from jaxrl_llm.report.write import write_report
from tests.reference.synthetic_runs import ARMS, write_rows, write_sweep


def test_a_diverged_run_counts_with_reward_zero_and_as_collapsed(tmp_path):
    rows = [{"step": step, "reward/mean": 0.5, "eval/greedy": 0.5} for step in range(1, 4)]
    words = "error: step 4, update 1 of 4: the loss or gradient is not finite"
    runs = []
    for arm, files in (("A", {"result": {}}), ("B", {"failed": {"exit_code": 1, "last_line": words}})):
        write_rows(tmp_path / arm, rows, **files)
        runs.append({"folder": arm, "arm": arm, "condition": "", "seed": 0})
    (tmp_path / "sweep.json").write_text(json.dumps({"question": "?", "baseline": "A", "runs": runs}))
    study = load(tmp_path)
    assert study.runs[1].collapse() == (4.0, True)
    means = {c.outcome.name: c.difference.mean for c in compare(study, "")}
    assert means["held-out greedy, end"] == -0.5
    assert means["training reward, last 5"] == -0.5
    assert "diverged after step 3" in write_report(tmp_path)


def test_a_crashed_run_is_in_no_pair(tmp_path):
    write_rows(tmp_path / "A", [{"step": 1, "reward/mean": 0.5}], result={})
    write_rows(tmp_path / "B", [{"step": 1, "reward/mean": 0.5}], failed={"exit_code": -9, "last_line": "Killed"})
    study = load(tmp_path)
    assert compare(study, "") == []
    assert study.runs[1].status == "crashed after step 1 with exit code -9: Killed"


def test_differences_have_the_sign_and_size_of_the_logs(tmp_path):
    for arm, level in (("A", 0.25), ("B", 0.5)):
        for seed in range(5):
            reward = level + 0.125 * seed
            write_rows(tmp_path / arm / str(seed), [{"step": s, "reward/mean": reward} for s in range(1, 7)], result={})
    study = load(tmp_path)
    header, rows = difference_table(study, "")
    assert header[2:] == ["difference", "95 % t interval", "bootstrap", "p (Holm)", "detectable", "seeds", "verdict"]
    exact = "[+0.250, +0.250]"
    assert rows == [["mean reward, last 5", "B", "+0.250", exact, exact, "< 0.001", "0.000", "5", "higher"]]
    assert sentence(compare(study, "")[0], "A") == (
        "mean reward, last 5: B against A +0.250 [+0.250, +0.250] over 5 seeds: B is higher (p < 0.001)."
    )


def write_arms(folder, rewards, commits=None):
    """{arm: [reward of seed 0, ...]}, each a finished run of six equal rollouts; commits[seed] where they are given."""
    for arm, levels in rewards.items():
        for seed, level in enumerate(levels):
            rows = [{"step": step, "reward/mean": level} for step in range(1, 7)]
            config = {"commit": commits[seed]} if commits else {}
            write_rows(folder / arm / str(seed), rows, result={}, config=config)
    return load(folder)


def test_p_values_are_corrected_for_the_number_of_arms(tmp_path):
    noise = np.array([0.04, -0.03, 0.01, -0.02, 0.0])
    study = write_arms(
        tmp_path, {"A": [0.5] * 5, "B": 0.53 + noise, "C": 0.53 + noise[::-1], "D": [0.5, 0.49, 0.52, 0.5, 0.47]}
    )
    compared = {c.arm: c for c in compare(study, "")}
    assert compared["B"].difference.p < 0.1 < compared["B"].p
    assert compared["B"].p == pytest.approx(3 * compared["B"].difference.p)  # the smallest of three
    assert "would have been found with 80 % power" in sentence(compared["D"], "A")


def test_runs_are_paired_by_seed_and_branch_in_whatever_order_they_are_listed(tmp_path):
    """B is A and 0.25, run by run, is listed in another order and lacks a seed: no difference has any spread."""
    listed = {"A": [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)], "B": [(2, 1), (0, 0), (2, 0), (0, 1)]}
    runs = []
    for arm, pairs in listed.items():
        for seed, branch in pairs:
            place, reward = f"{arm}/{seed}/{branch}", 0.125 * seed**2 + 0.0625 * branch + 0.25 * (arm == "B")
            write_rows(tmp_path / place, [{"step": 1, "reward/mean": reward}], result={})
            runs.append({"folder": place, "arm": arm, "condition": "", "seed": seed, "branch": branch})
    (tmp_path / "sweep.json").write_text(json.dumps({"question": "?", "baseline": "A", "runs": runs}))
    (c,) = compare(load(tmp_path), "")
    d = c.difference
    assert (d.n, d.pairs, d.mean, d.low, d.high) == (2, 4, 0.25, 0.25, 0.25)


def test_only_arms_with_enough_seeds_and_a_difference_count_in_the_correction(tmp_path):
    """B alone can be judged: its p stays as it is. C equals A, and D has three seeds."""
    rewards = {"A": [0.5] * 5, "B": [0.52, 0.55, 0.5, 0.54, 0.51], "C": [0.5] * 5, "D": [0.9, 0.8, 0.7]}
    compared = {c.arm: c for c in compare(write_arms(tmp_path, rewards), "")}
    assert compared["B"].p == compared["B"].difference.p
    assert np.isnan([compared["C"].p, compared["D"].p]).all()
    verdicts = [compared[arm].verdict for arm in "BCD"]
    assert verdicts == ["undecided", "identical", "estimate only: 3 of 5 seeds"]


def test_commits_are_compared_by_seeds_and_not_by_branches(tmp_path):
    """Two seeds at each of two commits: their means -0.25, -0.125 and 0, 0.125 differ by t = -0.25 / (1 / sqrt(128)),
    -2.83 with 2 degrees of freedom, p = 0.106; branches of a seed are no replicates."""
    runs = []
    for seed, (commit, base) in enumerate(zip("aabb", (-0.25, -0.125, 0.0, 0.125), strict=True)):
        for branch, arm in itertools.product(range(4), "AB"):
            place, reward = f"{arm}/{seed}/{branch}", 0.5 + (base + (branch - 1.5) / 64) * (arm == "B")
            write_rows(tmp_path / place, [{"step": 1, "reward/mean": reward}], result={}, config={"commit": commit * 9})
            runs.append({"folder": place, "arm": arm, "condition": "", "seed": seed, "branch": branch})
    (tmp_path / "sweep.json").write_text(json.dumps({"question": "?", "baseline": "A", "runs": runs}))
    (c,) = compare(load(tmp_path), "")
    assert c.batches_p == pytest.approx(0.1056, abs=1e-4)


def test_branches_of_one_trajectory_are_one_seed(tmp_path):
    runs = []
    for arm, base in (("A", 0.25), ("B", 0.5)):
        for seed in range(2):
            for branch in range(3):
                place = f"{arm}/{seed}/{branch}"
                reward = base + 0.125 * seed + (0.0625 * branch if arm == "B" else 0)
                write_rows(tmp_path / place, [{"step": 1, "reward/mean": reward}], result={})
                runs.append({"folder": place, "arm": arm, "condition": "", "seed": seed, "branch": branch})
    (tmp_path / "sweep.json").write_text(json.dumps({"question": "?", "baseline": "A", "runs": runs}))
    (c,) = compare(load(tmp_path), "")
    assert (c.difference.n, c.difference.pairs, c.difference.mean) == (2, 6, 0.3125)
    assert difference_table(load(tmp_path), "")[1][0][-2:] == ["2 (6 pairs)", "estimate only: 2 of 5 seeds"]


def test_an_unfinished_run_has_no_outcome(tmp_path):
    start, end = {"step": 0, "eval/greedy": 0.25}, {"step": 1, "eval/greedy": 0.75, "reward/mean": 0.5}
    write_rows(tmp_path / "A" / "0", [start, end], result={})
    write_rows(tmp_path / "A" / "1", [start, {"step": 1, "reward/mean": 0.5}])
    write_rows(tmp_path / "B" / "0", [start, {"step": 1, "reward/mean": 0.5}])
    header, rows = arm_table(load(tmp_path), "")
    column = header.index("held-out accuracy, greedy")
    assert [row[column] for row in rows] == ["0.250 -> 0.750", "0.250 -> not ended"]
    assert rows[1][header.index("mean reward, last 5")] == ""


def test_the_configuration_is_shown_as_the_objective_had_it():
    config = {"objective": {"name": "grpo", "clip_low": None, "clip_high": 0.3, "tau_pos": None}, "seed": 1}
    shown = resolved({"config": config})
    assert (shown["objective"]["clip_low"], shown["objective"]["clip_high"]) == (0.2, 0.3)
    assert "tau_pos" not in shown["objective"]
    own = {"config": {"objective": {"name": "of my own", "a": 1, "b": None}}}
    assert resolved(own) == {"objective": {"name": "of my own", "a": 1}}
    assert resolved(own | {"objective": {"name": "of my own", "a": 1, "b": 2}})["objective"]["b"] == 2
    assert resolved({}) == {}


def test_config_table_holds_only_what_arms_differ_in(tmp_path):
    write_sweep(tmp_path, seeds=1, keys="reward")
    header, rows = config_table(load(tmp_path))
    name = header.index("objective.name")
    assert [(row[0], row[name]) for row in rows] == [(f"{arm}, N = 8", arm.split("+")[0].lower()) for arm in ARMS]
    clip = header.index("objective.clip_low")
    assert [row[clip] for row in rows] == ["0.2", "0.2", "0.0003", ""]  # the recipes' defaults; SAPO has no clip
    assert not any(field.endswith("seed") for field in header)
