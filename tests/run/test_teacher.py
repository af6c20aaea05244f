"""The teacher of a run: where it comes from, what is refused by name, and whole runs with it."""

from typing import Any

import jax
import numpy as np
import pytest

from configs import pretrained, stand_ins
from jaxrl_llm.check.fits import stays_of
from jaxrl_llm.ground import sharding
from jaxrl_llm.models import save_pretrained
from jaxrl_llm.plan.programs import programs
from jaxrl_llm.records.recorded import FORMAT
from jaxrl_llm.records.run_log import plain, write_json
from jaxrl_llm.run import assembly, run_dir
from jaxrl_llm.run.opening import opening
from jaxrl_llm.run.settings import config_hash, validate
from jaxrl_llm.run.teacher import Teacher
from tests.reference import tiny_reward_model, tiny_run
from tests.reference.metrics_doc import documented


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Data and warm starts of all runs, and a teacher's DIR in teacher/: a mixture, beside dense students."""
    folder = tmp_path_factory.mktemp("shared")
    write(folder / "teacher", folder)
    return folder


def write(workdir, folder, **changes):
    """A DIR with parameters of numpy; its value head is none of the teacher's."""
    own = {"objective.name": "grpo", "model.hidden_size": 16} | changes
    return tiny_reward_model.write(workdir, tiny_run.make_config(folder), **own)


def config_of(folder, name="distill", **changes):
    return tiny_run.make_config(folder, name, **{"teacher.path": str(folder / "teacher")} | changes)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("distill", {"teacher.path": ""}, "read a teacher; set teacher.path to a DIR or a checkpoint"),
        ("grpo", {}, r"teacher.path='.*' teaches grpo nothing; set objective.advantage=teacher, or clear it"),
        ("gkd", {"teacher.beta": 1.5}, r"teacher.beta=1.5 is out of range"),
        ("gkd", {"teacher.add_tail": False}, r"add_tail=False with teacher.top_k=0 and beta=1: .* set teacher.beta=0"),
        ("gkd", {"teacher.mesh_shape": (1, 1, 1, 2)}, "the exact form reads the teacher inside the update"),
    ],
)
def test_settings_that_do_not_agree(folder, name, changes, message):
    with pytest.raises(ValueError, match=message):
        validate(config_of(folder, name, **changes))


@pytest.mark.slow
def test_what_is_no_teacher_of_this_policy(folder, tmp_path):
    s = validate(config_of(folder))

    def found(path, **changes):
        return Teacher.find(validate(config_of(folder, **{"teacher.path": str(path)} | changes)))

    assert found(folder / "teacher").load().params.keys() == {"ends", "moe"}
    with pytest.raises(FileNotFoundError, match=r"teacher.path=.*nothing: .*; give the DIR of a run, or a checkpoint"):
        found(tmp_path / "nothing")
    for changes, message in (
        ({"lora.rank": 2}, r"holds adapters \(lora.rank=2\) without their base; give its export: python -m jaxrl_llm"),
        ({"objective.name": "reward_model"}, "holds a reward model, which gives no probabilities"),
        ({"task.name": "addition", "task.options": {"digits": 2}}, "with other ids than the policy's 13"),
    ):
        other = tmp_path / min(changes)
        write(other, folder, **changes)
        with pytest.raises(ValueError, match=message):
            found(other)
    with pytest.raises(ValueError, match=r"is a mixture of experts, and updates.layout=shared serves dense models"):
        found(folder / "teacher", **{"updates.layout": "shared", "updates.shuffle": "groups"})
    bare = Teacher.find(s).load()
    save_pretrained(bare.params, bare.model.config, tmp_path / "bare")
    with pytest.raises(FileNotFoundError, match=r"has no tokenizer to compare token ids by .*; copy the policy's"):
        found(tmp_path / "bare")


@pytest.mark.slow
def test_a_checkpoint_of_another_size_teaches_by_the_same_vocabulary():
    """Its tensors are read onto its own model; the policy is another checkpoint with that tokenizer."""
    config: Any = pretrained.get_config("smoke")
    sizes = {"num_hidden_layers": 1, "hidden_size": 48, "num_experts": 0, "intermediate_size": 32}
    config.teacher.path, config.objective.advantage = stand_ins.checkpoint(sizes), "teacher"
    found = Teacher.find(validate(config)).load()
    assert isinstance(found.identity, str)
    assert found.params["ends"]["embedding"].shape[1] == 48
    assert found.model.config.hidden_size != validate(config).model.hidden_size


