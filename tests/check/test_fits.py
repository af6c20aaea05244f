"""The memory of a run by its own programs: what stays, what is compiled once, what is refused."""

import gc
import math

import jax
import pytest

from jaxrl_llm.check.fits import _NAMES, Fits, available_bytes, fits, stays_of
from jaxrl_llm.ground import sharding
from jaxrl_llm.plan.programs import abstract_state, programs
from jaxrl_llm.rollout import pass_rate
from jaxrl_llm.run import trainer
from jaxrl_llm.run.assembly import build
from jaxrl_llm.run.settings import validate
from tests.reference import tiny_reward_model, tiny_run
from tests.reference.compilations import compilations

COUNTED = ("(_generate)", "(_score)", "(_update)", "(_prepare)")


def made(tmp_path, name="grpo", **changes):
    return build(validate(tiny_run.make_config(tmp_path, name, **{"warm_start.steps": 0} | changes)))


def held(tree):
    """Bytes on the first device."""
    shards = [x.addressable_shards[0].data for x in jax.tree.leaves(tree)]
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in shards)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        pytest.param("grpo", {"mesh.shape": (1, 2, 1, 2)}, marks=pytest.mark.slow, id="fsdp_tensor"),
        pytest.param("grpo", {"mesh.shape": (1, 2, 2, 1), "objective.kl_coef": 0.1}, id="experts_reference"),
        pytest.param("ppo", {"critic.kind": "separate"}, marks=pytest.mark.slow, id="critic"),
        pytest.param("ppo", {"critic.kind": "head", "model.param_dtype": "bfloat16"}, id="value_head"),
    ],
)
def test_what_stays_is_exact(tmp_path, name, changes):
    run = made(tmp_path, name, **changes)
    stays, state = stays_of(run, []), run.blank()
    saved = state.saved()
    assert stays["parameters"] == held(state.trained.policy)
    assert stays["optimizer"] == held(saved.opt_state)
    assert stays.get("critic", 0) == held((saved.critic, saved.critic_opt_state))
    assert stays.get("reference", 0) == (held(state.trained.policy) if "objective.kl_coef" in changes else 0)
    assert stays["policy before"] == held(state.trained.policy)
    assert stays["checkpoint"] == pytest.approx(2.3 * held(saved), rel=1e-3)
    assert jax.tree.map(lambda x: x.sharding, abstract_state(run)) == jax.tree.map(lambda x: x.sharding, state)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("grpo", {"replay.mode": "R3", "updates.minibatches": 2, "objective.kl_coef": 0.1}),
        pytest.param("grpo", {"lora.rank": 2}, marks=pytest.mark.slow, id="adapters"),
        pytest.param("grpo", {"rollout.lag": 1}, marks=pytest.mark.slow, id="lag"),
        pytest.param("ppo", {"critic.kind": "separate"}, marks=pytest.mark.slow, id="critic"),
        pytest.param("sft", {"rollout.group_size": 1}, marks=pytest.mark.slow, id="given"),
        pytest.param("grpo", {"mesh.shape": (1, 2, 2, 1)}, marks=pytest.mark.slow, id="mesh"),
    ],
)
def test_what_was_compiled_to_ask_is_what_trains(tmp_path, name, changes):
    """After the start no rollout, score, update or evaluation is compiled; each program needs memory of its own."""
    config = tiny_run.make_config(
        tmp_path, name, steps=2, **{"warm_start.steps": 0, "log.diagnostics_every": 0} | changes
    )
    said = fits(build(validate(config)))
    assert set(said.programs) - {"checkpoint"} == {"update", "evaluation"} | (
        set() if name == "sft" else {"rollout", "score"}
    )
    assert min(said.programs.values()) > 0
    with compilations() as compiled:
        tiny_run.train(tmp_path / "run", config)
    assert [one for one in compiled if one.endswith(COUNTED)] == []


def test_a_run_on_servers_updates_here(tmp_path):
    """It samples nothing, so scores, updates and evaluations are what it needs memory for."""
    served = {"rollout.engine": "vllm", "rollout.servers": ("http://none:1",), "replay.mode": "R3"}
    run = made(tmp_path, **served, **{"rollout.group_size": 4})
    assert [program.name for program in programs(run, _NAMES)] == ["score", "update", "evaluation"]


def test_a_checkpoint_after_the_last_step_lies_beside_no_update(tmp_path):
    once, often = (fits(made(tmp_path, **{"steps": 4, "checkpoint.every": every})) for every in (4, 3))
    assert once.programs["checkpoint"] == often.stays["checkpoint"]
    assert once.arrays == sum(once.stays.values()) + max(once.programs.values())
    assert often.arrays == sum(often.stays.values()) + max(often.programs.values())


