"""The study of gates: its gates against the package's own, its measures by hand, and its page against its data."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.gates import forms, measure, repairs, tables
from experiments.routing_replay.scale import Point
from jaxrl_llm.models.gate import Gate
from jaxrl_llm.training.optimizer import OptimizerConfig, make_optimizer
from jaxrl_llm.training.state import Trained

E, K = 32, 8
LOGITS = np.random.default_rng(0).normal(0, 2, (200, E)).astype(np.float32)
BIAS = np.random.default_rng(1).normal(0, 0.1, E).astype(np.float32)
PAGE = " ".join(tables.FOLDER.with_name("README.md").read_text().split())


def any_gate(form):
    """The study's gate and its weights; a form without a bias has 0."""
    weights = {"router_form": jnp.asarray(forms.buffer(form))}
    weights["router_bias"] = jnp.asarray(BIAS if "bias" in form else 0 * BIAS)
    gate = forms.AnyGate(E, K, selection_bias=True, groups=forms.GROUPS, kept_groups=forms.KEPT)
    return gate, weights


@pytest.mark.parametrize("form", forms.FORMS)
def test_every_form_is_the_gate_of_the_package(form):
    """Equal choices, weights and gradients."""
    gate, weights = any_gate(form)
    own = dataclasses.replace(Gate(E, K), **forms.FORMS[form])

    def of(gate, logits):
        routing, given = gate.choose(logits, weights)
        return jnp.sum(given**2), (routing.experts, given)

    found, wanted = (jax.jit(jax.grad(lambda x, g=g: of(g, x), has_aux=True))(LOGITS) for g in (gate, own))
    np.testing.assert_array_equal(*(np.sort(x[1][0], axis=-1) for x in (found, wanted)))
    np.testing.assert_allclose(*(np.sort(x[1][1], axis=-1) for x in (found, wanted)), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-4, atol=1e-6)


def test_a_softmax_over_the_chosen_logits_is_the_softmax_renormalised():
    """exp(l_i) / sum_chosen exp(l_j), by numpy in float64."""
    chosen = np.argsort(-LOGITS, axis=-1)[:, :K]
    exponents = np.exp(np.take_along_axis(LOGITS.astype(np.float64), chosen, axis=-1))
    routing, given = jax.jit(Gate(E, K).choose)(LOGITS, {})
    np.testing.assert_array_equal(routing.experts, chosen)
    np.testing.assert_allclose(given, exponents / exponents.sum(-1, keepdims=True), rtol=1e-5)


def test_one_program_serves_every_rate():
    """Two changes of AdamW at 3e-4, and at rate 1 with the factor 3e-4, to rounding."""
    params = Trained({"w": jnp.arange(6.0).reshape(2, 3)})
    config = OptimizerConfig(learning_rate=3e-4, clip_norm=1.0)
    own, usual = measure.rated(config), make_optimizer(config, 1, masters=False)
    states = [own.init(params), usual.init(params)]
    states[0] = (states[0][0], jnp.float32(3e-4))
    for scale in (5.0, -0.3):
        gradients = jax.tree.map(lambda x, scale=scale: scale * jnp.cos(x), params)
        changes, states[0] = own.update(gradients, states[0], params)
        wanted, states[1] = usual.update(gradients, states[1], params)
        np.testing.assert_allclose(changes.policy["w"], wanted.policy["w"], rtol=1e-5)


def test_a_model_has_the_same_number_of_parameters_with_a_shared_expert():
    """32 experts of 16 units, or 32 of 15 beside one of 32: 512 units."""
    layer = {name: np.ones((1, E, *shape), np.float32) for name, shape in _SHAPES.items()}
    shared = {name: np.ones((1, *shape), np.float32) for name, shape in _SHARED.items()}
    fresh = {"moe": {"mlp": {**layer, "shared": shared, "router_form": np.zeros((1, 3), np.float32)}}}
    sizes = []
    for has in (False, True):
        mlp = forms.begun(fresh, tables.GROUPED, has)["moe"]["mlp"]
        np.testing.assert_array_equal(mlp["router_form"], [[1, 1, 1]])
        sizes.append(sum(np.count_nonzero(x) for name, x in mlp.items() if name in _SHAPES))
        sizes[-1] += sum(np.count_nonzero(x) for x in mlp["shared"].values())
    assert sizes == [3 * 4 * 512] * 2


_SHAPES = {"gate": (4, 16), "up": (4, 16), "down": (16, 4)}
_SHARED = {"gate": (4, 32), "up": (4, 32), "down": (32, 4)}


