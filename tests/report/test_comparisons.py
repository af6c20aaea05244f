"""What the tables of a report say: pairs, corrections, commits, branches, and the configuration as it was used."""

import json

import numpy as np
import pytest

from jaxrl_llm.report.comparisons import compare, findings, sentence
from jaxrl_llm.report.outcome_figures import forest_plot, survival_plot
from jaxrl_llm.report.read import load
from jaxrl_llm.report.tables import arm_table, batch_table, config_table, difference_table, resolved
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


def test_a_failure_without_its_line_is_named_as_damage(tmp_path):
    write_rows(tmp_path / "A", [{"step": 0}, {"step": 1, "reward/mean": 0.5}], failed={"exit_code": 1})
    study = load(tmp_path / "A")
    assert study.damaged() == [f"{tmp_path / 'A' / 'failed.json'} lacks last_line"]
    assert study.runs[0].status.startswith("crashed after step 1 with exit code 1")


@pytest.mark.parametrize("value", [[], [0.5, 0.5], "half"], ids=str)
def test_a_reward_that_is_no_number_is_damage_and_left_out(tmp_path, value):
    rows = [{"step": step, "reward/mean": value if step == 1 else 0.5, "load": [0.5, None]} for step in range(4)]
    write_rows(tmp_path / "A", rows)
    run = load(tmp_path / "A").runs[0]
    assert run.collapse() == (3.0, False)
    assert run.damage == [
        f"{tmp_path / 'A' / 'metrics.jsonl'}, step 1: reward/mean={value!r} is of another kind than the report reads"
    ]


def test_an_arm_that_samples_nothing_has_no_time_to_collapse(tmp_path):
    """DPO beside GRPO: no training reward, so no collapse and no survival, in no table and no figure."""
    fallen = [{"step": step, "reward/mean": reward} for step, reward in enumerate([0.8, *[0.1] * 5], start=1)]
    write_rows(tmp_path / "A", [{"step": 0, "eval/greedy": 0.5}, *fallen], result={})
    write_rows(tmp_path / "DPO", [{"step": step, "eval/greedy": 0.5} for step in range(3)], result={})
    study = load(tmp_path)
    assert "rollouts without collapse" not in {c.outcome.name for c in compare(study, "")}
    header, rows = arm_table(study, "")
    assert [row[header.index("collapsed")] for row in rows] == ["1/1", ""]
    named = [text.get_text() for text in survival_plot(study, "").axes[0].texts]
    assert named == ["A  0/1"]


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


def test_arms_that_are_equal_are_called_identical(tmp_path):
    study = write_arms(tmp_path, {"A": [0.5, 0.6, 0.7], "B": [0.5, 0.6, 0.7], "C": [0.5, 0.6, 0.8]})
    assert compare(study, "")[0].verdict == "identical"
    alike, *others = (line for line in findings(study, "") if "their runs logged the same numbers" in line)
    assert alike.startswith("A and B are identical")
    assert not others


def test_runs_of_several_commits_are_shown_apart(tmp_path):
    commits = ["aaaaaaaaa"] * 3 + ["bbbbbbbbb"] * 3
    study = write_arms(tmp_path, {"A": [0.5] * 6, "B": [0.2, 0.22, 0.24, 0.5, 0.52, 0.54]}, commits)
    header, rows = batch_table(study, "")
    assert header == ["outcome", "arm", "aaaaaaa", "bbbbbbb", "one mean (p)"]
    # Differences -0.30, -0.28, -0.26: sd 0.02, t_{0.975, 2} = 4.303, half width 4.303 x 0.02 / sqrt(3) = 0.050.
    assert rows[0][2:4] == ["-0.280 [-0.330, -0.230] (3)", "+0.020 [-0.030, +0.070] (3)"]
    assert rows[0][4] == "< 0.001"
    assert "the commits disagree (-0.280 at aaaaaaa, +0.020 at bbbbbbb)" in sentence(compare(study, "")[0], "A")
    (ax,) = forest_plot(study, "").axes
    assert [label.get_text() for label in ax.get_yticklabels()] == ["B", "aaaaaaa, 3", "bbbbbbb, 3"]
    assert batch_table(write_arms(tmp_path / "one", {"A": [0.5] * 6, "B": [0.2] * 6}), "")[1] == []


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