@pytest.mark.slow
def test_a_reward_model_is_a_program_too(tmp_path):
    tiny_reward_model.write(tmp_path / "rm", tiny_run.make_config(tmp_path))
    changes = {"rewards.reward_model": str(tmp_path / "rm"), "warm_start.steps": 0, "steps": 1}
    config = tiny_run.make_config(tmp_path, **changes)
    run = build(validate(config))
    said = fits(run)
    assert said.stays["reward model"] == sharding.local_bytes(run.reward_model().shapes)
    assert said.programs["reward model"] > 0
    with compilations() as compiled:
        tiny_run.train(tmp_path / "run", config)
    assert [one for one in compiled if one.endswith(COUNTED)] == []


def test_a_run_says_what_stays_and_its_programs():
    told = Fits({"parameters": 10**6}, {"rollout": 3 * 10**6, "update": 5 * 10**5}, 10**7, process=10**6).lines()
    assert " ".join(told) == "5 MB of 10 MB a device: process 1 MB, parameters 1 MB, rollout 3 MB, update 500 kB"


def test_more_devices_hold_less_and_share_what_this_machine_has(tmp_path):
    one, four = (made(tmp_path, **{"mesh.shape": shape}) for shape in ((1, 1, 1, 1), (1, 4, 1, 1)))
    whole, part = (sum(stays_of(run, programs(run, ())).values()) for run in (one, four))
    assert part < 0.5 * whole
    here, shared = (available_bytes(run.model.mesh) for run in (one, four))
    assert shared == pytest.approx(here / 4, rel=0.1)  # of what is free now


def test_an_evaluation_of_long_answers_takes_turns(tmp_path, monkeypatch):
    """Where all of its answers would take more cache than they may: as many as may, or as a rollout has."""
    run = made(tmp_path, **{"evaluation.samples": 3, "evaluation.prompts": 64, "rollout.slots": 0})
    s, rows = run.settings, 64 * 4
    asked = run.sampler, 64, 3, s.task.prompt_length, s.answer_length
    assert run.evaluator.slots == rows
    cache = run.sampler.empty_cache(rows, s.task.prompt_length + s.answer_length)
    monkeypatch.setattr(pass_rate, "_CACHE", sum(x.nbytes for x in jax.tree.leaves(cache)) // 4)
    assert 8 < pass_rate.evaluated_at_once(*asked, 0, 8) < s.rows
    assert pass_rate.evaluated_at_once(*asked, 0, s.rows) == s.rows
    monkeypatch.setattr(pass_rate, "_CACHE", 1)
    assert pass_rate.evaluated_at_once(*asked, 0, s.rows) == s.rows
    assert pass_rate.evaluated_at_once(*asked, 5, s.rows) == 5
    assert pass_rate.evaluated_at_once(run.sampler, 1, *asked[2:], 0, s.rows) == 4


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
    ("stays", "needed", "remedy"),
    [
        ({"parameters": 120}, {}, "mesh.shape, or train adapters alone with lora.rank=16"),
        ({"frozen base": 120, "adapters": 1}, {}, "or set model.param_dtype=bfloat16: it is not trained"),
        ({"parameters": 10}, {"rollout": 95, "update": 1}, "lower rollout.slots or rollout.max_new_tokens"),
        ({"parameters": 10}, {"rollout": 1, "update": 95}, "or set model.remat=block"),
        ({"parameters": 10}, {"evaluation": 95}, "or evaluation.prompts"),
    ],
)
def test_what_cannot_fit_is_refused_with_a_remedy(stays, needed, remedy):
    sizes = [{name: n * 10**6 for name, n in one.items()} for one in (stays, needed)]
    with pytest.raises(ValueError, match="MB on each device, which has 100 MB") as refused:
        Fits(*sizes, available=10**8).check()
    assert remedy in str(refused.value)
    Fits(*sizes, available=2 * 10**8).check()
    Fits(*sizes, available=None).check()


def test_what_stays_is_refused_before_anything_is_compiled(tmp_path, monkeypatch):
    run = made(tmp_path)
    monkeypatch.setattr("jaxrl_llm.check.fits.available_bytes", lambda mesh: 10**5)
    with compilations() as compiled, pytest.raises(ValueError, match="which has 100 kB"):
        fits(run)
    assert compiled == []
