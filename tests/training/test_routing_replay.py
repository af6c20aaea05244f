"""Routing replay: exact where it must be, in force where it must be, and loud where it has nothing to replay.

One learner and one shape serve all tests; the learner takes packed rows too, so padding and packing share programs.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm import objectives
from jaxrl_llm.ground import metrics as M
from jaxrl_llm.models.routing import Routing, is_recorded, no_record, routing_dtype
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.sampling import Sampling
from jaxrl_llm.training.experience import Scorer
from jaxrl_llm.training.gaps import differ, flips
from jaxrl_llm.training.indexing import take
from jaxrl_llm.training.layout import lay_out
from jaxrl_llm.training.pending import check_updates
from jaxrl_llm.training.policy import Policy
from jaxrl_llm.training.replay import ReplayConfig
from jaxrl_llm.training.state import make_state
from jaxrl_llm.training.step import Learner
from tests.reference import tiny_training as tiny
from tests.reference.step_by_hand import forward

MODEL = tiny.make_model()
LEARNER = Learner(MODEL, objectives.make("grpo", kl_coef=0.1), optax.sgd(1.0), rows="packed")
PADDED = tiny.in_one_shape(tiny.layout_of(), micro=1)
PACKED = tiny.in_one_shape(tiny.layout_of(layout="packed"), micro=1)


@functools.cache
def params(moved=False):
    """moved: what an update might leave, with other experts for many tokens."""
    before = tiny.draw_params(MODEL)
    if not moved:
        return before
    after = tiny.draw_params(MODEL, seed=1)
    return jax.tree.map(lambda a, b: 0.7 * a + 0.3 * b, before, after)


def state_of(params):
    return make_state(MODEL, jax.tree.map(jnp.copy, params), LEARNER.optimizer)


def experience(mode, what="experts", *, moved=False, routing=None, layout=PADDED):
    scorer = Scorer(LEARNER, ReplayConfig(mode, what), tiny.GROUP)
    return tiny.learned(scorer, state_of(params(moved)), Policy(params()), tiny.draw_trajectory(routing), [layout])


def update(batch, moved=False, layout=PADDED):
    """(gradient, metrics) of one update."""
    state = state_of(params(moved))
    before = jax.device_get(state.trained.policy)
    after, metrics = jax.device_get(LEARNER.update(state, batch, layout))
    return jax.tree.map(np.subtract, before, after.trained.policy), M.finalize(metrics)


@functools.cache
def recorded():
    """What a rollout by the unmoved parameters leaves: no record on padding and on the last token."""
    routing = experience("off")[0].routes.scored
    fed = np.arange(tiny.TIME) < tiny.LENGTHS[:, None] - 1
    return routing.replace(experts=jnp.where(fed[None, :, :, None], routing.experts, no_record(routing.experts)))


def assert_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def fresh_and_again(model, params, seed=0):
    """A forward that replays nothing and one that replays what it used, by one compiled program."""
    batch = tiny.draw_batch(seed)
    nothing = tiny.no_record(model)
    first = forward(model, params, batch.tokens, batch.segment_ids, nothing)
    again = forward(model, params, batch.tokens, batch.segment_ids, Routing(first.routing.experts))
    return first, again


def test_replay_of_what_was_just_recorded_is_the_same_forward():
    first, again = fresh_and_again(MODEL, params())
    assert_equal(first, again)
    segments = tiny.draw_batch().segment_ids
    np.testing.assert_array_equal(is_recorded(first.routing.experts), np.broadcast_to(segments != 0, (2, 8, 12)))


def test_a_replay_is_in_force_once_parameters_move():
    """The opposite of the test above: a replay that silently did nothing would pass that one."""
    batch = tiny.draw_batch()
    old = recorded().experts
    nothing = tiny.no_record(MODEL)
    fresh = forward(MODEL, params(True), batch.tokens, batch.segment_ids, nothing)
    replayed = forward(MODEL, params(True), batch.tokens, batch.segment_ids, Routing(old))
    known = is_recorded(old)
    np.testing.assert_array_equal(np.asarray(replayed.routing.experts)[known], np.asarray(old)[known])
    share, both = differ(recorded(), fresh.routing)
    assert 0.05 < float(share[both].mean()) < 0.6
    assert np.abs(np.asarray(fresh.hidden - replayed.hidden))[np.asarray(batch.segment_ids) > 0].max() > 0.1


def test_r2_changes_nothing_in_the_first_minibatch():
    """Contract: in float32, at one shape, the experts, loss, gradient and update equal those without replay."""
    off, r2 = experience("off"), experience("R2")
    assert off[0].routes.replayed is None
    assert_equal(off[0].routes.scored, r2[0].routes.scored)
    assert_equal(off[0].old_logprobs, r2[0].old_logprobs)
    (plain, numbers), (replayed, same) = update(off[0]), update(r2[0])
    assert_equal(plain, replayed)
    assert numbers == same
    assert numbers["check/current_old_mean"] == 0


def test_r2_is_in_force_from_the_second_update_on():
    batch, replayed = experience("off")[0], experience("R2")[0]
    (plain, numbers), (held, metrics) = update(batch, moved=True), update(replayed, moved=True)
    assert np.abs(plain["ends"]["head"] - held["ends"]["head"]).max() > 1e-3
    assert metrics["ratio/token_var"] != numbers["ratio/token_var"]
    # What the router would choose is counted, not what it was given.
    assert metrics["routing/flips_old_current"] > 0.05


def test_r3_replays_the_rollout_when_scoring_and_when_training():
    """The rollout's experts here are another policy's, so that both passes show them."""
    off = experience("off", moved=True)
    r3 = experience("R3", moved=True, routing=recorded())
    known = np.asarray(is_recorded(recorded().experts))
    for routing in (r3[0].routes.scored, r3[0].routes.replayed):
        np.testing.assert_array_equal(np.asarray(routing.experts)[known], np.asarray(recorded().experts)[known])
    assert np.abs(np.asarray(off[0].old_logprobs - r3[0].old_logprobs)).max() > 1e-2
    assert update(r3[0], moved=True)[1]["check/current_old_mean"] < 1e-6
    assert M.finalize(off[1] | experience("off", moved=True, routing=recorded())[1])["routing/flips_sampler_old"] > 0.05


@pytest.mark.parametrize("what", ["experts", "logits"])
def test_under_r3_flips_speak_of_what_the_old_router_would_choose(what):
    """Scoring replays another policy's experts; the choices that they hide are counted, per layer and by hand."""
    batch, rollout = tiny.draw_batch(), experience("R2", "logits", moved=True)[0].routes.scored
    r3 = experience("R3", what, routing=rollout)
    assert_equal(r3[0].routes.scored.experts, rollout.experts)  # what was used, in scoring as in the rollout
    routed = Routing(rollout.experts, rollout.logits if what == "logits" else None)
    logits = forward(MODEL, params(), batch.tokens, batch.segment_ids, routed).routing.logits
    order = np.argsort(-np.asarray(logits), axis=-1, kind="stable")[..., :2]
    same = (order[..., :, None] == np.asarray(rollout.experts)[..., None, :]).any(-1)
    share = (1 - same.mean(-1))[:, np.asarray(batch.segment_ids) > 0].mean(-1)
    found = M.finalize(r3[1])
    np.testing.assert_allclose(found["routing/flips_sampler_old_by_layer"], share, rtol=1e-5)
    np.testing.assert_allclose(found["routing/flips_sampler_old"], share.mean(), rtol=1e-5)
    assert share.min() > 0.05


