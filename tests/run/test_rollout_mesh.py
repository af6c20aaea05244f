"""Runs that sample on a mesh of their own are the runs of one mesh, resume bit for bit, and say what they move."""

import math

import jax
import numpy as np
import pytest

from jaxrl_llm.ground import sharding
from jaxrl_llm.records.run_log import read_rows
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.run import assembly
from jaxrl_llm.run.agreement import check_rows
from jaxrl_llm.run.opening import opening
from jaxrl_llm.run.settings import validate
from jaxrl_llm.training.experience import Scorer
from tests.reference import tiny_run
from tests.reference.metrics_doc import documented

TRAINING = (1, 4, 1, 1)
MOVED = {"time/parameters_moved_s", "rollout/parameters_moved_bytes"}


KINDS = {
    "experts, R3, tensor": ("gspo", {"replay.mode": "R3", "rollout.mesh_shape": (1, 1, 1, 4)}),
    "dense, bfloat16, data": (
        "grpo",
        {"model.num_experts": 0, "rollout.dtype": "bfloat16", "rollout.mesh_shape": (4, 1, 1, 1)},
    ),
    "adapters, data and tensor": (
        "grpo",
        {"lora.rank": 2, "objective.kl_coef": 0.01, "rollout.mesh_shape": (2, 1, 1, -1)},
    ),
    "DAPO, two draws": (
        "dapo",
        {"dynamic_sampling.max_draws": 2, "replay.mode": "R3", "rollout.mesh_shape": (1, 1, 1, 4)},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        pytest.param(*kind, id=name, marks=[pytest.mark.long] * (name != "experts, R3, tensor"))
        for name, kind in KINDS.items()
    ],
)
def test_a_run_is_that_of_one_mesh_and_resumes_bit_for_bit(folder, tmp_path, monkeypatch, name, changes):
    """The same answers and, within the rounding of sums over devices, the same updates; nothing of the copy is left
    when the answers are scored."""
    copies, alive = [], []
    prepare, score = Engine.prepare, Scorer.score

    def prepared(engine, params):
        found = prepare(engine, params)
        if found is not params:
            copies.extend(jax.tree.leaves(found))
        return found

    def scored(*args):
        alive.append(sum(not x.is_deleted() for x in copies))
        return score(*args)

    monkeypatch.setattr(Engine, "prepare", prepared)
    monkeypatch.setattr(Scorer, "score", scored)
    common = changes | {"mesh.shape": TRAINING, "steps": 2}
    whole = tiny_run.make_config(folder, name, **common)
    one, parts = (tiny_run.make_config(folder, name, **common | other) for other in ({}, {"steps": 1}))
    one.rollout.mesh_shape = ()
    found, _ = tiny_run.train(tmp_path / "own", whole)
    assert "; of rollouts 4: " in opening(assembly.build(validate(whole)), tmp_path)
    assert copies
    assert set(alive) == {0}
    copies.clear()
    tiny_run.train(tmp_path / "one", one)
    assert not copies
    assert tiny_run.samples(tmp_path / "own") == tiny_run.samples(tmp_path / "one")
    for row, other in zip(*(tiny_run.metrics(tmp_path / run) for run in ("own", "one")), strict=True):
        assert row.keys() - other.keys() <= MOVED
        for key in other.keys() - {"step", "check/sampler_equal"}:
            given, wanted = (np.asarray(x[key], float) for x in (row, other))
            np.testing.assert_allclose(given, wanted, rtol=2e-3, atol=1e-4, err_msg=f"step {row['step']} {key}")
    first = read_rows(tmp_path / "own" / "metrics.jsonl")[1]
    assert 0 < first["time/parameters_moved_s"] < first["time/rollout_s"]
    assert first["rollout/parameters_moved_bytes"] > 0
    assert documented() >= MOVED

    tiny_run.train(tmp_path / "parts", parts)
    assert tiny_run.train(tmp_path / "parts", whole)[0] == found
    states = [tiny_run.final_state(tmp_path / run, whole)[1] for run in ("parts", "own")]
    jax.tree.map(np.testing.assert_array_equal, *states)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 1, 1, 2), r"rollout\.mesh_shape=\(1, 1, 1, 2\) takes 2 of the 4 devices .* set one of its sizes to -1"),
        ((2, 1, 1, 4), "needs 8 devices, 4 are visible; lower rollout.mesh_shape"),
        ((1, 1, 4), "must be four whole numbers.* set rollout.mesh_shape"),
        ((-1, 1, 1, 3), "does not divide the 4 visible devices by 3; change rollout.mesh_shape"),
        ((4, 1, 1, 1), r"rollout\.mesh_shape=\(4, 1, 1, 1\) spreads 6 answers of a rollout over 4 devices"),
    ],
)
def test_a_mesh_that_does_not_fit_is_one_line(folder, shape, message):
    changes = {"rollout.prompts": 3, "rollout.group_size": 2, "updates.minibatches": 1, "mesh.shape": (1, 2, 1, 2)}
    config = tiny_run.make_config(folder, **changes, **{"rollout.mesh_shape": shape})
    with pytest.raises(ValueError, match=message):
        assembly.build(validate(config))


