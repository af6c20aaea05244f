"""Every term of an update against numpy: programs that agree with one another may all be wrong alike."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm import objectives
from jaxrl_llm.ground import metrics as M
from jaxrl_llm.models.routing import Routing
from jaxrl_llm.objectives.aggregation import TokenMean
from jaxrl_llm.rollout.rollout import Routes
from jaxrl_llm.training.policy import Policy
from jaxrl_llm.training.state import make_state
from jaxrl_llm.training.step import Learner
from tests.reference import step_by_hand as hand
from tests.reference import tiny_training as tiny

MODEL = tiny.make_model()
TEMPERATURE, AUX, K = 0.5, 0.1, tiny.CONFIG.num_experts_per_tok
# PPO's policy term with a sampler correction, KL 0.1, entropy bonus 0.05 and value loss, and the load-balance loss.
LEARNER = Learner(
    MODEL, tiny.everything(TokenMean()), optax.sgd(1.0), temperature=TEMPERATURE, aux_coef=AUX, rows="packed"
)
NO_RECORD = tiny.no_record(MODEL)


@functools.cache
def params(moved=0.0):
    """moved: how far towards other parameters, so that the router chooses otherwise."""
    pair = (tiny.draw_params(MODEL, value_head=True, seed=seed) for seed in (0, 1))
    return jax.tree.map(lambda a, b: (1 - moved) * a + moved * b, *pair)


def forward(params, replayed=NO_RECORD):
    batch = tiny.draw_batch()
    return hand.forward(MODEL, params, batch.tokens, batch.segment_ids, Routing(replayed.experts))


def update(rows, replayed=NO_RECORD):
    """Metrics of one update on a minibatch of a rollout."""
    batch = tiny.draw_batch().replace(routes=Routes(replayed=Routing(replayed.experts)))
    state = make_state(MODEL, jax.tree.map(jnp.copy, params()), LEARNER.optimizer)
    return M.finalize(LEARNER.update(state, batch, tiny.in_one_shape(tiny.layout_of(rows), micro=1))[1])


def by_hand(rows, out):
    """The same minibatch, with every equation spelt out; counts are of its own tokens and answers alone."""
    arrays = {name: x for name, x in vars(tiny.draw_batch()).items() if name != "routes" and x is not None}
    batch = SimpleNamespace(**{name: np.asarray(x)[list(rows)] for name, x in arrays.items()})
    out = out.replace(hidden=out.hidden[np.asarray(rows)])
    logprobs, entropy, values = hand.scores(MODEL, params(), out, batch.tokens, TEMPERATURE)
    mask, old, a = batch.loss_mask, batch.old_logprobs, batch.advantages
    ratio, weight = np.exp(logprobs - old), np.minimum(np.exp(old - batch.sampler_logprobs), 2.0)
    log_q = batch.ref_logprobs - logprobs
    bounded = np.clip(values, batch.old_values - 0.2, batch.old_values + 0.2)
    error = np.maximum((values - batch.returns) ** 2, (bounded - batch.returns) ** 2)
    terms = {
        "policy": -weight * np.minimum(ratio * a, np.clip(ratio, 0.8, 1.2) * a),
        "kl": 0.1 * (np.exp(log_q) - log_q - 1),
        "entropy": -0.05 * entropy,
        "value": error / 2,
    }
    found = {f"loss/{name}": x[mask].mean() for name, x in terms.items()}
    logits = np.asarray(out.routing.logits)[:, list(rows)]
    return found | {"loss/aux": AUX * hand.load_balance(logits, hand.top_k(logits, K), mask)}


@pytest.mark.parametrize("rows", [tuple(range(tiny.ROWS)), (6, 1, 3)], ids=["all rows", "a minibatch"])
def test_every_term_of_an_update(rows):
    """Temperature, the shift of log-probs and values, signs, and counts of the minibatch, not of the rollout."""
    expected = by_hand(rows, forward(params()))
    found = update(rows)
    for name, number in expected.items():
        np.testing.assert_allclose(found[name], number, rtol=2e-4, err_msg=name)
    np.testing.assert_allclose(found["loss/total"], sum(expected.values()), rtol=2e-4)
    assert expected["loss/entropy"] < -0.05  # more than a nat a token: of temperature 0.5, not of a greedy policy


def test_scores_of_the_old_policy():
    """At the rollout's temperature, as the updates score it; values are of the state after each token."""
    batch, layout = tiny.draw_batch(), tiny.in_one_shape(tiny.layout_of(), micro=1)
    found = LEARNER.score(Policy(params()), batch, [layout], {"logprobs", "state_values", "routing"})
    logprobs, _, values = hand.scores(MODEL, params(), forward(params()), batch.tokens, TEMPERATURE)
    inside = np.asarray(batch.segment_ids) > 0
    np.testing.assert_allclose(
        np.asarray(found["logprobs"])[:, 1:][inside[:, 1:]], logprobs[:, 1:][inside[:, 1:]], rtol=1e-4
    )
    after = np.asarray(found["state_values"])[:, :-1]
    np.testing.assert_allclose(after[inside[:, 1:]], values[:, 1:][inside[:, 1:]], rtol=1e-4, atol=1e-5)