def test_the_reference_never_replays():
    off, r3 = experience("off"), experience("R3", routing=experience("off", moved=True)[0].routes.scored)
    assert_equal(off[0].ref_logprobs, r3[0].ref_logprobs)
    assert np.abs(np.asarray(off[0].old_logprobs - r3[0].old_logprobs)).max() > 1e-2


def test_a_separate_critic_never_replays():
    """A mixture of experts too: its values, and its gradient beside a policy that replays, follow fresh routes."""
    learner = Learner(MODEL, objectives.make("ppo"), optax.sgd(1.0), rows="packed")
    critic = tiny.draw_params(MODEL, value_head=True, seed=5)
    copies = lambda: map(functools.partial(jax.tree.map, jnp.copy), (params(True), critic))  # noqa: E731

    def state():
        policy, valued = copies()
        return make_state(MODEL, policy, learner.optimizer, valued)

    off, r3 = (
        tiny.learned(
            Scorer(learner, ReplayConfig(mode, "experts"), tiny.GROUP),
            state(),
            None,
            tiny.draw_trajectory(recorded()),
            [PADDED],
        )[0]
        for mode in ("off", "R3")
    )
    assert_equal(off.old_values, r3.old_values)
    assert np.abs(np.asarray(off.old_logprobs - r3.old_logprobs)).max() > 1e-2
    nothing = tiny.no_record(MODEL)
    replayed, fresh = (
        learner.update(state(), r3.replace(routes=r3.routes.replace(replayed=r)), PADDED)[0]
        for r in (r3.routes.replayed, nothing)
    )
    assert_equal(replayed.trained.critic, fresh.trained.critic)
    learnt = replayed.trained.critic["value_head"]["kernel"] - critic["value_head"]["kernel"]
    apart = replayed.trained.policy["ends"]["head"] - fresh.trained.policy["ends"]["head"]
    assert min(np.abs(learnt).max(), np.abs(apart).max()) > 1e-3


