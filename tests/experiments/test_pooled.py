"""What stands of a comparison with several batches: the pooled interval, the batches' agreement, the correction."""

from pathlib import Path

import numpy as np
import pytest

from experiments.routing_replay import figures
from experiments.routing_replay.dose import MEASURES, SCALED, USUAL, scaling
from experiments.routing_replay.pooled import by_sign, negatives, one_rollout, pooled, power, stands, stood, table
from jaxrl_llm.report.read import Branch, Study
from jaxrl_llm.report.statistics import paired_difference
from tests.reference.synthetic_runs import study_of

SPREAD = np.array([-0.02, -0.01, 0.0, 0.0, 0.01, 0.02])  # sd 0.01414 of six, and 0.01348 of twice these six


def batches(*means):
    return {f"batch {i}": middle + SPREAD for i, middle in enumerate(means)}


def test_the_pooled_estimate_and_the_power_of_a_batch():
    """Twelve of one mean 0.01: +- t(0.975, 11) sd / sqrt(12) = 2.201 x 0.01348 / 3.464 = 0.0086.

    A batch of six has a standard error of 0.00577: a true 0.01 is 1.73 of them away and found with 29 %.
    """
    (row,) = table([pooled(["SAT"], batches(0.01, 0.01))])
    assert row[:3] == ["SAT", "12", "+0.010 [+0.001, +0.019]"]
    assert row[4] == "; ".join(f"batch {i}: +0.010 [-0.005, +0.025], 29 %" for i in (0, 1))
    assert row[5:] == ["1", "0.026", "claim", "estimate"]  # neither batch alone excludes zero


def test_the_power_of_a_sample():
    """Of what it can detect it has 80 %; of nothing half of the level; without spread none is known."""
    d = paired_difference([0.3, 0.1, -0.2, 0.4, 0.2], np.zeros(5))
    assert power(-d.detectable, d) == pytest.approx(0.8)
    assert power(0.0, d) == pytest.approx(0.025)
    assert np.isnan(power(1.0, paired_difference([1.0, 1.0], [0.0, 0.0])))


@pytest.mark.parametrize(
    ("means", "now", "before"),
    [
        ((0.05, 0.05), "claim", "claim"),
        ((-0.05, -0.04), "claim", "claim"),
        ((0.02, 0.06), "sign only", "claim"),
        ((0.0, 0.06), "batches differ", "estimate"),
        ((0.05, -0.05), "batches differ", "estimate"),
        ((0.05,), "estimate", "estimate"),  # one batch
        ((0.0, 0.0), "no effect found", "no effect found"),
    ],
)
def test_what_stands(means, now, before):
    one = pooled([], batches(*means))
    assert (stands(one, one.whole.p), stood(one)) == (now, before)


def test_a_claim_survives_the_number_of_comparisons():
    """0.01 in two batches has p 0.026: alone a claim, of two comparisons an estimate."""
    rows = table([pooled(["a"], batches(0.01, 0.01)), pooled(["b"], batches(0.01, 0.01))])
    assert [row[6:8] for row in rows] == [["0.052", "estimate"]] * 2


def study(first, *models, **gains):
    """One state of six trajectories, from which GRPO stays at 0.5 and every other arm gains so much on average."""
    runs = []
    for arm, gain in {"GRPO": 0.0, **gains}.items():
        for seed, own in enumerate(SPREAD, first):
            end = 0.5 + (gain + own if arm != "GRPO" else 0.0)
            kept = {"gradient_weight/positive": 0.5, "gradient_weight/negative": 0.25}
            rows = [{"step": 1, "eval/pass_at_1": 0.5}, {"step": 2, "eval/pass_at_1": end, **kept}]
            conditions = [f"{model}, lr 0.0004" for model in models] or ["lr 0.0004"]
            runs += [Branch(Path("none"), arm, condition, str(seed), "1", written=rows) for condition in conditions]
    return Study("", runs, "GRPO", {"rollouts": 1})