def test_the_load_balance_loss_counts_the_routers_own_choice_under_replay():
    """The replayed experts are another policy's: the other terms follow them, the load is that of the router."""
    rows = tuple(range(tiny.ROWS))
    replayed = forward(params(0.5)).routing
    out = forward(params(), replayed)
    expected, found = by_hand(rows, out), update(rows, replayed)
    assert (np.asarray(out.routing.experts) == np.asarray(replayed.experts)).all()
    for name in ("loss/aux", "loss/policy", "loss/value"):
        np.testing.assert_allclose(found[name], expected[name], rtol=2e-4, err_msg=name)
    of_replayed = hand.load_balance(out.routing.logits, replayed.experts, np.asarray(tiny.draw_batch().loss_mask))
    assert abs(AUX * of_replayed / expected["loss/aux"] - 1) > 0.02  # otherwise the two could not be told apart
    assert abs(update(rows)["loss/policy"] / found["loss/policy"] - 1) > 1e-3  # and the replay was in force


def test_router_shift_of_the_token_that_was_fed_at_the_old_experts():
    """RSPO without a replay, the router moved: gamma_t is of the experts that pi_old used for y_t itself."""
    learner = Learner(MODEL, objectives.make("rspo", gamma_min=0.5), optax.sgd(1.0), temperature=TEMPERATURE)
    old, new = forward(params(0.1)).routing, forward(params())
    batch = tiny.draw_batch(ref_logprobs=None, old_values=None, returns=None)
    batch = batch.replace(routes=Routes(scored=Routing(old.experts, old.logits)))

    state = make_state(MODEL, jax.tree.map(jnp.copy, params()), learner.optimizer)
    found = M.finalize(learner.update(state, batch, tiny.layout_of())[1])["loss/total"]
    logprobs = hand.scores(MODEL, params(), new, batch.tokens, TEMPERATURE)[0]
    gamma = hand.router_shift(new.routing.logits, old.logits, K, 0.5)
    ratio, a = np.exp(logprobs - batch.old_logprobs) * gamma, np.asarray(batch.advantages)
    mask = np.asarray(batch.loss_mask)
    weight = mask / np.maximum(mask.sum(1, keepdims=True), 1) / mask.any(1).sum()
    expected = -(weight * np.minimum(ratio * a, np.clip(ratio, 0.8, 1.2) * a)).sum()
    np.testing.assert_allclose(found, expected, rtol=2e-4)
    assert (np.asarray(old.experts) != np.asarray(new.routing.experts)).any(-1)[:, mask].mean() > 0.02
    assert ((gamma > 0.5) & (gamma < 0.98))[mask].mean() > 0.5  # the floor does not hide what is compared
