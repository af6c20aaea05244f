"""The state of training: where it lives, parameters that are not trained, and arrays that would broadcast."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

from jaxrl_llm import objectives
from jaxrl_llm.models import scoring
from jaxrl_llm.models.routing import Routing
from jaxrl_llm.rollout.rollout import Routes
from jaxrl_llm.training.optimizer import make_optimizer
from jaxrl_llm.training.policy import Policy, with_value_head
from jaxrl_llm.training.state import make_state, parameter_axes, state_shardings
from jaxrl_llm.training.step import Learner, check_shapes
from tests.reference import tiny_training as tiny

MODEL = tiny.make_model()
LEARNER = Learner(MODEL, objectives.make("grpo", kl_coef=0.1), optax.sgd(1.0), rows="packed")
BATCH = tiny.draw_batch(old_values=None, returns=None)
LAYOUT = tiny.in_one_shape(tiny.layout_of(), micro=1)


@functools.cache
def spread():
    """A learner on a mesh, with an optimizer whose state holds schedules, moments and a mask; and its parameters."""
    model = tiny.make_model((2, 2, 1, 1))
    config = tiny.OPTIMIZER.__class__(**(vars(tiny.OPTIMIZER) | {"router_factor": 0.5, "schedule": "cosine"}))
    return Learner(model, LEARNER.objective, make_optimizer(config, 100)), tiny.draw_params(model)


def abstract(tree, where):
    return jax.tree.map(lambda x, to: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to), tree, where)


def test_where_a_state_lives_follows_from_names():
    """From abstract shapes as from arrays; the moments of a matrix are spread as the matrix is."""
    learner, params = spread()
    made = make_state(learner.model, params, learner.optimizer, params)
    shapes = jax.eval_shape(lambda p: make_state(learner.model, p, learner.optimizer, p), params)
    chex.assert_trees_all_equal_shapes_and_dtypes(shapes, made)
    where = state_shardings(learner.model, shapes)
    assert all(jax.tree.leaves(jax.tree.map(lambda x, to: x.sharding.is_equivalent_to(to, x.ndim), made, where)))
    moment = made.saved().opt_state[1][0].mu["moe"]["attention"]["q"]
    assert moment.sharding.spec == made.trained.policy["moe"]["attention"]["q"].sharding.spec
    assert not moment.sharding.is_fully_replicated


def test_masters_live_where_their_parameters_do():
    """Those of a policy in bfloat16 and of its critic, whose head in float32 has none; a checkpoint keeps them."""
    learner, params = spread()
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    optimizer = make_optimizer(tiny.OPTIMIZER, 100, 0.5)
    state = make_state(learner.model, narrow, optimizer, with_value_head(narrow, 16))
    saved = state.saved()
    for moments, trained in ((saved.opt_state, state.trained.policy), (saved.critic_opt_state, state.trained.critic)):
        master = moments.masters["moe"]["attention"]["q"]
        assert master.dtype == jnp.float32
        assert master.sharding.spec == trained["moe"]["attention"]["q"].sharding.spec
    assert jax.tree.leaves(saved.critic_opt_state.masters["value_head"]) == []
    chex.assert_trees_all_equal(state.restored(saved), state)


@pytest.mark.slow
def test_an_update_is_lowered_from_shapes_alone():
    """No parameter and no moment is made: what a plan for a machine that is not there needs."""
    learner, params = spread()
    model, optimizer = learner.model, learner.optimizer
    shapes = jax.eval_shape(lambda p: make_state(model, p, optimizer), model.shapes())
    state = abstract(shapes, state_shardings(model, shapes))
    lowered = jax.jit(lambda state: learner.update(state, BATCH, tiny.layout_of())).lower(state)
    chex.assert_trees_all_equal_shapes(lowered.out_info[0].trained.policy, params)


def test_axes_of_a_part_are_those_of_the_whole():
    router = {"moe": {"mlp": {"router": tiny.draw_params(MODEL)["moe"]["mlp"]["router"]}}}
    assert parameter_axes(MODEL, router) == {"moe": {"mlp": {"router": ("layers", "embed", "router")}}}


@pytest.mark.parametrize("critic", [False, True], ids=["policy", "critic"])
def test_a_checkpoint_has_the_names_that_it_always_had(critic):
    """One optimizer in memory, one or two in the file; what is read back is the state, each array in its place."""
    params = tiny.draw_params(MODEL)
    optimizer = make_optimizer(tiny.OPTIMIZER, 100, 0.5 if critic else None)
    state = make_state(MODEL, params, optimizer, jax.tree.map(lambda x: x + 1, params) if critic else None)
    numbers = iter(range(10_000))
    state = jax.tree.map(lambda x: jnp.full(x.shape, next(numbers), x.dtype), state)
    saved = state.saved()
    names = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(saved)}
    assert {".params['moe']['mlp']['router']", ".opt_state[1][0].mu['moe']['mlp']['router']", ".updates"} <= names
    assert (".critic_opt_state[1][0].nu['ends']['head']" in names) is critic
    blank = make_state(MODEL, params, optimizer, params if critic else None)
    chex.assert_trees_all_equal(blank.restored(saved), state)


def test_adapters_live_where_their_axes_say():
    learner, _ = spread()
    adapters = {"router": {"by": jnp.zeros((2, 16, 4))}}
    state = make_state(learner.model, adapters, learner.optimizer, axes={"router": {"by": ("layers", "embed", None)}})
    moment = state.saved().opt_state[1][0].mu["router"]["by"]
    for spread_out in (moment, state.trained.policy["router"]["by"]):
        assert spread_out.sharding.shard_shape((2, 16, 4)) == (2, 8, 4)


def test_tokens_that_say_nothing_of_their_age_are_new():
    own = dataclasses.replace(LEARNER, objective=objectives.make("a3po"))
    out = scoring.Scores(BATCH.old_logprobs, BATCH.old_logprobs, jnp.zeros((*BATCH.tokens.shape, 1)), None)
    assert not own._arrays({}, None, out, BATCH, (BATCH.tokens, 1))["age"].any()
    aged = BATCH.replace(age=BATCH.advantages)
    assert own._arrays({}, None, out, aged, (BATCH.tokens, 1))["age"] is aged.age
    assert "age" not in LEARNER._arrays({}, None, out, aged, (BATCH.tokens, 1))


def put_past_the_constructor(batch, **fields):
    """As without run-time types, which are on in the tests alone and catch most of this earlier."""
    batch = batch.replace()
    for name, value in fields.items():
        object.__setattr__(batch, name, value)
    return batch


def test_what_would_broadcast_is_refused():
    check_shapes(BATCH)
    column = BATCH.advantages[:, :1]
    record = Routes(scored=Routing(jnp.zeros((2, 1, tiny.TIME, 2), jnp.uint8)))
    kept = jnp.zeros((1, tiny.TIME, 3), jnp.int32)
    for wrong in ({"advantages": column}, {"routes": record}, {"kept": kept}):
        with pytest.raises(AssertionError):
            check_shapes(put_past_the_constructor(BATCH, **wrong))
    state = make_state(MODEL, tiny.draw_params(MODEL), LEARNER.optimizer)
    with pytest.raises(AssertionError, match="shape"):
        Learner._update.__wrapped__(LEARNER, state, None, put_past_the_constructor(BATCH, advantages=column), LAYOUT)


@functools.cache
def traced_once(name):
    """A method of the learner that may be traced a single time."""
    return jax.jit(chex.assert_max_traces(getattr(Learner, name).__wrapped__, n=1), static_argnums=0)


def cut(rows, micro):
    """Other rows, other micro-batches and another number of them in use, inside one shape."""
    return tiny.in_one_shape(tiny.layout_of(rows, micro=micro))


def test_an_update_is_traced_once_a_shape():
    state = make_state(MODEL, tiny.draw_params(MODEL), LEARNER.optimizer)
    update = traced_once("_update")
    for layout in (cut(None, 0), cut([3, 1, 2], 2), cut([7], 1)):
        update.trace(LEARNER, state, None, BATCH, layout)
    with pytest.raises(AssertionError, match="is traced > 1 times"):
        update.trace(LEARNER, state, None, BATCH, LAYOUT)


def test_scoring_is_traced_once_a_shape():
    policy, tokens = Policy(tiny.draw_params(MODEL)), BATCH.tokens
    score, into = traced_once("_score"), LEARNER._blank(tokens, frozenset({"logprobs", "routing"}))
    for seed, layout in enumerate((cut(None, 0), cut([3, 1, 2], 2), cut([7], 1))):
        score.trace(LEARNER, policy, (tiny.draw_batch(seed).tokens, None, None, None), layout, into)
    with pytest.raises(AssertionError, match="is traced > 1 times"):
        score.trace(LEARNER, policy, (tokens, None, None, None), tiny.layout_of(), into)