ROWS = {  # of 4 prompts x 4 answers in 2 minibatches, a warm start of 64 answers a step, on so many devices
    "a micro-batch": (
        32,
        {},
        r"mesh.shape=\(1, -1, 1, 1\) on 32 devices spreads 8 rows of a micro-batch over 32 devices, "
        "which must divide them; change mesh.shape, updates.micro_batch_rows or updates.minibatches",
    ),
    "a micro-batch that can be wider": (
        8,
        {"updates.micro_batch_rows": 4},
        "spreads 4 rows of a micro-batch over 8 devices, .*; set updates.micro_batch_rows=8, or",
    ),
    "a rollout": (
        32,
        {"mesh.shape": (1, 1, 1, 1, -1)},
        r"-1\) on 32 devices spreads 16 answers of a rollout over 32 devices",
    ),
    "a warm start": (
        8,
        {"warm_start.batch_size": 20},
        "spreads 20 answers of a warm start over 8 devices, .* change warm_start.batch_size",
    ),
    "slots": (
        4,
        {"rollout.slots": 6},
        r"spreads 6 slots over 4 devices, which must divide them; set rollout.slots=8, or 0",
    ),
    "slots on a mesh of their own": (
        4,
        {"rollout.slots": 6, "mesh.shape": (1, 1, 1, -1), "rollout.mesh_shape": (-1, 1, 1, 1)},
        r"rollout.mesh_shape=\(-1, 1, 1, 1\) on 4 devices spreads 6 slots over 4 devices",
    ),
    "pairs": (
        4,
        {
            "objective.name": "dpo",
            "rollout.group_size": 2,
            "updates.shuffle": "groups",
            "rollout.prompts": 6,
            "mesh.shape": (1, 1, 1, 1, -1),
            "replay.mode": "off",
        },
        "spreads 6 rows over 4 devices, which must divide them; change rollout.prompts",
    ),
    "a mesh that takes no such number": (
        6,
        {"mesh.shape": (1, -1, 4, 1)},
        "does not divide the 6 visible devices by 4",
    ),
}


@pytest.mark.parametrize("case", ROWS)
def test_a_mesh_is_checked_once_its_devices_are_known(folder, case):
    """Rows that the devices do not divide are refused, also where -1 stands for their number; without them it fits."""
    devices, changes, message = ROWS[case]
    common = {"rollout.prompts": 4, "rollout.group_size": 4, "warm_start.batch_size": 64, "mesh.shape": (1, -1, 1, 1)}
    settings = validate(tiny_run.make_config(folder, **common | changes))
    check_rows(settings, math.prod(size for size in settings.mesh.shape if size > 0))
    with pytest.raises(ValueError, match=message):
        check_rows(settings, devices)


def test_a_run_is_built_only_where_its_rows_are_divided(folder):
    """A DIR can be opened on any devices, and a compilation for others is refused as a run is."""
    changes = {"mesh.shape": (1, -1, 1, 1), "rollout.prompts": 3, "rollout.group_size": 2, "updates.minibatches": 1}
    settings = validate(tiny_run.make_config(folder, **changes))
    for devices in (None, jax.devices()):
        with pytest.raises(ValueError, match=r"on 4 devices spreads 6 rows of a micro-batch over 4 devices"):
            assembly.build(settings, devices)
    assert assembly.build(settings, jax.devices(), trains=False).model.mesh.size == 4


def test_the_models_of_a_run(folder):
    """One model, on two meshes of the same devices; without the field it is one model on one mesh."""
    changes = {"mesh.shape": TRAINING, "rollout.mesh_shape": (1, 2, 1, -1)}
    run = assembly.build(validate(tiny_run.make_config(folder, **changes)))
    assert run.sampler.mesh.devices.shape == (1, 2, 1, 2, 1)
    assert list(run.sampler.mesh.devices.flat) == list(run.model.mesh.devices.flat)
    assert run.source.engine.model == run.evaluator.model == run.sampler
    assert run.source.engine.rows_on == run.learner.model.mesh == sharding.make_mesh(TRAINING)
    same = assembly.build(validate(tiny_run.make_config(folder)))
    assert same.sampler == same.model
