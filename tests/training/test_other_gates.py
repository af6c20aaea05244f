"""Gates of other families in training: records, flips, balance loss and a frozen bias, against numpy's choice."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm import objectives
from jaxrl_llm.ground import metrics as M
from jaxrl_llm.models.routing import Router
from jaxrl_llm.models.transformer import Model
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.sampling import Sampling
from jaxrl_llm.training.experience import Scorer
from jaxrl_llm.training.layout import lay_out
from jaxrl_llm.training.policy import Policy
from jaxrl_llm.training.replay import ReplayConfig
from jaxrl_llm.training.state import make_state
from jaxrl_llm.training.step import Learner
from tests.reference import tiny_training as tiny
from tests.reference.step_by_hand import forward, load_balance, log_softmax

K, AUX = tiny.CONFIG.num_experts_per_tok, 0.1
BIASED = dict(scoring_func="sigmoid", selection_bias=True)
GATES = {
    "bias": BIASED,
    "groups": dict(**BIASED, n_group=2, topk_group=1, routed_scaling_factor=2.5, norm_topk_prob=False),
    "shared": dict(selection_bias=True, shared_expert_intermediate_size=8, shared_expert_gate=True),
}
NOISE = Router(noise=2.0, gates="exact")


def chosen_by_hand(model, params, logits):
    """Experts [l b t k], the largest of score plus bias; of two groups of two, all in the one with the larger sum."""
    bias = np.asarray(params["moe"]["mlp"]["router_bias"], np.float64)[:, None, None, :]
    logits = np.asarray(logits, np.float64)
    sigmoid = model.config.scoring_func == "sigmoid"
    ranks = (1 / (1 + np.exp(-logits)) if sigmoid else np.exp(log_softmax(logits))) + bias
    if model.config.n_group > 1:
        first = ranks[..., :2].sum(-1, keepdims=True) > ranks[..., 2:].sum(-1, keepdims=True)
        ranks = np.where(np.array([True, True, False, False]) == first, ranks, -np.inf)
    return np.argsort(-ranks, axis=-1)[..., :K]


def share_outside(used, chosen, where):
    """Share of the experts used that are not chosen, over layers and the tokens [b t] where it is asked."""
    missing = ~(np.asarray(used)[..., :, None] == np.asarray(chosen)[..., None, :]).any(-1)
    return missing[:, where].mean()


def choice(model, params, tokens, segment_ids, replay):
    return chosen_by_hand(model, params, forward(model, params, tokens, segment_ids, replay).routing.logits)


def test_the_gate_of_lfm2_moe():
    """Sigmoid, the k largest of score and `expert_bias`, weights s / (sum of the chosen + 1e-6) times a factor, as
    transformers' Lfm2MoeTopKRouter computes them. Ours has no 1e-6, which moves a weight by 1e-6 over that sum."""
    sizes = dict(num_experts=32, num_experts_per_tok=4, routed_scaling_factor=1.5)
    gate = dataclasses.replace(tiny.CONFIG, **BIASED, **sizes).gate
    rng = np.random.default_rng(3)
    logits, bias = rng.normal(-1, 2, (200, 32)).astype(np.float32), rng.normal(0, 0.3, 32).astype(np.float32)
    scores = 1 / (1 + np.exp(-logits.astype(np.float64)))
    chosen = np.argsort(-(scores + bias), axis=-1)[:, :4]
    kept = np.take_along_axis(scores, chosen, axis=-1)
    total = kept.sum(-1, keepdims=True) + 1e-6
    routing, weights = jax.jit(gate.choose)(logits, {"router_bias": bias})
    np.testing.assert_array_equal(routing.experts, chosen)
    assert np.all(abs(weights - 1.5 * kept / total) < 1.5 * (1e-6 / total + 1e-6))


