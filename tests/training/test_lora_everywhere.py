"""LoRA with objectives, replay, layouts, critics and meshes: a step of the adapters is the chain rule of a whole step.

Every value of every factor is in some quick cell, but for GSPO, which adapters reach as they reach GRPO; every two
values of every two factors meet in some long one.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict

from jaxrl_llm import objectives
from jaxrl_llm.ground import metrics as M
from jaxrl_llm.ground.machine import forget_programs
from jaxrl_llm.models.lora import LoRAConfig, adapter_axes, init_adapters, merge
from jaxrl_llm.models.routing import Routing
from jaxrl_llm.training.experience import Scorer
from jaxrl_llm.training.policy import with_value_head
from jaxrl_llm.training.replay import ReplayConfig
from jaxrl_llm.training.state import make_state
from jaxrl_llm.training.step import Learner
from tests.reference import tiny_training as tiny
from tests.reference.covering import pairwise

LORA = LoRAConfig(rank=2, alpha=3.0, targets="attention,mlp,router")
OBJECTIVES = {  # name, hyper-parameters, critic
    "grpo": ("grpo", {"kl_coef": 0.1}, "none"),
    "gspo": ("gspo", {}, "none"),
    "rspo": ("rspo", {}, "none"),
    "a head": ("ppo", {}, "head"),
    "a separate critic": ("ppo", {}, "separate"),
}
REPLAYS = [("off", "experts"), ("R2", "experts"), ("R3", "experts"), ("R3", "logits")]
LAYOUTS = ["padded", "packed"]
MESHES = [None, (2, 2, 1, 1), (1, 1, 2, 2)]
FACTORS = (tuple(OBJECTIVES), REPLAYS, LAYOUTS, MESHES)
QUICK = [
    ("grpo", ("R2", "experts"), "packed", None),
    ("rspo", ("R3", "experts"), "padded", (1, 1, 2, 2)),
    ("a head", ("R3", "logits"), "packed", None),
    ("a separate critic", ("off", "experts"), "padded", (2, 2, 1, 1)),
]
NAMES = ("objective", "replay", "layout", "mesh")


@pytest.fixture(autouse=True)
def _room_for_cells():
    forget_programs()


def test_the_quick_cells_hold_every_value():
    for factor, values in enumerate(FACTORS):
        assert {cell[factor] for cell in QUICK} == set(values) - {"gspo"}


@functools.cache
def learner(objective, layout, mesh=None):
    """SGD at rate 1: the change of the parameters is minus the gradient."""
    name, options, _ = OBJECTIVES[objective]
    return Learner(
        tiny.make_model(mesh),
        objectives.make(name, **options),
        optax.sgd(1.0),
        rows=layout,
    )


def drawn(tree, seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape) * 0.3, jnp.float32), tree)


@functools.cache
def adapters(seed):
    """A and B drawn: a change of the base that shows."""
    return drawn(jax.eval_shape(lambda key: init_adapters(LORA, tiny.make_model(), key), jax.random.key(0)), seed)


def with_critic(objective, policy, critic):
    """(trained parameters of the policy, of a separate critic), a value head where there is one."""
    kind = OBJECTIVES[objective][2]
    valued = [dict(x) | {"value_head": drawn(with_value_head({}, 16)["value_head"], 7)} for x in (policy, critic)]
    return valued[0] if kind == "head" else policy, valued[1] if kind == "separate" else None


@functools.cache
def rollout(replay):
    """With a record of experts (and logits) that the policy would not have chosen."""
    rng, config = np.random.default_rng(5), tiny.CONFIG
    shape = (config.num_moe_layers, tiny.ROWS, tiny.TIME)
    logits = rng.normal(size=(*shape, config.num_experts)).astype(np.float32)
    experts = np.argsort(-logits, axis=-1)[..., : config.num_experts_per_tok].astype(np.uint8)
    record = Routing(jnp.asarray(experts), jnp.asarray(logits) if replay == ("R3", "logits") else None)
    return tiny.draw_trajectory(record)


def chain_rule(weights, base_shapes):
    """Gradients of A and B from those of the whole matrices: dA = s dW B^T, dB = s A^T dW."""
    found = {}
    for path, pair in flatten_dict(base_shapes, is_leaf=lambda _, x: set(x) == {"a", "b"}).items():
        dw = weights[path]
        found[(*path, "a")] = LORA.scale * dw @ np.swapaxes(pair["b"], -1, -2)
        found[(*path, "b")] = LORA.scale * np.swapaxes(pair["a"], -1, -2) @ dw
    return found | {path: x for path, x in weights.items() if path[0] == "value_head"}


def change(before, after):
    return flatten_dict(jax.tree.map(np.subtract, *jax.device_get((before, after))))


def check(objective, replay, layout, mesh):
    one, whole = learner(objective, layout, mesh), learner(objective, layout)
    base, cut = tiny.draw_params(one.model), tiny.layout_of(layout=layout, micro=4 if layout == "padded" else 0)
    policy, critic = with_critic(objective, adapters(1), adapters(2))

    def state():  # it is donated
        trained = jax.tree.map(jnp.copy, (policy, critic))
        axes = adapter_axes(LORA, one.model)
        return make_state(one.model, trained[0], one.optimizer, trained[1], axes=axes, base=base, scale=LORA.scale)

    scorer = Scorer(one, ReplayConfig(*replay), tiny.GROUP)
    scored, _ = tiny.learned(scorer, state(), state().policy, rollout(replay), [cut])
    if scored.ref_logprobs is not None and replay[0] != "R3":  # the reference never replays
        np.testing.assert_array_equal(scored.ref_logprobs, scored.old_logprobs)
    _, metrics = one.update(state(), scored, cut)
    assert M.finalize(metrics)["check/current_old_mean"] < 1e-6
    # pi has moved away: clips and gates are at work.
    shift = 0.3 * np.random.default_rng(3).normal(size=(tiny.ROWS, tiny.TIME))
    batch = scored.replace(old_logprobs=scored.old_logprobs + jnp.asarray(shift, jnp.float32))
    before = state()
    kept = jax.device_get((before.trained.policy, before.trained.critic))
    after, metrics = one.update(before, batch, cut)
    assert not any(x.is_deleted() for x in jax.tree.leaves(base))  # never donated

    plain = tiny.draw_params(whole.model)
    policy, critic = with_critic(
        objective, merge(plain, adapters(1), LORA.scale), merge(plain, adapters(2), LORA.scale)
    )
    copies = jax.tree.map(jnp.copy, (policy, critic))
    start = make_state(whole.model, copies[0], whole.optimizer, copies[1])
    end, expected = whole.update(start, jax.device_put(batch, jax.devices()[0]), cut)
    np.testing.assert_allclose(
        M.finalize(metrics)["loss/total"], M.finalize(expected)["loss/total"], rtol=1e-3, atol=1e-5
    )
    pairs = [(kept[0], after.trained.policy, policy, end.trained.policy, adapters(1))]
    pairs += [(kept[1], after.trained.critic, critic, end.trained.critic, adapters(2))] if critic is not None else []
    for ours, ours_after, theirs, theirs_after, at in pairs:
        gradient, wanted = change(ours, ours_after), chain_rule(change(theirs, theirs_after), jax.device_get(at))
        assert gradient.keys() == wanted.keys()
        for path, expected in wanted.items():
            scale = np.abs(expected).max()
            assert scale > 1e-6 or "router" in path, path
            np.testing.assert_allclose(gradient[path], expected, rtol=0, atol=1e-3 * scale + 1e-6, err_msg=str(path))


@pytest.mark.slow
@pytest.mark.parametrize(NAMES, QUICK, ids=str)
def test_every_value(objective, replay, layout, mesh):
    check(objective, replay, layout, mesh)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(NAMES, pairwise(itertools.product(*FACTORS)), ids=str)
def test_every_pair(objective, replay, layout, mesh):
    check(objective, replay, layout, mesh)
