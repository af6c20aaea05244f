"""The arithmetic of memory against the arrays of a run and what XLA says of its compiled programs."""

import gc
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models import score_chunk
from jaxrl_llm.run import memory, trainer
from jaxrl_llm.run.assembly import build
from jaxrl_llm.run.memory import Memory, of_device
from jaxrl_llm.run.settings import validate
from jaxrl_llm.training.layout import Groups, lay_out
from jaxrl_llm.training.state import TrainBatch
from jaxrl_llm.training.warm_start import cached_in
from tests.reference import tiny_run

# Large enough that what the arithmetic leaves out (scalars, masks, code) is small beside what it counts.
SIZES = {
    "model.num_experts": 0,
    "model.hidden_size": 128,
    "model.intermediate_size": 384,
    "model.head_dim": 32,
    "task.options.digits": 24,
    "rollout.prompts": 8,
    "rollout.group_size": 4,
    "updates.minibatches": 2,
}


def made(tmp_path, **changes):
    config = tiny_run.make_config(tmp_path)
    with config.unlocked():
        config.task.options.digits = 24
        config.update_from_flattened_dict(SIZES | changes)
    return build(validate(config))


def held(tree):
    """Bytes on the first device."""
    shards = [x.addressable_shards[0].data for x in jax.tree.leaves(tree)]
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in shards)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"mesh.shape": (1, 2, 1, 2)}, marks=pytest.mark.slow),
        {"mesh.shape": (1, 2, 1, 1, 2)},
        pytest.param(
            {"mesh.shape": (1, 2, 2, 1), "model.num_experts": 4, "objective.kl_coef": 0.1}, marks=pytest.mark.slow
        ),
        pytest.param({"objective.name": "ppo", "critic.kind": "separate"}, marks=pytest.mark.slow),
        pytest.param(
            {"objective.name": "ppo", "critic.kind": "head", "model.param_dtype": "bfloat16"}, marks=pytest.mark.slow
        ),
    ],
    ids=["fsdp_tensor", "context", "experts_reference", "critic", "value_head"],
)
def test_what_stays_is_exact(tmp_path, changes):
    run = made(tmp_path, **changes)
    stays, state = run.memory().stays, run.blank()
    assert stays["parameters"] == held(state.trained.policy)
    saved = state.saved()
    assert stays["optimizer"] == held(saved.opt_state)
    assert stays.get("critic", 0) == held((saved.critic, saved.critic_opt_state))
    assert stays.get("reference", 0) == (held(state.trained.policy) if "objective.kl_coef" in changes else 0)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="whole", marks=pytest.mark.slow),
        pytest.param({"rollout.slots": 16, "updates.micro_batch_rows": 4}, id="parts", marks=pytest.mark.slow),
        pytest.param({"model.num_experts": 4, "updates.micro_batch_rows": 8}, id="experts", marks=pytest.mark.slow),
        pytest.param(
            {"updates.layout": "shared", "updates.shuffle": "groups"}, id="shared_prompt", marks=pytest.mark.slow
        ),
        pytest.param({"lora.rank": 4, "updates.micro_batch_rows": 8}, id="adapters", marks=pytest.mark.slow),
        pytest.param({"rollout.max_new_tokens": 1024}, id="long", marks=pytest.mark.slow),
        pytest.param({"model.dtype": "bfloat16"}, id="bfloat16", marks=pytest.mark.slow),
        pytest.param({"model.remat": "block"}, id="remat", marks=pytest.mark.slow),
    ],
)
def test_temporaries_are_those_of_the_compiled_programs(tmp_path, changes):
    """Within a factor of 1.6: XLA lays arrays of different lives over one another and copies some."""
    run = made(tmp_path, **changes)
    s, state = run.settings, jax.eval_shape(run.blank)
    said = run.memory()
    prompts, width = s.rollout.prompts, s.task.prompt_length
    base = run.model.shapes() if s.lora.rank else None
    lowered = run.source.engine.lower(base or state.trained.policy, prompts, width)
    rollout = lowered.compile().memory_analysis().temp_size_in_bytes
    inside = sum(said.rollout.values()) - said.rollout["merged"]  # made before the program starts
    assert rollout / 1.6 < inside < rollout * 1.6

    time = width + s.answer_length
    groups = Groups(s.rollout.group_size, s.answer_length, np.full(s.rows, width))
    layout = lay_out(np.arange(s.rows // 2), np.full(s.rows, time), time, s.updates, groups)
    like = dict.fromkeys(("tokens", "segment_ids"), jnp.int32) | {"loss_mask": bool}
    like |= dict.fromkeys(("advantages", "sampler_logprobs", "old_logprobs"), jnp.float32)
    batch = TrainBatch(**{name: jnp.zeros((s.rows, time), dtype) for name, dtype in like.items()})
    leaves, tree = jax.tree.flatten(batch)

    def step(state, leaves, base):
        batch = jax.tree.unflatten(tree, leaves)
        return run.learner.update(state.replace(base=base), batch, layout)

    compiled = jax.jit(step, donate_argnums=0).lower(state, leaves, base).compile()
    update = compiled.memory_analysis().temp_size_in_bytes
    assert update / 1.6 < sum(said.update.values()) < update * 1.6


@pytest.mark.slow
def test_a_rollout_on_a_mesh_of_its_own_reads_what_was_moved(tmp_path):
    """The weights that are counted are the program's arguments, and it makes no second copy of them."""
    meshes = {"mesh.shape": (1, 4, 1, 1), "rollout.mesh_shape": (1, 1, 1, 4)}
    run = made(tmp_path, **meshes, **{"model.hidden_size": 256, "model.intermediate_size": 1024})
    said, params, s = run.memory().rollout, run.blank().trained.policy, run.settings
    assert held(run.source.engine.prepare(params)) == said["weights"]
    lowered = run.source.engine.lower(params, s.rollout.prompts, s.task.prompt_length)
    rest = sum(said.values()) - said["weights"]
    assert said["weights"] > 1.5 * rest
    assert lowered.compile().memory_analysis().temp_size_in_bytes < rest * 1.6


def test_what_was_kept_is_counted(tmp_path):
    """4 m bytes for every place of an answer in the rollout, and for every place of a row in the update."""
    found = [made(tmp_path, **cuts) for cuts in ({}, {"rollout.top_k": 6})]
    s = found[0].settings
    assert [run.source.engine.record_kept for run in found] == [False, True]
    whole, cut = (run.memory() for run in found)
    places, length = s.rows * s.answer_length, s.task.prompt_length + s.answer_length
    assert cut.rollout["records"] == whole.rollout["records"] + places * 4 * 6
    assert cut.update["records"] == whole.update["records"] + s.rows * length * 4 * 6


def test_the_copy_that_adapters_are_merged_into_is_counted(tmp_path):
    """The arrays of a rollout's policy that are not the base's own."""
    config = {"lora.rank": 2, "lora.targets": "attention", "warm_start.steps": 0}
    run = made(tmp_path, **config)
    state = run.start(print)
    policy = jax.tree.leaves_with_path(state.policy.plain(run.model))
    own = {path: x.unsafe_buffer_pointer() for path, x in jax.tree.leaves_with_path(state.base)}
    copied = [x for path, x in policy if x.unsafe_buffer_pointer() != own[path]]
    assert 0 < held(copied) < held(state.base) / 2
    said = run.memory()
    assert said.rollout["merged"] == held(copied)
    assert said.stays["frozen base"] == held(state.base)
    # Adapters make a small checkpoint, so that what a rollout leaves in pieces lies beside an update.
    assert said.stays["checkpoint"] == int(1.3 * held([state.trained, state.opt_state]))
    assert said.update["weights"] == said.rollout["weights"] - said.stays["checkpoint"] > 0


def test_a_run_says_its_cache_and_its_largest_temporaries():
    memory = Memory({"parameters": 10**6}, {"cache": 10**6, "weights": 2 * 10**6}, {"logits": 5 * 10**5}, None)
    lines = " ".join(memory.lines())
    assert lines.endswith("rollout 3 MB (cache 1 MB, weights 2 MB), update 500 kB (logits 500 kB)")


def test_more_devices_hold_less_and_share_what_this_machine_has(tmp_path):
    one, four = (made(tmp_path, **{"mesh.shape": shape}) for shape in ((1, 1, 1, 1), (1, 4, 1, 1)))
    assert four.memory().total < 0.5 * one.memory().total
    assert of_device(four.model.mesh) == pytest.approx(of_device(one.model.mesh) / 4, rel=0.1)  # of what is free now


def test_every_device_has_a_chunk_of_logits_of_its_own(tmp_path, monkeypatch):
    many = {"rollout.prompts": 64, "updates.minibatches": 1}
    one, four = (made(tmp_path, **many, **{"mesh.shape": (1, n, 1, 1)}) for n in (1, 4))
    assert four.settings.rows // 4 * four.settings.answer_length > score_chunk("cpu")
    with_kept = [run.memory().update["logits"] for run in (one, four)]
    monkeypatch.setattr("jaxrl_llm.run.memory.kept_probabilities", lambda *_: 0)
    chunks = [run.memory().update["logits"] for run in (one, four)]
    assert chunks[0] == chunks[1] > 0
    assert with_kept[0] - chunks[0] == 4 * (with_kept[1] - chunks[1]) > 0  # of its own tokens alone


def test_an_evaluation_of_many_prompts_is_counted(tmp_path):
    """With as many answers as a rollout it takes what that takes, and twice as many take twice the cache."""
    sizes = {"evaluation.samples": 3, "rollout.slots": 0}
    one, two = (made(tmp_path, **sizes, **{"evaluation.prompts": n}).memory() for n in (8, 16))
    assert one.evaluation == {name: size for name, size in one.rollout.items() if name != "records"}
    assert two.evaluation["cache"] == 2 * one.evaluation["cache"]
    assert two.phases["evaluation"] is two.evaluation


def test_an_evaluation_of_long_answers_takes_turns(tmp_path, monkeypatch):
    """Where all of its answers would take more cache than it may: as many as may, or as a rollout has."""
    run = made(tmp_path, **{"evaluation.samples": 3, "evaluation.prompts": 64, "rollout.slots": 0})
    s, rows = run.settings, 64 * 4
    whole = run.memory().evaluation["cache"]
    assert run.evaluator.slots == rows
    monkeypatch.setattr(memory, "_EVALUATED", whole // 2)
    assert s.rows < memory.evaluated_at_once(s, run.sampler, 64, 3) < rows
    assert run.memory().evaluation["cache"] == pytest.approx(whole / 2, rel=0.02)
    monkeypatch.setattr(memory, "_EVALUATED", 1)
    assert memory.evaluated_at_once(s, run.sampler, 64, 3) == s.rows
    assert memory.evaluated_at_once(s, run.sampler, 1, 3) == 4


def test_supervised_training_that_is_yet_to_be_done_is_counted(tmp_path):
    """It trains every parameter, whatever the run trains; once it is in the cache it takes nothing."""
    config = {"lora.rank": 2, "warm_start.steps": 1}
    run = made(tmp_path, **config)
    before = run.memory()
    assert before.start["moments"] == 2 * before.start["gradients"] == 2 * before.stays["frozen base"]
    assert before.temporaries is before.start
    assert "warm start" in " ".join(before.lines())
    s = run.settings
    cached_in(run.model, s.task, s.warm_start, **run._warm_start_of).mkdir(parents=True)
    after = made(tmp_path, **config).memory()
    assert after.start == {}
    assert after.total < before.total
    whole = made(tmp_path, **{"warm_start.steps": 2, "lora.rank": 0}).memory()
    assert whole.start["moments"] == 0


def test_the_process_is_counted_where_a_cpu_holds_everything(tmp_path):
    memory = made(tmp_path).memory()
    assert memory.process > 2**28
    assert memory.total == memory.process + memory.arrays
    assert memory.lines()[0].startswith(memory.lines()[0].split(":")[0] + ": process ")


def test_a_resumed_run_holds_one_state(tmp_path, monkeypatch):
    """Neither the start nor the arrays that were read stay beside it, and its updates overwrite it where it lies."""
    config = tiny_run.make_config(tmp_path, **{"warm_start.steps": 0, "steps": 1})
    tiny_run.train(tmp_path / "run", config)
    config.steps, seen = 2, []
    taken = trainer.take_step

    def step(run, state, stream, number):
        live = sum(x.nbytes for x in jax.live_arrays() if id(x) not in others)
        places = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(state)}
        seen.append(live / held(state.saved()))
        state, pending = taken(run, state, stream, number)
        seen.append(places == {x.unsafe_buffer_pointer() for x in jax.tree.leaves(state)})
        return state, pending

    monkeypatch.setattr(trainer, "take_step", step)
    gc.collect()
    kept = jax.live_arrays()  # those of other tests, which stay
    others = set(map(id, kept))
    tiny_run.train(tmp_path / "run", config)
    share, in_place = seen
    assert share < 1.3
    assert in_place


@pytest.mark.parametrize(
    ("stays", "rollout", "update", "remedy"),
    [
        (120, {"cache": 1}, {"gradients": 1}, "mesh.shape, or set model.param_dtype=bfloat16"),
        (10, {"cache": 95, "logits": 1}, {"gradients": 1}, "lower rollout.slots"),
        (10, {"cache": 1}, {"activations": 95, "gradients": 1}, "or set model.remat=block"),
    ],
)
def test_what_cannot_fit_is_refused_with_a_remedy(stays, rollout, update, remedy):
    memory = Memory(
        {"parameters": stays * 10**6}, *({k: n * 10**6 for k, n in x.items()} for x in (rollout, update)), 10**8
    )
    with pytest.raises(ValueError, match="MB on each device, which has 100 MB") as refused:
        memory.check()
    assert remedy in str(refused.value)
    Memory(memory.stays, memory.rollout, memory.update, available=2 * 10**8).check()
    Memory(memory.stays, memory.rollout, memory.update, available=None).check()
