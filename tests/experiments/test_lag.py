"""The tables of the sweep of lags, from runs by hand; and its committed page, letter for letter."""

import json
import re

import numpy as np
import pytest

from experiments.lag import tables
from tests.reference.synthetic_runs import study_of


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Five seeds: at the high rate GRPO loses 0.01 a policy and a tenth of that with the correction, SAPO three times
    as much and GSPO nothing; replay changes nothing; at the tuned rate nothing is lost, and k3 is the lag squared."""
    loss = {"GRPO": 0.01, "GRPO+decoupled": 0.001, "GSPO": 0.0, "SAPO": 0.03}
    runs = {}
    for name, added in [(recipe, added) for recipe in tables.RECIPES for added in tables.ADDED]:
        for rate in (tables.TUNED, tables.HIGH):
            for lag in tables.LAGS:
                for seed in range(5):
                    each = 0.0 if rate == tables.TUNED else loss.get(f"{name}{added}".removesuffix("+R3"), 0.0)
                    end = 0.9 + 0.002 * seed - each * lag * (1 + 0.1 * seed)
                    rows = [{"step": 0, "eval/pass_at_1": 0.7}]
                    rows += [{"step": s, "kl/sampler": 1e-3 * lag**2, "mismatch/above_2": 0.5} for s in (9, 10)]
                    rows += [{"step": 11, "routing/flips_sampler_old": 0.02, "eval/pass_at_1": end}]
                    runs[tables.arm_of(lag), f"{name}{added}, {rate}", seed] = rows
    return study_of(tmp_path_factory.mktemp("sweep"), runs)


def test_the_hypotheses_are_judged_by_their_rules(study):
    words = {(row[0], row[1]): (row[3], row[-1]) for row in tables.judged(study)}
    assert words["L1", "GSPO, tuned: lag 2 less none"] == ("+0.000 [+0.000, +0.000]", "holds")
    difference, word = words["L2", "GRPO, high rate: lag 8 less none"]
    assert difference.startswith("-0.096")  # 0.08 times the mean of 1 to 1.4
    assert word == "holds"
    assert words["L3", "GRPO, high rate, lag 8: the loss with decoupled less that without"][0].startswith("+0.086")
    assert words["L4", "GRPO, high rate, lag 8: the loss with R3 less that without"][1] == "holds"
    assert words["L5", "high rate, lag 8: the loss of SAPO less GRPO's"][0].startswith("-0.192")
    assert words["L5", "high rate, lag 8: the loss of GSPO less GRPO's"][0].startswith("+0.096")
    assert [row[3] for row in tables.growth(study)] == ["x16.00 [16.00, 16.00]"] * 3


@pytest.mark.slow
def test_the_tables(study):
    (row,) = [row for row in tables.accuracy(study) if row[0] == "GRPO+decoupled, high rate"]
    assert row[1:3] == ["5", "0.700 -> 0.904"]
    assert row[3].startswith("-0.001")
    (row,) = [row for row in tables.staleness(study) if row[0] == "GSPO, tuned"]
    assert row[1:] == [f"{1e-3 * lag**2:.2g}, 50.0 %, 2.0 %" for lag in (1, 2, 4, 8)]
    assert len(tables.collapses(study)) == 24
    assert tables.page(study).count("\n| hypothesis") == 2


@pytest.mark.slow
@pytest.mark.skipif(not (tables.RESULTS / "lag.tar.xz").exists(), reason="a source distribution has no archives")
def test_the_committed_page(tmp_path):
    """What the committed data give, letter for letter; a row of it by hand, from the metrics."""
    study = tables.committed(tmp_path)
    assert (tables.RESULTS / "lag.md").read_text() == tables.page(study)
    ends = [
        [json.loads(line) for line in path.read_text().splitlines()][-1]["eval/pass_at_1"]
        for arm in ("lag_8", "no_lag")
        for path in sorted((tmp_path / "lag" / "GRPO_high_rate" / arm).glob("*/metrics.jsonl"))
    ]
    late, fresh = np.split(np.array(ends), 2)
    (row,) = [row for row in tables.judged(study) if row[0] == "L2"]
    assert row[3].startswith(f"{np.mean(late - fresh):+.3f}")


def test_every_interval_of_the_page_stands_in_a_table():
    page = (tables.RESULTS.parent / "README.md").read_text()
    found = re.findall(r"[-+]\d\.\d{3}\s\[[-+]\d\.\d{3}, [-+]\d\.\d{3}\]", page)
    made = (tables.RESULTS / "lag.md").read_text()
    assert len(found) > 10
    assert [one for one in found if one not in made] == []