@pytest.mark.slow
def test_a_run_is_identified_by_what_its_teacher_is(folder, tmp_path):
    config, further = config_of(folder), tmp_path / "further"
    write(tmp_path / "moved", folder)
    assert config_hash(config_of(folder, **{"teacher.path": str(tmp_path / "moved")})) == config_hash(config)
    write(further, folder, step=8)
    workdir, run = tmp_path / "run", assembly.build(validate(config))
    assert f"{folder / 'teacher'}" in opening(run, workdir)
    workdir.mkdir()
    (workdir / "metrics.jsonl").write_text('{"step": 1}\n')
    recorded = {"format": FORMAT, "config": plain(config.to_dict()), "config_hash": "another", **run.made_from}
    write_json(workdir / "config.json", recorded)
    with pytest.raises(ValueError, match=r"another config \(teacher.path: \[7, '\w+'\] -> \[8, '\w+'\]\)"):
        run_dir.check(workdir, config_of(folder, **{"teacher.path": str(further)}))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["distill", "gkd"])
def test_memory_counts_the_teacher(folder, name):
    """Its parameters stay; each program that reads them has them among its arguments."""
    run = assembly.build(validate(config_of(folder, name)))
    found = programs(run, ("score", "update"))
    own = sharding.local_bytes(run.teacher.shapes)
    assert stays_of(run, found)["teacher"] == own
    read = [
        program.name for program in found if sharding.local_bytes(program.stays) >= own + (program.name == "update")
    ]
    assert {"distill": "score", "gkd": "update"}[name] in read


@pytest.mark.slow
@pytest.mark.parametrize("name", ["distill", "gkd"])
def test_a_run_resumes_bit_for_bit(folder, tmp_path, name):
    config = config_of(folder, name, **{"warm_start.steps": 0})
    straight = config, tmp_path / "whole", *tiny_run.train(tmp_path / "whole", config)
    tiny_run.assert_resumes_as(straight, tmp_path / "parts")
    rows = tiny_run.metrics(tmp_path / "whole")[1:]
    assert {key for row in rows for key in row} - {"step"} <= documented(), "add them to docs/metrics.md"
    learnt = "kl/teacher" if name == "distill" else "loss/teacher"
    assert rows[-1][learnt] < rows[0][learnt]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["distill", "gkd"])
def test_four_devices_take_the_same_step(folder, tmp_path, name):
    states = []
    for mesh in ((1, 1, 1, 1), (2, 2, 1, 1)):
        config = config_of(folder, name, **{"warm_start.steps": 0, "steps": 1, "mesh.shape": mesh})
        tiny_run.train(tmp_path / str(mesh), config)
        states.append(
            (tiny_run.metrics(tmp_path / str(mesh))[1], tiny_run.final_state(tmp_path / str(mesh), config)[1])
        )
    (row, state), (other, spread) = states
    learnt = "kl/teacher" if name == "distill" else "loss/teacher"
    assert row[learnt] == pytest.approx(other[learnt], rel=1e-3)
    for a, b in zip(*map(jax.tree.leaves, (state.params, spread.params)), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-3)


@pytest.mark.slow
def test_supervised_training_with_a_teacher_is_off_policy_distillation(folder, tmp_path):
    more = {"objective.teacher_coef": 1.0, "teacher.beta": 0.0, "rollout.group_size": 1, "steps": 20}
    tiny_run.train(tmp_path, config_of(folder, "sft", **more))
    rows = tiny_run.metrics(tmp_path)[1:]
    assert rows[-1]["loss/teacher"] < 0.8 * rows[0]["loss/teacher"]


@pytest.mark.slow
def test_a_run_with_the_teacher_on_other_devices_is_the_run_on_one_mesh(folder, tmp_path):
    """And its printed memory is that of the policy's devices."""
    rows = []
    for shape in ((), (1, 1, 1, 2)):
        config = config_of(folder, **{"warm_start.steps": 0, "steps": 2, "teacher.mesh_shape": shape})
        run = assembly.build(validate(config))
        assert ("on a mesh of 2: tensor 2" in opening(run, tmp_path).replace("\n           ", " ")) == bool(shape)
        assert ("teacher" in stays_of(run, programs(run, ("score",)))) == (not shape)
        tiny_run.train(tmp_path / str(shape), config)
        rows.append([row["kl/teacher"] for row in tiny_run.metrics(tmp_path / str(shape))[1:]])
    np.testing.assert_allclose(*rows, rtol=1e-4)