def test_the_router_learns_under_experts_and_not_under_logits():
    router = lambda gradient: np.abs(gradient["moe"]["mlp"]["router"]).max()  # noqa: E731
    assert router(update(experience("off")[0], moved=True)[0]) > 1e-3
    assert router(update(experience("R2")[0], moved=True)[0]) > 1e-3
    frozen, _ = update(experience("R2", "logits", routing=recorded())[0], moved=True)  # the rollout has no logits
    assert router(frozen) == 0
    assert np.abs(frozen["moe"]["mlp"]["gate"]).max() > 1e-3


def test_under_logits_a_change_of_the_router_changes_nothing():
    """Indices and gates are frozen; under experts the gates follow the router."""
    moved = jax.tree.map(lambda x: x, params())
    moved["moe"]["mlp"]["router"] = params(True)["moe"]["mlp"]["router"]
    for what, gap in (("logits", 0.0), ("experts", 1e-2)):
        metrics = LEARNER.update(state_of(moved), experience("R2", what)[0], PADDED)[1]
        found = M.finalize(metrics)["check/current_old_mean"]
        assert found == 0 if gap == 0 else found > gap


def test_records_follow_their_tokens_into_packed_rows():
    """Recorded in padded rows, replayed in packed ones: a shifted row or replayed padding would change the gradient."""
    batch = experience("R2")[0]
    padded, packed = update(batch, moved=True), update(batch, moved=True, layout=PACKED)
    for a, b in zip(jax.tree.leaves(padded[0]), jax.tree.leaves(packed[0]), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * np.abs(a).max() + 1e-9)
    assert_equal(experience("off", layout=PACKED)[0].routes.scored, experience("off")[0].routes.scored)


def test_a_place_has_the_record_of_its_token():
    """Records numbered by their token; an update of padded rows would shift them as one of packed rows does."""
    numbers = np.arange(tiny.ROWS * tiny.TIME, dtype=np.uint8).reshape(1, tiny.ROWS, tiny.TIME, 1)
    cut = jax.jit(lambda layout: take(Routing(jnp.asarray(numbers)), layout, 0))(PACKED)
    index = np.asarray(PACKED.index[0])
    np.testing.assert_array_equal(np.asarray(cut.experts)[0, ..., 0][index >= 0], index[index >= 0])