def test_a_bias_moves_towards_an_even_load():
    layers = {"router_bias": jnp.zeros((1, E))}
    experts = np.array([0, 0, 0, 1] + [255] * 4, np.uint8)[None]  # 255: no record
    measure._balance(layers, experts)
    wanted = np.full(E, measure.BIAS_STEP)
    wanted[:2] = -measure.BIAS_STEP  # 3 and 1 of a mean of 1/8
    np.testing.assert_allclose(layers["router_bias"][0], wanted)


def drift_row(gate, shared, chosen, seed, flips):
    where = {"gate": gate, "shared": shared, "chosen": chosen, "seed": seed}
    return where | {"kl": [0.01, 0.1], "flips": [flips, 4 * flips], "share": [0.1, 0.3], "tail": [1.0, 1.0]}


def test_outcomes_at_a_drift_and_their_contrast_by_hand():
    """Halfway in log KL: flips x2, share 0.2. Groups have 1.5 times the flips of all others in each seed but a little,
    the second batch too, and everything else is alike."""
    rows = [
        drift_row(gate, shared, 8, seed, (1.5 if gate == tables.GROUPED else 1.0) * 0.01 * (1 + 0.001 * (seed % 3)))
        for gate in forms.FORMS
        for shared in (False, True)
        for seed in range(10)
    ]
    middle = float(np.sqrt(0.01 * 0.1))
    assert tables.at(rows[0], "flips", middle) == pytest.approx(np.log(0.02))
    assert tables.at(rows[0], "share", middle) == pytest.approx(0.2)
    assert tables.at(rows[0], "share", 1e-3) == 0.1
    assert [tables.outside(rows[0], drift) for drift in (1e-3, 0.03)] == [True, False]
    found = {(cells[1], cells[3]): cells for cells in tables.contrast_table(rows)}
    assert found[f"{tables.GROUPED} - {tables.BIASED}", "flips"][4:7] == ["x1.50 [1.50, 1.50]"] * 3
    own = [Point("own", 4, 32, 8, drift=0.02, share=0.1, flips=0.03, above=0.0, above_routing=0.0)]
    assert len(tables.figure(rows, own).axes) == 2
    verdicts = {key[0]: cells[-1] for key, cells in found.items() if key[1] == "flips"}
    assert list(verdicts.values()) == ["alike", "alike", "differs", "differs", "alike"]
    assert tables.whole_seeds(rows[1:], [8]) == list(range(1, 10))


def repair_row(cell, seed, dose, lag, arm, end):
    watched = {"kl/sampler": 0.1, "kl/old": 1e-3, "routing/flips_sampler_old": 0.4}
    return {**vars(cell), "seed": seed, "dose": dose, "lag": lag, "arm": arm, "accuracy": [0.7, end], **watched}


def test_a_remedy_is_judged_by_its_second_batch():
    """R3 wins 0.1 back in each seed but a little, GSPO in the first batch alone; the softmax loses 0.2, groups 0.1.

    Without a dose R3 wins 0.04, so it repairs 0.06.
    """
    rows = []
    for cell, loss in zip(measure.DOSED, (0.2, 0.1), strict=True):
        for seed in range(10):
            noise = 0.001 * (seed % 3 - 1)
            gains = {"none": 0.0, "R3": 0.1 + noise, "GSPO": 0.1 if seed < 5 else noise}
            rows += [repair_row(cell, seed, 0.1, 0, arm, 0.8 - loss + noise + gain) for arm, gain in gains.items()]
            rows += [repair_row(cell, seed, 0.0, 0, "none", 0.8), repair_row(cell, seed, 0.0, 0, "R3", 0.84)]
    found = {(*cells[:2], *cells[3:5]): cells[5:] for cells in repairs.compared_table(rows)}
    softmax = [found["softmax, renormalised", "0.1", arm, "none"] for arm in ("R3", "GSPO")]
    softmax.append(found["softmax, renormalised", "0.1", "none", "none at dose 0"])
    assert [cells[-1] for cells in softmax] == ["differs", "open", "differs"]
    assert softmax[-1][1].startswith("-0.200 [")
    assert found["softmax, renormalised", "0.1", "R3", "none, as repair"][1].startswith("+0.060 [")
    between = {tuple(cells[:5]): cells[5:] for cells in repairs.between_gates(rows)}
    assert between["sigmoid, bias, groups", "0.1", "0", "none", "none at dose 0"][1].startswith("+0.100 [")
    (row,) = [cells for cells in repairs.overview(rows) if cells[:2] == ["softmax, renormalised", "0.1"]]
    assert row[5].startswith("**-0.200 [")
    assert row[9].startswith("+0.050 [")
    first = [row for row in rows if row["seed"] < 5]
    assert {cells[-1] for cells in repairs.compared_table(first)} == {"estimate"}


