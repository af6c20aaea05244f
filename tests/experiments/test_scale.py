"""The fit of routing's share over depth, sparsity and drift, on points of a known line; and a run of a user's own."""

import dataclasses
import itertools
import json

import numpy as np
import pytest

from experiments.routing_replay import scale
from experiments.routing_replay.sizes import LARGEST
from jaxrl_llm.report.read import load
from tests.reference.synthetic_runs import study_of, write_rows

TRUE = np.array([-2.0, 0.5, -0.4, 0.1])  # constant, log layers, log chosen / experts, log KL


def share_of(*of):
    return float(np.exp(np.array(scale.row_of(*of)) @ TRUE))


def made(scatter, sizes=((16, 4), (32, 4), (64, 2)), seed=0):
    """Three trajectories of every setting and drift; a setting lies off the line by a normal number of `scatter`."""
    rng, found = np.random.default_rng(seed), []
    for layers, (experts, chosen) in itertools.product((4, 8, 16), sizes):
        off = np.exp(rng.normal(0, scatter))
        for aim, _ in itertools.product((0.005, 0.02, 0.1), range(3)):
            drift, size = aim * rng.uniform(1, 1.5), (layers, experts, chosen)
            share = share_of(*size, drift) * off * np.exp(rng.normal(0, scatter / 5))
            found.append(scale.Point(str(size), *size, drift, share, 0.1, 0.01, 0.001, f"KL {aim:g}"))
    return found


def test_the_line_is_found_and_carried_to_a_size_that_was_not_seen():
    exact = scale.fit(made(0.0))
    np.testing.assert_allclose(exact.coefficients, TRUE, atol=1e-9)
    assert exact.predict(*LARGEST, 0.03) == pytest.approx([share_of(*LARGEST, 0.03)] * 3)


def test_intervals_hold_the_truth_and_know_the_scatter_of_settings():
    lines = [scale.fit(made(0.2, seed=seed)) for seed in range(5)]
    inside = [low <= TRUE[i] <= high for line in lines for i in (1, 2, 3) for low, high in [line.interval(i)]]
    assert sum(inside) >= 12
    _, low, high = lines[0].predict(*LARGEST, 0.02)
    assert low < share_of(*LARGEST, 0.02) < high
    assert np.log(high / low) > 4 * 0.2 / 2


def test_what_cannot_be_parted_is_refused():
    with pytest.raises(ValueError, match="do not part layers, sparsity and drift; run more settings"):
        scale.fit([point for point in made(0.0) if point.layers == 4])


def test_the_tables_hold_the_prediction_until_the_outcome_is_there():
    found = made(0.0)
    _, *rows = scale.predicted(found)
    assert [row[-1] for row in rows] == ["not yet run"] * 3
    ran = [scale.Point("largest", *LARGEST, 0.02, 0.3, 0.1, 0.01, 0.001, "KL 0.02")]
    _, *rows = scale.predicted([*found, *ran])
    assert [row[-1] for row in rows] == ["not yet run", "30.0 % (1)", "not yet run"]
    assert rows[1][2].startswith(f"{100 * share_of(*LARGEST, 0.02):.1f} %")
    header, told, twice, corrected = scale.coefficients(found)
    assert told[0] == "all"
    assert told[1:] == ["-2.00 [-2.00, -2.00]", *(f"{x:.2f} [{x:.2f}, {x:.2f}]" for x in TRUE[1:])]
    assert twice[2:] == [f"x{2**x:.2f} [{2**x:.2f}, {2**x:.2f}]" for x in TRUE[1:]]
    assert len(header) == len(told) == len(twice) == len(corrected)
    assert corrected[2:] == ["< 0.001"] * 3  # a line without scatter
    header, first, *_ = scale.measured(found)
    assert len(first) == len(header)
    assert first[2:] == ["3", first[3], "10.0 %", "1.00 %", "0.10 %"]


def test_a_batch_is_the_first_seed_or_those_after_it():
    later = [dataclasses.replace(p, seed=p.seed + 1 + i % 2, share=2 * p.share) for i, p in enumerate(made(0.0))]
    largest = [scale.Point("largest", *LARGEST, 0.02, 0.3, 0.1, 0.01, 0.001, "KL 0.02", seed) for seed in (0, 1, 2)]
    found = [*made(0.0), *later, *largest, dataclasses.replace(largest[0], balance=0.01, share=0.9)]
    assert [row[0] for row in scale.coefficients(found)[1:-1:2]] == ["seed 0", "seeds 1 to 2", "all"]
    constants = [float(row[1].split()[0]) for row in scale.coefficients(found)[1:-1:2]]
    assert constants == pytest.approx([-2.0, -2.0 + np.log(2), -2.0 + np.log(2) / 2], abs=0.01)
    row = next(row for row in scale.predicted(found) if "30.0 % (3)" in row)
    assert row[-3:] == ["30.0 % (1)", "30.0 % (2)", "30.0 % (3)"]
    first, second = (float(cell.split()[0]) for cell in row[2:4])
    assert second == pytest.approx(2 * first, rel=0.01)
    begun = [point for point in found if point.seed == 0 or point.layers == 4]  # the later seeds are not yet a line
    assert list(scale.batches(begun)) == ["all"]


