"""The share of a variance over runs, the ends of runs that diverged, and what a packed sweep keeps."""

import tarfile

import numpy as np
import pytest

from experiments.routing_replay.table_parts import pack, share_of_variance, start_to_end
from jaxrl_llm.report.read import Run, load
from tests.reference.synthetic_runs import study_of, write_rows


def measured(variance, share, step=1):
    return {"step": step, "routing/log_ratio_var": variance, "routing/share_of_variance": share}


def test_a_share_is_weighted_by_its_variance(tmp_path):
    """(0.1 x 3 + 0.5 x 1) / 4 = 0.2; a variance of 0 has no share; the interval spans the two seeds' 0.1 and 0.5.

    One seed has no interval.
    """
    write_rows(tmp_path / "a", [measured(3.0, 0.1), measured(0.0, None, 2)])
    write_rows(tmp_path / "b", [measured(1.0, 0.5)])
    runs = [Run(tmp_path / name, "GRPO", "", name) for name in "ab"]
    np.testing.assert_allclose(share_of_variance(runs), (0.2, 0.1, 0.5, 0.3))
    np.testing.assert_allclose(share_of_variance(runs[:1]), (0.1, np.nan, np.nan, 0.1))
    assert np.isnan(share_of_variance([])).all()


def test_a_run_that_diverged_ends_at_zero(tmp_path):
    rows = [{"step": step, "eval/pass_at_1": accuracy} for step, accuracy in ((0, 0.5), (20, 0.75))]
    write_rows(tmp_path / "well", rows, result={})
    write_rows(tmp_path / "ill", rows, failed={"last_line": "the loss is not finite", "exit_code": 1})
    runs = [Run(tmp_path / name, "GRPO") for name in ("well", "ill")]
    assert start_to_end(runs) == "0.500 -> 0.375"


def test_a_packed_sweep_reads_as_the_sweep(tmp_path, monkeypatch):
    """Also of a run that diverged; numbers that no table reads, and this machine's paths, are left out."""
    monkeypatch.chdir(tmp_path)
    rows = [{"step": 1, "eval/pass_at_1": 0.5, "rollout/groups_generated": 4, "time/rollout_s": 2.0}]
    files = {"failed": {"last_line": "not finite"}, "config": {"file": f"{tmp_path}/configs/a.py"}}
    study_of(tmp_path / "sweep", {("GRPO", "", 0): rows}, **files)
    (tmp_path / "sweep" / "0" / "result.json").unlink()
    pack(tmp_path / "sweep", tmp_path / "sweep.tar.xz", "metrics.jsonl")
    with tarfile.open(tmp_path / "sweep.tar.xz") as packed:
        packed.extractall(tmp_path / "elsewhere", filter="data")
    (kept,) = load(tmp_path / "elsewhere" / "sweep").runs
    assert kept.diverged
    assert kept.rows == [{"step": 1, "eval/pass_at_1": 0.5, "rollout/groups_generated": 4}]
    assert kept.record["file"] == "configs/a.py"


@pytest.mark.parametrize("variance", [[], [0.0]])
def test_no_measurement_has_no_share(tmp_path, variance):
    write_rows(tmp_path / "a", [measured(one, None) for one in variance])
    assert np.isnan(share_of_variance([Run(tmp_path / "a", "GRPO")])).all()