def test_padding_has_no_record():
    """Padding that replayed expert 0 in every slot would pile up there, twice."""
    routing = Routing(jnp.ones((2, tiny.ROWS, tiny.TIME, 2), jnp.uint8), jnp.ones((2, tiny.ROWS, tiny.TIME, 4)))
    cut = jax.jit(lambda layout: take(routing, layout, 0))(PACKED)
    padding = np.asarray(PACKED.index[0]) < 0
    assert (np.asarray(cut.experts)[:, padding] == 255).all()
    assert (np.asarray(cut.experts)[:, ~padding] == 1).all()
    assert not np.asarray(cut.logits)[:, padding].any()


def test_rollout_and_trainer_record_the_same_experts():
    """R2 = R3 on one machine in float32, up to near-ties, which are counted; a record off by one token would not be.

    The last token of an answer was sampled and never fed, so only the trainer has a route for it.
    """
    engine = Engine(MODEL, Sampling(), tiny.GROUP, tiny.ANSWER, end_ids=(1,))
    prompts = np.random.default_rng(0).integers(2, 16, (2, tiny.PROMPT)).astype(np.int32)
    lengths = np.array([3, 4], np.int32)
    out = engine.generate(params(), prompts, lengths, np.arange(2, dtype=np.uint32), jax.random.key(0))
    out = out.replace(rewards=jnp.arange(8.0))
    scorer = Scorer(LEARNER, ReplayConfig("R2", "experts"), tiny.GROUP)
    width = np.asarray(out.segment_ids).sum(1)
    layout = lay_out(np.arange(tiny.ROWS), width, tiny.TIME, tiny.UPDATES)
    batch, _ = tiny.learned(scorer, state_of(params()), Policy(params()), out, [layout])
    last = np.arange(tiny.TIME) == width[:, None] - 1
    inside = np.asarray(out.segment_ids) > 0
    np.testing.assert_array_equal(is_recorded(out.routes.sampled.experts)[0], inside & ~last)
    np.testing.assert_array_equal(is_recorded(batch.routes.scored.experts)[0], inside)
    share, both = differ(out.routes.sampled, batch.routes.scored)
    near_ties = int((share[both] > 0).sum())
    assert near_ties <= 2, f"{near_ties} of {int(both.sum())} records differ"
    np.testing.assert_allclose(jnp.where(out.loss_mask, batch.old_logprobs, 0), out.sampler_logprobs, atol=1e-4)


def test_dense_layers_do_not_shift_the_record():
    """Layers dense, MoE, dense, MoE: row 0 of a record acts before row 1, seen in the fresh logits of the second."""
    model = tiny.make_model(num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=())
    assert model.config.kinds == ("dense", "moe", "dense", "moe")
    weights = tiny.draw_params(model)
    first, again = fresh_and_again(model, weights)
    assert_equal(first, again)
    batch = tiny.draw_batch()
    for row in (0, 1):
        experts = np.array(first.routing.experts)
        experts[row, 0, 3] = (experts[row, 0, 3] + 1) % 4
        out = forward(model, weights, batch.tokens, batch.segment_ids, Routing(jnp.asarray(experts)))
        np.testing.assert_array_equal(out.routing.experts, experts)
        assert (out.hidden[0, 3] != first.hidden[0, 3]).any()
        second_saw_it = (out.routing.logits[1, 0, 3] != first.routing.logits[1, 0, 3]).any()
        assert second_saw_it == (row == 0)
        np.testing.assert_array_equal(out.routing.logits[0], first.routing.logits[0])


@pytest.mark.slow
def test_rematerialisation_replays_too():
    """Gradients of a replayed forward are the same whether the backward pass recomputes blocks or not."""
    batch = tiny.draw_batch()
    cotangent = jnp.asarray(np.random.default_rng(2).normal(size=(tiny.ROWS, tiny.TIME, 16)), jnp.float32)
    variants = {remat: tiny.make_model(remat=remat) for remat in ("none", "block", "dots")}

    @jax.jit
    def gradients(params, routing):
        def loss(params, model):
            hidden = model.apply(params, batch.tokens, segment_ids=batch.segment_ids, routing=routing).hidden
            return jnp.sum(hidden * cotangent)

        return {remat: jax.grad(loss)(params, model) for remat, model in variants.items()}

    found = jax.device_get(gradients(params(True), recorded()))
    for remat in ("block", "dots"):
        for a, b in zip(jax.tree.leaves(found[remat]), jax.tree.leaves(found["none"]), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max() + 1e-9)
    fresh = jax.device_get(gradients(params(True), tiny.no_record(MODEL)))
    router = lambda g: g["moe"]["mlp"]["router"]  # noqa: E731
    assert np.abs(router(found["block"]) - router(fresh["block"])).max() > 1e-2