def test_the_load_balance_loss_is_a_factor_over_sizes():
    """Shares that are 1.5 times those without it, in every size but one, which has none with it and is left out."""
    plain = made(0.1)
    loaded = [dataclasses.replace(p, share=1.5 * p.share, balance=0.01) for p in plain if p.size != (4, 16, 4)]
    header, *rows = scale.balanced([*loaded, *plain])
    assert rows == [[drift, "8", "x1.50 [1.50, 1.50]"] for drift in ("0.005", "0.02", "0.1")]
    assert len(header) == len(rows[0])
    assert scale.balanced(plain) == [header]


def test_what_r3_leaves_of_a_samplers_gap(tmp_path):
    rows = [{"state": 1, "arm": "", "step": 0, "eval/pass_at_1": 0.5}]
    for arm, gap in (("KL 0.005", 0.0), ("bfloat16", 4e-4), ("bfloat16 + R3", 1e-4)):
        rows.append({"state": 1, "arm": arm, "step": 1, "kl/sampler": gap, "routing/flips_sampler_old": 0.0125})
    study = study_of(tmp_path, {("", "4 layers", 700): rows})
    assert scale.samplers(study)[1:] == [["4 layers", "1.25 %", "4.0e-04", "25 %"]]


@pytest.mark.parametrize("drift", [{"routing/kl_fresh": 0.05}, {}])
def test_a_run_of_your_own_is_a_point(tmp_path, drift):
    """Its drift is that of the whole rollout, or of an older run half of Var(log r), here the same."""
    model = {"num_hidden_layers": 48, "num_experts": 128, "num_experts_per_tok": 8}
    row, run = {"step": 1, "routing/log_ratio_var": 0.1, "routing/share_of_variance": 0.3, **drift}, tmp_path / "run"
    write_rows(run, [row], config={"config": {"model": model}})
    (own,) = scale.users(load(run))
    assert (own.size, own.drift, own.share) == ((48, 128, 8), pytest.approx(0.05), pytest.approx(0.3))
    found = made(0.1)
    scale.figure(scale.fit(found), found, [own]).savefig(tmp_path / "figure.png")
    (run / "config.json").write_text(json.dumps({"config": {"model": model | {"num_experts": None}}}))
    with pytest.raises(ValueError, match=r"does not hold model.num_experts; set it in the run's config"):
        scale.point_of(load(run).runs, "")


def test_runs_of_real_weights_stand_beside_the_line(tmp_path, monkeypatch):
    """A row a run, and one of all runs of a learning rate, weighted by their variance: (0.1 + 3 * 0.3) / 4 = 0.25."""
    model = {"config": {"model": {"num_hidden_layers": 30, "num_experts": 8, "num_experts_per_tok": 2}}}
    rows = {}
    for seed, var, share in ((720, 0.1, 0.1), (721, 0.3, 0.3)):
        routing = {"log_ratio_var": var, "share_of_variance": share, "kl_fresh": var}
        rows["GRPO", "lr 2e-05", seed] = [{"step": 1, **{f"routing/{name}": x for name, x in routing.items()}}]
    anchor = study_of(tmp_path, rows, config=model)
    monkeypatch.setattr(scale, "points", lambda study: (made(0.0), 0))
    header, *found = scale.anchored(anchor, anchor)
    assert [row[:3] for row in found] == [
        ["GRPO, lr 2e-05, seed 720", "0.1", "10.0 %"],
        ["GRPO, lr 2e-05, seed 721", "0.3", "30.0 %"],
        ["all at lr 2e-05", "0.2", "25.0 %"],
    ]
    assert len(header) == len(found[0])


def test_a_sweep_gives_a_point_a_trajectory_and_drift(tmp_path):
    """Two states of one trajectory are one point, weighted by their variance; a share below 0 is counted, not drawn."""
    trajectories = {}
    model = {"num_hidden_layers": 4, "num_experts": 16, "num_experts_per_tok": 4}
    for seed, shares in ((700, (0.2, 0.4)), (701, (-0.1, -0.1))):
        trajectories["", "4 layers", seed] = rows = []
        for state, share in zip((1, 3), shares, strict=True):
            routing = {"log_ratio_var": 0.01 * state, "share_of_variance": share, "kl_fresh": 0.006}
            rows.append({"state": state, "arm": "", "step": 0, "eval/pass_at_1": 0.5})
            own = {f"routing/{name}": value for name, value in routing.items()}
            rows.append({"state": state, "arm": "KL 0.005", "step": 1, **own})
    study = study_of(tmp_path, trajectories, config={"arms": {"KL 0.005": {"model": model}}})
    (point,), without = scale.points(study)
    assert without == 1
    assert (point.size, point.aim, point.drift) == ((4, 16, 4), "KL 0.005", pytest.approx(0.006))
    assert point.share == pytest.approx((0.2 + 3 * 0.4) / 4)