CLIP = "GRPO clip 1e-08"
BOTH = study(316, "mixture", "dense", GSPO=0.3, RSPO=0.2)
MASKED = study(368, "mixture", "dense", GSPO=0.3, OPSM=0.1)
SWEEPS = [
    *(study(0, SAT=0.1), study(8, **{CLIP: 0.1}), study(24, **{"SAT": 0.1, "GSPO": 0.3, CLIP: 0.1}), study(200)),
    *(BOTH, MASKED),
]


def test_one_rollout_pools_the_sweeps_that_have_the_arm():
    """GSPO is in three sweeps of the six, in the last two on the mixture; RSPO and OPSM in one, which has halves."""
    found = {one.labels[2]: one for one in one_rollout(*SWEEPS)}
    assert {name: (one.whole.n, list(one.batches)) for name, one in found.items()} == {
        "SAT": (12, ["`branch`", "`precise`"]),
        CLIP: (12, ["`tight`", "`precise`"]),
        "GSPO": (18, ["`precise`", "`negatives`", "`negatives_masked`"]),
        "RSPO": (6, ["seeds below 318", "seeds from 318"]),
        "OPSM": (6, ["seeds below 370", "seeds from 370"]),
        f"GSPO minus {CLIP}": (6, ["`precise`"]),
    }
    np.testing.assert_allclose([one.whole.mean for one in found.values()], [0.1, 0.1, 0.3, 0.2, 0.1, 0.2])


def test_what_one_rollout_pools_stands_there_alone():
    found = {one.labels[2]: list(one.batches) for one in negatives(BOTH, MASKED) if one.labels[0].startswith("dense")}
    parts = ["seeds below 318", "seeds from 318", "seeds from 360", "seeds from 370"]
    assert found == {
        "GSPO minus GRPO": parts,
        "RSPO minus GRPO": parts[:2],
        "OPSM minus GRPO": parts[2:],
        "OPSM minus GSPO": parts[2:],
    }
    of_mixture = [one.labels[2] for one in negatives(BOTH, MASKED) if one.labels[0].startswith("mixture")]
    assert of_mixture == ["OPSM minus GSPO"]


def test_the_figures_show_every_arm():
    (rate,) = figures.forest(SWEEPS).axes
    assert [label.get_text() for label in rate.get_yticklabels()] == [
        *("SAT", CLIP, "GSPO", "RSPO", "OPSM", f"GSPO minus {CLIP}")
    ]


def test_depth_and_sparsity_as_factors():
    """Every measure of two seeds is 2 and 4 in a setting where it is 1 and 2 in the usual one: x2, without spread."""
    runs = []
    for setting in (USUAL, *SCALED):
        for seed in (0, 1):
            value = (1 if setting == USUAL else 2) * (1 + seed)
            row = {"step": 1, "routing/part_above_0.2": value, "routing/flips_fresh": value, "kl/old": value}
            row |= {"routing/log_ratio_var": value, "routing/share_of_variance": value}
            runs.append(Branch(Path("none"), "GRPO", setting, str(seed), "1", written=[row]))
    rows = scaling(Study("", runs, "GRPO"))
    assert [row[0] for row in rows] == list(SCALED)
    assert {cell for row in rows for cell in row[1 : 1 + len(MEASURES)]} == {"x2.00 [2.00, 2.00]"}


def test_later_seeds_are_a_batch_and_a_sweep_without_them_is_halved(tmp_path):
    """Seeds 500 to 503 of two conditions, of which one has 510 and 511 too."""
    runs = {}
    for condition, seeds in {"early": range(500, 504), "both": [*range(500, 504), 510, 511]}.items():
        for arm in ("GRPO", "GSPO"):
            for seed in seeds:
                rows = [{"step": step, "eval/pass_at_1": 0.5 + 0.01 * step * seed % 7} for step in (0, 1)]
                runs[arm, condition, seed] = rows
    found = by_sign(study_of(tmp_path, runs), lambda last: (510,) if last >= 510 else (502,))
    assert {one.labels[0]: [(name, d.n) for name, d in one.batches.items()] for one in found} == {
        "early": [("seeds below 502", 2), ("seeds from 502", 2)],
        "both": [("seeds below 510", 4), ("seeds from 510", 2)],
    }
