"""The lineage's figures and table, on logs with known numbers."""

import json

import numpy as np
import pytest

from experiments.lineage import figures
from experiments.lineage.sweep import get_sweep
from jaxrl_llm.report.read import CLIPPED, load
from tests.reference.synthetic_runs import write_rows


def test_the_weight_of_a_token_against_the_length_of_its_answer():
    """Two answers of 2 and 8 tokens: GRPO gives a token 1/(2 x 2) and 1/(2 x 8), DAPO 1/10, Dr. GRPO 1/(2 x 8)."""
    weights = figures.token_weights([2, 8], 8)
    np.testing.assert_allclose(weights["sequence mean (GRPO)"], [1 / 4, 1 / 16])
    np.testing.assert_allclose(weights["token mean (DAPO)"], [1 / 10, 1 / 10])
    np.testing.assert_allclose(weights["constant (Dr. GRPO)"], [1 / 16, 1 / 16])


def test_every_panel_has_a_condition_and_every_condition_a_baseline():
    runs = get_sweep().runs
    assert {condition for panel in figures.FIGURES.values() for condition, _ in panel} == {r["condition"] for r in runs}
    for condition in {run["condition"] for run in runs}:
        assert "GRPO" in {run["arm"] for run in runs if run["condition"] == condition}
    with pytest.raises(ValueError, match="unknown variant 'dpo'; it has all, critic, clip, mixture"):
        get_sweep("dpo")


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Three seeds of two arms; in every metric the second arm is 0.5 above the first, which is 1 + seed / 10."""
    folder = tmp_path_factory.mktemp("lineage")
    keys = {curve.key for panel in figures.FIGURES.values() for _, curve in panel} - {CLIPPED}
    runs = []
    for condition in ("6 tokens", "21 tokens", "countdown", "mixture"):
        for arm, above in (("GRPO", 0.0), ("other", 0.5)):
            for seed in range(3):
                name = f"{condition}/{arm}/{seed}".replace(" ", "_")
                rows = [{"step": step} | dict.fromkeys(keys, 1 + above + seed / 10) for step in (1, 2)]
                write_rows(folder / name, rows)
                answers = [{"step": 2, "prompt": "1", "length": 4 + i, "reward": i % 2} for i in range(3)]
                (folder / name / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answers))
                runs.append({"folder": name, "arm": arm, "condition": condition, "seed": seed})
    plan = {"question": "?", "baseline": "GRPO", "runs": runs}
    (folder / "sweep.json").write_text(json.dumps(plan))
    return folder


def test_the_table_has_paired_differences(study):
    lines = figures.table(load(study)).splitlines()
    entropy = [line for line in lines if "| entropy (nats per token) |" in line]
    assert entropy == [
        "| clip_higher | countdown | entropy (nats per token) | GRPO | 1.1 |  | 3 |",
        "| clip_higher | countdown | entropy (nats per token) | other | 1.6 | +0.5 [+0.5, +0.5] | 3 |",
    ]
    assert len(lines) == 2 + 2 * (sum(map(len, figures.FIGURES.values())) - 1)  # nothing was clipped, so no such rows


@pytest.mark.slow
def test_the_command_draws_every_figure(study, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["figures", str(study), "--to", str(tmp_path)])
    figures.main()
    assert {path.stem for path in tmp_path.glob("*.png")} == {*figures.FIGURES, "length"}
    assert "| clip_higher | countdown |" in capsys.readouterr().out