def test_more_than_256_experts():
    """Indices above 255 need two bytes, and 255 is an expert then, not "no record"."""
    model = tiny.make_model(num_hidden_layers=1, num_experts=300, moe_intermediate_size=2)
    assert routing_dtype(255) == jnp.uint8
    assert routing_dtype(256) == routing_dtype(300) == jnp.uint16
    first, again = fresh_and_again(model, tiny.draw_params(model))
    assert_equal(first, again)
    assert first.routing.experts.dtype == jnp.uint16
    real = np.asarray(first.routing.experts)[np.asarray(is_recorded(first.routing.experts))]
    assert real.max() > 255
    moved = tiny.draw_params(model, seed=1)
    batch = tiny.draw_batch()
    replayed = forward(model, moved, batch.tokens, batch.segment_ids, Routing(first.routing.experts))
    np.testing.assert_array_equal(replayed.routing.experts, first.routing.experts)


def test_flips_are_differences_of_sets():
    """By hand: [0 1] and [1 0] agree, [0 1] and [0 2] differ in a half, a missing record counts nowhere."""
    none = 255
    old = Routing(jnp.array([[[[0, 1], [0, 1], [2, 3], [0, 1]]]], jnp.uint8))
    new = Routing(jnp.array([[[[1, 0], [0, 2], [0, 1], [none, none]]]], jnp.uint8))
    found = M.finalize(flips("flips", old, new, jnp.array([[1, 1, 1, 1]])))
    assert found == {"flips": 0.5, "flips_by_layer": [0.5]}
    padded = M.finalize(flips("flips", old, new, jnp.array([[1, 1, 0, 0]])))
    assert padded["flips"] == 0.25


def test_a_record_that_is_missing_raises():
    with pytest.raises(ValueError, match=r"routing of the rollout and none was captured.*replay\.mode=off"):
        experience("R3")
    with pytest.raises(ValueError, match=r"replay\.what='logits' and only experts were recorded"):
        experience("R3", "logits", routing=recorded())


def test_a_lost_row_raises():
    """Of the rollout's record under R3: two layers of one token. Nothing is lost otherwise, nor under R2."""
    whole = M.finalize(experience("R3", routing=recorded())[1])
    assert whole["check/unrecorded"] == 0
    assert M.finalize(experience("R2")[1])["check/unrecorded"] == 0
    lost = recorded().replace(experts=recorded().experts.at[:, 3, 2].set(255))
    scored = M.finalize(experience("R3", routing=lost)[1])
    with pytest.raises(ValueError, match=r"step 9: 2 .*no recorded routing"):
        check_updates(9, scored, [], dtype="float32", sampler_dtype="bfloat16", truncated=False, flipped=0.0)


def test_a_dense_model_and_a_record_of_another_model_raise():
    dense = tiny.make_model(num_experts=0)
    batch = tiny.draw_batch()
    shapes = jax.eval_shape(dense.init, jax.random.key(0))
    with pytest.raises(ValueError, match="routing was given to a dense model"):
        jax.eval_shape(lambda p: dense.apply(p, batch.tokens, routing=recorded()), shapes)
    with pytest.raises(ValueError, match="record it with the same model and the same tokens"):
        forward(MODEL, params(), batch.tokens, batch.segment_ids, recorded()[:1])


@pytest.mark.parametrize(("field", "value"), [("mode", "R4"), ("what", "probs")])
def test_unknown_kinds_of_replay_are_named(field, value):
    with pytest.raises(ValueError, match=f"replay.{field}='{value}' is unknown.*; use one of"):
        ReplayConfig(**({"mode": "R2", "what": "experts"} | {field: value}))
