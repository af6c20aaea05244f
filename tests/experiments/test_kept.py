"""Gradient kept, gain after every number of rollouts, and the clip that keeps a share, from branches by hand."""

import math

import pytest
from matplotlib.figure import Figure

from experiments.routing_replay import kept
from tests.reference.synthetic_runs import study_of

CUT_TO_GSPO = "GRPO, negatives cut minus GSPO"


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Five trajectories of one state: the arm gains 0.1 after one rollout and loses 0.2 after four, where GRPO holds.

    In the last one the arm diverges in its third rollout, so it counts as 0 after four, and not after one.
    """
    trajectories = {}
    for seed in range(5):
        rows = [{"state": 1, "arm": "", "step": 0, "eval/pass_at_1": 0.5}]
        for arm, negative, after in (("GRPO", 1.0, {1: 0.5, 4: 0.5}), ("dual clip 1.1", 0.2, {1: 0.6, 4: 0.3})):
            fails = arm != "GRPO" and seed == 4
            for step in range(1, 3 if fails else 5):
                row = {"state": 1, "arm": arm, "step": step, "gradient_weight/negative": negative}
                rows.append(row | ({"eval/pass_at_1": after[step]} if step in after else {}))
            rows += [{"state": 1, "arm": arm, "step": 3, "failed": "not finite"}] if fails else []
        trajectories["", "dense", seed] = rows
    return study_of(tmp_path_factory.mktemp("sweep"), trajectories)


def test_gain_after_every_number_of_rollouts(study):
    assert kept.evaluated(study) == [1, 4]
    differences = [kept.after(study, "dual clip 1.1", "dense", step) for step in (1, 4)]
    assert [d.mean for d in differences] == pytest.approx([0.1, (4 * -0.2 - 0.5) / 5])
    header, row = kept.by_rollouts(study)
    assert header[2:] == ["1 rollout", "4 rollouts"]
    assert row[:3] == ["dense", "dual clip 1.1 minus GRPO", "+0.100 [+0.100, +0.100]"]


def test_the_gradient_kept_stands_beside_the_gain(study, tmp_path):
    grpo, arm = kept.table(study)
    assert (grpo[3], arm[3]) == ("nan / 1.00", "nan / 0.20")
    assert arm[5].startswith("-0.260")
    kept.figure(study).savefig(tmp_path / "kept.png")


def test_a_clip_is_interpolated_over_the_room_that_it_leaves():
    clips, shares = [1.4, 1.1, 1.2], [0.5, 0.1, 0.3]
    assert kept.clip_of(0.3, clips, shares) == pytest.approx(1.2)
    assert kept.clip_of(0.2, clips, shares) == pytest.approx(1 + math.sqrt(0.1 * 0.2))
    assert math.isnan(kept.clip_of(0.6, clips, shares))


def test_the_matched_clip_is_of_the_doses(study):
    assert kept.matched(study, 0.2) == [["dense", "keep 0.2", "dual_clip=1.1"]]


def test_the_two_models_in_each_batch(tmp_path):
    """Of whole runs from seed 505 to 514: GSPO gains 0.1 more on the dense model in the first five, nothing later."""
    runs = {}
    for model in ("mixture", "dense"):
        for seed in range(505, 515):
            gains = {"GRPO": 0.0, "GSPO": 0.2 + 0.1 * (model == "dense" and seed < kept.LATER)}
            for arm, gain in gains.items():
                rows = [{"step": step, "eval/pass_at_1": 0.5 + gain * step} for step in (0, 1)]
                runs[arm, f"{model}, lr 1", seed] = rows
    rows = kept.apart(study_of(tmp_path, runs))
    assert [bool(row[5]) for row in rows] == [True, False, False]  # p of the whole alone
    batches = "", ", seeds below 510", ", seeds from 510"
    assert [row[0] for row in rows] == [f"dense, lr 1{batch}" for batch in batches]
    assert [row[2] for row in rows] == ["10", "5", "5"]
    assert [row[3].partition(" ")[0] for row in rows] == ["+0.050", "+0.100", "+0.000"]


def test_contrasts_and_the_two_models(tmp_path):
    """Five trajectories: GSPO gains 0.1 in both models, cutting A < 0 alone 0.2, and 0.01 a seed more in the dense."""
    trajectories = {}
    for model, more in (("mixture", 0.0), ("dense", 0.01)):
        for seed in range(5):
            ends = {"GRPO": 0.5, "GSPO": 0.6, "GRPO, negatives cut": 0.7 + more * seed}
            rows = [{"state": 1, "arm": "", "step": 0, "eval/pass_at_1": 0.5}]
            rows += [{"state": 1, "arm": arm, "step": 1, "eval/pass_at_1": end} for arm, end in ends.items()]
            trajectories["", f"{model}, lr 1", seed] = rows
    study = study_of(tmp_path, trajectories)
    mixture, dense = kept.contrasts(study)
    assert mixture[:4] == ["mixture, lr 1", CUT_TO_GSPO, "5", "+0.100 [+0.100, +0.100]"]
    assert dense[3].startswith("+0.120 [+0.10")
    same, apart = kept.apart(study)
    assert same[:4] == ["dense, lr 1", "GSPO", "5", "+0.000 [+0.000, +0.000]"]
    assert apart[1] == "GRPO, negatives cut"
    assert apart[3].startswith("+0.020 [+0.000")
    (panel,) = kept.figure(study).axes
    assert panel.get_xlabel().endswith("(filled mixture, hollow dense)")
    assert {text.get_text() for text in panel.texts} == {"GSPO", "GRPO, negatives cut"}


def test_whole_runs(tmp_path):
    """Five seeds of 30 rollouts: cutting A < 0 alone is 0.1 above GSPO until the fourth, and 0.2 below from the 17th.

    In the last seed GSPO diverges after the eighth rollout: what it would have earned later is 0.
    """
    runs = {}
    for seed in range(5):
        for arm, start, end in (("GRPO", 0.5, 0.5), ("GSPO", 0.5, 0.6), ("GRPO, negatives cut", 0.6, 0.4)):
            last = 8 if (arm, seed) == ("GSPO", 4) else 30
            rows = [
                {"step": step, "reward/mean": start if step <= 4 else end if step > 16 else 0.5}
                | {"kl/old": 0.2 if step <= 10 else 0.1, "entropy": 0.3}
                for step in range(1, last + 1)
            ]
            rows[-1] |= {"eval/pass_at_1": end} if last == 30 else {}
            runs[arm, "sorting, dense", seed] = [{"step": 0, "eval/pass_at_1": 0.7}, *rows]
    study = study_of(tmp_path, runs)
    header, row = kept.along(study)
    assert header[2:] == ["2", "3 to 4", "5 to 8", "9 to 16", "17 to 30"]
    assert row[1:5] == [CUT_TO_GSPO, *["+0.100 [+0.100, +0.100]"] * 2, "+0.000 [+0.000, +0.000]"]
    assert row[5].startswith("+0.100")  # (4 * 0 + 0.5) / 5
    assert row[6].startswith("-0.080")  # (4 * -0.2 + 0.4) / 5
    grpo, _, cut = kept.ends(study)
    assert grpo[2:] == ["5", "nan / nan", "0.100 / 0.200 / 0.100", "0.300", "0.700 -> 0.500", "", "", "0 of 5"]
    assert cut[6:8] == ["0.700 -> 0.400", "-0.100 [-0.100, -0.100]"]
    (panel,) = kept.figure(study).axes
    assert {text.get_text() for text in panel.texts} == {"GSPO", "GRPO, negatives cut"}


def test_the_lead_over_whole_runs_by_drift(tmp_path):
    """Five seeds: GSPO ends 0.2 above cutting A < 0 on the mixture, 0.1 on the dense model, which drift by 0.3 and 0.4
    in the median rollout."""
    runs = {}
    for model, lead, drift in (("mixture", 0.2, 0.3), ("dense", 0.1, 0.4)):
        for seed in range(5):
            for arm, end in (("GRPO", 0.5), ("GSPO", 0.4 + lead), ("GRPO, negatives cut", 0.4)):
                rows = [{"step": step, "kl/old": kl} for step, kl in ((1, 0.0), (2, drift), (3, 9.0))]
                rows[-1]["eval/pass_at_1"] = end
                runs[arm, f"sorting, {model}, N = 8", seed] = [{"step": 0, "eval/pass_at_1": 0.5}, *rows]
    ax = Figure().subplots()
    kept.draw_drift(ax, study_of(tmp_path, runs))
    points = [tuple(map(float, one.get_xydata()[0])) for one in ax.lines if one.get_marker() == "o"]
    assert points == [pytest.approx((0.3, 0.2)), pytest.approx((0.4, 0.1))]
    assert [text.get_text() for text in ax.texts] == ["N = 8"]


def test_a_stop_is_set_against_the_same_seeds_without_it(tmp_path):
    """Five trajectories: cutting A < 0 is 0.2 above GSPO after one rollout and 0.1 below after two; stopped, equal."""
    trajectories = {}
    for condition, leads in (("all updates", (0.2, -0.1)), ("stopped at KL 0.05", (0.0, 0.0))):
        for seed in range(5):
            rows = [{"state": 1, "arm": "", "step": 0, "eval/pass_at_1": 0.5}]
            for arm, more in (("GRPO", (0.0, 0.0)), ("GSPO", (0.0, 0.0)), ("GRPO, negatives cut", leads)):
                rows += [
                    {"state": 1, "arm": arm, "step": step, "eval/pass_at_1": 0.5 + more[step - 1]} for step in (1, 2)
                ]
            trajectories["", f"dense, {condition}", seed] = rows
    header, row = kept.stopped(study_of(tmp_path, trajectories))
    assert header == ["model", "arms", "1 rollout", "2 rollouts"]
    assert row == ["dense", CUT_TO_GSPO, "-0.200 [-0.200, -0.200]", "+0.100 [+0.100, +0.100]"]


def test_doses_are_ranked_with_their_gain(tmp_path):
    rows = [{"state": 1, "arm": "", "step": 0, "eval/pass_at_1": 0.5}]
    gains = {"GRPO": 0.0, "GSPO": 9.0, "dual clip 1.01": 0.3, "dual clip 1.1": 0.1, "dual clip off": 0.2}
    rows += [{"state": 1, "arm": arm, "step": 1, "eval/pass_at_1": 0.5 + gain} for arm, gain in gains.items()]
    assert kept.ranked(study_of(tmp_path, {("", "dense", 0): rows})) == [["dense", "3", "-0.50"]]