def test_a_dose_is_compared_at_its_lag_and_a_lag_without_a_dose():
    ends = {(0.0, 0): 0.8, (0.0, 8): 0.7, (0.1, 0): 0.75, (0.1, 8): 0.5, ("bfloat16", 0): 0.79}
    cell = measure.DOSED[0]
    rows = [repair_row(cell, 3, *place, "none", end) for place, end in ends.items()]
    assert [named[1:] for named in (repairs.named(*place) for place in repairs.places(rows))] == [
        ["0", "0"],
        ["0", "8"],
        ["0.1", "0"],
        ["0.1", "8"],
        ["bfloat16", "0"],
    ]
    costs = {place: repairs.gains(rows, cell, *place, "none") for place in ends}
    wanted = {(0.0, 0): 0, (0.0, 8): -0.1, (0.1, 0): -0.05, (0.1, 8): -0.2, ("bfloat16", 0): -0.01}
    assert costs == {place: {3: pytest.approx(value)} for place, value in wanted.items()}


def test_the_queue_names_every_run_once_and_reads_lines_without_a_lag(tmp_path):
    queue = [tuple(where.values()) for where, _ in measure.repair_jobs(10)]
    assert (
        len(set(queue)) == len(queue) == 10 * 2 * 6 * (5 + 2) * 3
    )  # seeds, gates, arms, doses of the first two and of the others, lags
    assert {where["seed"] for where, _ in measure.repair_jobs(2)} == {0, 1}
    path = tmp_path / "old.jsonl"
    path.write_text('{"arm": "none"}\n{"arm": "none", "lag": 8}\n{"kl": []}\n')
    assert measure.read(path) == [{"lag": 0, "arm": "none"}, {"lag": 8, "arm": "none"}, {"kl": []}]


def test_the_page_has_the_tables_of_the_data():
    drift, repair = (measure.read(tables.FOLDER / f"{part}.jsonl") for part in ("drift", "repair"))
    for head, body in [*tables.every(drift), (repairs.OVERVIEW, repairs.overview(repair))]:
        for cells in (head, *body):
            assert " ".join(f"| {' | '.join(cells)} |".split()) in PAGE
    for sentence in tables.sentences(drift):
        assert sentence in PAGE
    compared = (tables.FOLDER / "repair.md").read_text()
    assert compared == repairs.page(repair)
    quoted = re.findall(r"[+-]\d\.\d{3} \[[^]]+\]", PAGE)
    assert len(quoted) > 20
    assert [one for one in quoted if one not in compared] == []
    places = ("gate", "seed", "dose", "lag", "arm")
    for rows, names in ((drift, ("gate", "shared", "chosen", "seed")), (repair, places)):
        assert len({tuple(row[name] for name in names) for row in rows}) == len(rows)


@pytest.mark.slow
def test_a_small_measurement(monkeypatch, tmp_path):
    """A short start, and each part from it; a dose moves the choice alone."""
    small = {"rollout.prompts": 4, "model.num_hidden_layers": 1, "evaluation.prompts": 8, "evaluation.samples": 2}
    small["task.options"] = {"digits": 2, "train_size": 64, "test_size": 16}
    monkeypatch.setattr(measure, "SETTING", measure.SETTING | small)
    for name, value in (("MOST", 50), ("WARM_RATE", 1e-2), ("RATES", (1e-4, 1e-3)), ("STEPS", 2)):
        monkeypatch.setattr(measure, name, value)
    monkeypatch.setattr(measure, "LEVELS", {tables.GROUPED: {0.1: 1.0}})
    measure.start.cache_clear()
    cell = measure.Cell(tables.GROUPED, True, 8)
    row = measure.drifted(cell, 0)
    measure.start.cache_clear()
    assert row["kl"][0] < row["kl"][1]
    assert 0 < row["flips"][0] < row["flips"][1] < 1
    cell = dataclasses.replace(cell, shared=False)
    found = measure.repaired(cell, 0.1, 0, "R3", 0)
    rounded = measure.repaired(cell, measure.BFLOAT16, 0, "none", 0)
    behind = measure.repaired(cell, measure.EXACT, 1, "none", 0)
    measure.start.cache_clear()
    assert found["routing/flips_sampler_old"] > 0.01
    assert found["kl/sampler"] < 1e-6  # replayed choice with gates that nothing moved
    assert 1e-7 < rounded["kl/sampler"] < 0.01
    assert behind["kl/sampler"] > 1e-6  # half of the rollouts are of an older policy
    assert re.match(r"\[0\.\d+", str(found["accuracy"]))