@pytest.mark.parametrize(
    ("gate", "mode"),
    [
        ("bias", "R2"),
        pytest.param("groups", "R3", marks=pytest.mark.slow),
        pytest.param("bias", "R3", marks=pytest.mark.slow),
        pytest.param("groups", "R2", marks=pytest.mark.slow),
        pytest.param("shared", "R2", marks=pytest.mark.slow),
        pytest.param("shared", "R3", marks=pytest.mark.slow),
    ],
)
def test_two_steps_with_replay(gate, mode):
    """The sampler's noise moves its choice alone. Every number is compared with numpy's choice, which the records hold
    and which is neither the largest logits nor what was replayed."""
    model = Model(dataclasses.replace(tiny.CONFIG, **GATES[gate]))
    learner = Learner(model, objectives.make("rspo"), optax.sgd(1.0), rows="packed", aux_coef=AUX)
    start = tiny.draw_params(model)
    start["moe"]["mlp"]["router_bias"] *= 0.3  # noise still counts
    engine = Engine(model, Sampling(), tiny.GROUP, tiny.ANSWER, (1,), router=NOISE, record_router_logits=True)
    prompts = np.random.default_rng(0).integers(2, 16, (2, tiny.PROMPT)).astype(np.int32)
    lengths, uids = np.full(2, tiny.PROMPT, np.int32), np.arange(2, dtype=np.uint32)
    rollout = engine.generate(start, prompts, lengths, uids, jax.random.key(0)).replace(rewards=jnp.arange(8.0))
    sampled = rollout.routes.sampled
    fed = np.asarray(sampled.experts)[0, ..., 0] != 255
    assert share_outside(sampled.experts, chosen_by_hand(model, start, sampled.logits), fed) > 0.05  # noise decided

    layout = lay_out(np.arange(tiny.ROWS), np.asarray(rollout.segment_ids).sum(1), tiny.TIME, tiny.UPDATES)
    state = make_state(model, jax.tree.map(jnp.copy, start), learner.optimizer)
    scorer = Scorer(learner, ReplayConfig(mode), tiny.GROUP)
    batch, metrics = tiny.learned(scorer, state, Policy(start), rollout, [layout])
    found = M.finalize(metrics)
    tokens, segment_ids = batch.tokens, batch.segment_ids
    replay = dataclasses.replace(sampled, logits=None) if mode == "R3" else None
    own = choice(model, start, tokens, segment_ids, replay)
    assert found["routing/flips_sampler_old"] == pytest.approx(share_outside(sampled.experts, own, fed), abs=1e-6)
    if mode == "R2":
        largest = np.argsort(-np.asarray(batch.routes.scored.logits), axis=-1)[..., :K]
        assert share_outside(largest, own, fed) > 0.05  # the bias decided

    before, replayed = start, batch.routes.replayed
    inside = np.asarray(segment_ids) > 0
    for _ in range(2):
        out = forward(model, before, tokens, segment_ids, replayed)
        now = chosen_by_hand(model, before, out.routing.logits)
        state, metrics = learner.update(state, batch, layout)
        found, after = M.finalize(metrics), jax.device_get(state.trained.policy)
        flips = share_outside(batch.routes.scored.experts, now, inside)
        assert found["routing/flips_old_current"] == pytest.approx(flips, abs=1e-6)
        scores = np.asarray(out.routing.logits, np.float64)
        if model.config.scoring_func == "sigmoid":
            scores = -np.log(1 + np.exp(-scores))
        aux = AUX * load_balance(scores, now, np.asarray(batch.loss_mask))
        assert found["loss/aux"] == pytest.approx(aux, rel=1e-4)
        if before is start:
            assert found["check/current_old_mean"] < 1e-6
        np.testing.assert_array_equal(after["moe"]["mlp"]["router_bias"], start["moe"]["mlp"]["router_bias"])
        assert np.abs(after["moe"]["mlp"]["router"] - before["moe"]["mlp"]["router"]).max() > 1e-4
        before = after
    assert flips > 0.01
