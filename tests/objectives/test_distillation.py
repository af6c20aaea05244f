"""Distillation: numbers by hand, loops, gradients by enumeration of every answer, and TRL's own losses."""

import functools
import itertools
import math
import types
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import objectives
from jaxrl_llm.ground.metrics import finalize
from jaxrl_llm.objectives.distillation import TeacherAdvantage, generalized_jsd, teacher_advantages, top_and_rest
from jaxrl_llm.training.teacher_divergence import divergence_of_states

MASK = np.arange(4) < np.asarray([[4], [2], [0]])
BETAS = [0.0, 0.3, 1.0]


def log_softmax(x):
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def two_policies(*shape, seed=0):
    rng = np.random.default_rng(seed)
    return [log_softmax(2 * rng.normal(size=shape)) for _ in range(2)]


def loop_jsd(log_p, log_t, beta):
    """One position, from the definition (GKD eq. 1), with the two limits as forward and reverse KL."""
    p, t = np.exp(log_p), np.exp(log_t)
    if beta in (0, 1):
        a, b = (p, t) if beta else (t, p)
        return sum(x * math.log(x / y) for x, y in zip(a, b, strict=True))
    total = 0.0
    for x, y in zip(p, t, strict=True):
        mixed = beta * y + (1 - beta) * x
        total += beta * y * math.log(y / mixed) + (1 - beta) * x * math.log(x / mixed)
    return total


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0])
def test_the_advantage_is_the_discounted_gap_to_go(gamma):
    rng = np.random.default_rng(0)
    taught, old = rng.normal(size=(2, 3, 4))
    gap = np.where(MASK, taught - old, 0)
    expected = [[sum(gamma ** (u - t) * row[u] for u in range(t, 4)) for t in range(4)] for row in gap]
    got = teacher_advantages(jnp.asarray(taught), jnp.asarray(old), jnp.asarray(MASK), gamma)
    np.testing.assert_allclose(got, np.where(MASK, expected, 0), atol=1e-6)


def test_it_stands_beside_the_rewards():
    """A = 2 (log pi_T - log pi_old) + 3 (R - 1/2): R = 1, 0 give 3/2 and -3/2 with std none."""
    made = TeacherAdvantage("none", teacher_weight=2.0, reward_weight=3.0)
    old, mask = jnp.zeros((2, 2)), jnp.ones((2, 2), bool)
    given = {"mask": mask, "old_logprobs": old, "teacher_logprobs": jnp.asarray([[-1.0, 0.5], [0.0, 0.0]])}
    got = made(jnp.asarray([1.0, 0.0]), group_size=2, **given)
    np.testing.assert_allclose(got, [[-0.5, 2.5], [-1.5, -1.5]], atol=1e-6)
    assert made.compares_groups
    assert not TeacherAdvantage().compares_groups  # without rewards a group of one will do
    assert made.formula() == "A = 2 log(pi_T/pi_old) + 3 A_R; A_R = R - mean R"
    assert TeacherAdvantage(teacher_gamma=1.0).formula() == "A = 1 sum_(u >= t) 1^(u - t) log(pi_T/pi_old)"


def test_one_penalty_for_what_the_teacher_finds_unlikely():
    """0.05 and 0.2 against 0.1; a masked token has none."""
    made = TeacherAdvantage(teacher_weight=2.0, teacher_below=0.1)
    taught, mask = jnp.log(jnp.asarray([[0.05, 0.2, 0.05]])), jnp.asarray([[True, True, False]])
    got = made(jnp.zeros(1), group_size=1, mask=mask, old_logprobs=taught, teacher_logprobs=taught)
    np.testing.assert_array_equal(got, [[-2, 0, 0]])
    assert made.formula() == "A = -2 where pi_T < 0.1"


@pytest.mark.parametrize("beta", BETAS)
def test_divergences_equal_the_loop(beta):
    log_p, log_t = two_policies(5, 7)
    expected = [loop_jsd(a, b, beta) for a, b in zip(log_p, log_t, strict=True)]
    np.testing.assert_allclose(generalized_jsd(jnp.asarray(log_p), jnp.asarray(log_t), beta), expected, rtol=1e-5)


def test_the_rest_is_one_entry():
    """Teacher 0.5 0.3 0.15 0.05, policy 0.1 0.2 0.3 0.4, k = 2: (0.5, 0.3, 0.2) and (0.1, 0.2, 0.7)."""
    teacher, policy = jnp.log(jnp.asarray([[0.5, 0.3, 0.15, 0.05]])), jnp.log(jnp.asarray([[0.1, 0.2, 0.3, 0.4]]))
    own, taught = top_and_rest(policy, teacher, 2)
    np.testing.assert_allclose(jnp.exp(own), [[0.1, 0.2, 0.7]], rtol=1e-5)
    np.testing.assert_allclose(jnp.exp(taught), [[0.5, 0.3, 0.2]], rtol=1e-5)
    for beta in BETAS:  # merging entries loses divergence, never adds any
        assert generalized_jsd(own, taught, beta)[0] < generalized_jsd(policy, teacher, beta)[0]


def test_without_the_rest_the_forward_kl_is_least_on_the_likeliest():
    """Teacher 0.5 0.3 0.15 0.05, k = 2: no gradient, and a KL of 0.8 log 0.8, at (5/8, 3/8, 0, 0)."""
    teacher, best = jnp.log(jnp.asarray([[0.5, 0.3, 0.15, 0.05]])), jnp.log(jnp.asarray([[5, 3, 1e-6, 1e-6]]) / 8)

    def forward(logits):
        return generalized_jsd(*top_and_rest(jax.nn.log_softmax(logits), teacher, 2, add_tail=False), 0.0)[0]

    value, gradient = jax.value_and_grad(forward)(best)
    np.testing.assert_allclose(value, 0.8 * math.log(0.8), rtol=1e-5)
    np.testing.assert_allclose(gradient, np.zeros((1, 4)), atol=1e-6)


@functools.cache
def enumerated():
    """Every answer of two tokens out of three: (student's logits, teacher's log-probs by state, answers, states)."""
    rng = np.random.default_rng(1)
    logits, taught = rng.normal(size=(4, 3)), log_softmax(rng.normal(size=(4, 3)))
    answers = np.asarray(list(itertools.product(range(3), repeat=2)))
    states = np.stack([np.zeros(9, int), 1 + answers[:, 0]], axis=1)  # the start, then by the first token
    return logits, taught, answers, states


def expected_gradient(objective, gamma=0.0):
    """The gradient of the objective's loss in the logits, in expectation over the policy's own answers."""
    logits, taught, answers, states = enumerated()

    def logprobs_of(table):
        return jnp.take_along_axis(jax.nn.log_softmax(table)[states], answers[..., None], axis=-1)[..., 0]

    with jax.enable_x64(True):
        old = logprobs_of(jnp.asarray(logits))
        chance = jnp.exp(old.sum(1))
        taught_logprobs = jnp.asarray(np.take_along_axis(taught[states], answers[..., None], -1)[..., 0])
        advantages = jnp.zeros((9, 2))
        if "teacher_logprobs" in objective.needs:
            advantages = teacher_advantages(taught_logprobs, old, jnp.ones((9, 2), bool), gamma)

        def loss(table):
            divergence = generalized_jsd(jax.nn.log_softmax(table)[states], jnp.asarray(taught)[states], 1.0)
            given = {
                "logprobs": logprobs_of(table),
                "old_logprobs": old,
                "teacher_logprobs": taught_logprobs,
                # Both terms are linear in these, so that the mean over 9 rows becomes the expectation.
                "advantages": 9 * chance[:, None] * advantages,
                "teacher_divergence": 9 * chance[:, None] * divergence,
                "mask": jnp.ones((9, 2), bool),
            }
            return objective(**given)[0]

        return np.asarray(jax.grad(loss)(jnp.asarray(logits)))


def made(**fields):
    return objectives.make("dapo", aggregation="sequence_mean_token_sum", **fields)


def test_the_sampled_gradient_is_the_exact_one_in_expectation():
    """gamma = 0 against the exact term, and both against the KL by token at prefixes that are held."""
    sampled, exact = made(advantage="teacher"), made(advantage="none", teacher_coef=1.0)
    logits, taught, *_ = enumerated()
    p = np.exp(log_softmax(logits))
    gap = np.log(p) - taught
    reach = np.concatenate([[1.0], p[0]])  # of every state
    by_hand = reach[:, None] * p * (gap - (p * gap).sum(1, keepdims=True))
    np.testing.assert_allclose(expected_gradient(exact), by_hand, atol=1e-12)
    np.testing.assert_allclose(expected_gradient(sampled), by_hand, atol=1e-12)


def test_the_undiscounted_one_is_that_of_whole_answers():
    """gamma = 1: d/d logits of sum_y pi(y) log (pi / pi_T)(y), by finite differences of the enumerated sum."""
    logits, taught, answers, states = enumerated()

    def kl(table):
        logs = log_softmax(table)
        both = [np.take_along_axis(x[states], answers[..., None], -1)[..., 0].sum(1) for x in (logs, taught)]
        return float(np.exp(both[0]) @ (both[0] - both[1]))

    got, step = expected_gradient(made(advantage="teacher"), gamma=1.0), 1e-6
    for place in np.ndindex(logits.shape):
        moved = [logits.copy() for _ in range(2)]
        moved[0][place] += step
        moved[1][place] -= step
        np.testing.assert_allclose(got[place], (kl(moved[0]) - kl(moved[1])) / (2 * step), atol=1e-8)
    assert np.abs(got - expected_gradient(made(advantage="teacher"))).max() > 1e-2


def test_the_term_is_reduced_by_name_and_kl_teacher_is_logged():
    """D = 1, 3 | 2: by token 2, by answer 2; weighed by 0.5 they are 1. pi = pi_T / 2: k3 = 2 - 1 - log 2."""
    given = {
        "logprobs": jnp.full((2, 2), -1.0) - math.log(2),
        "old_logprobs": jnp.full((2, 2), -1.0),
        "teacher_logprobs": jnp.full((2, 2), -1.0),
        "teacher_divergence": jnp.asarray([[1.0, 3.0], [2.0, jnp.inf]]),
        "advantages": jnp.zeros(2),
        "mask": jnp.asarray([[True, True], [True, False]]),
    }
    for aggregation, expected in {"token_mean": 1.0, "sequence_mean_token_sum": 1.5}.items():
        objective = objectives.make("grpo", advantage="none", teacher_coef=0.5, aggregation=aggregation)
        loss, metrics = objective(**given)
        np.testing.assert_allclose(loss, expected, rtol=1e-6)
        found = finalize(metrics)
        np.testing.assert_allclose(found["loss/teacher"], expected, rtol=1e-6)
        np.testing.assert_allclose(found["kl/teacher"], 1 - math.log(2), rtol=1e-5)
    with pytest.raises(ValueError, match="this objective needs teacher_divergence"):
        objective(**{name: x for name, x in given.items() if name != "teacher_divergence"})


@pytest.mark.parametrize("beta", [0.3, 1.0])
def test_chunks_and_padded_vocabularies_change_nothing(beta, monkeypatch):
    """Five tokens by twos, a teacher of another width whose head has two more rows, against the plain formula."""
    rng = np.random.default_rng(2)
    own, taught, head, wider = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in [(5, 3), (5, 4), (3, 6), (4, 8)])
    monkeypatch.setattr("jaxrl_llm.training.teacher_divergence.score_chunk", lambda platform: 2)

    def chunked(own, head, **top):
        how = {"divisors": (0.7, 1.4), "beta": beta, **top}
        return jnp.cos(divergence_of_states(own, taught, head, wider, **how)).sum()

    def plain(own, head, top_k=0, **tail):
        logs = jax.nn.log_softmax(own @ head / 0.7), jax.nn.log_softmax(taught @ wider[:, :6] / 1.4)
        return jnp.cos(generalized_jsd(*(top_and_rest(*logs, top_k, **tail) if top_k else logs), beta)).sum()

    for top in ({}, {"top_k": 2}, {"top_k": 2, "add_tail": False}):
        both = [jax.jit(jax.value_and_grad(functools.partial(f, **top), (0, 1))) for f in (chunked, plain)]
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), *(f(own, head) for f in both))


@pytest.fixture(scope="module")
def torch():
    with warnings.catch_warnings():  # what they deprecate among themselves is none of ours
        warnings.simplefilter("ignore")
        reason = "parity with TRL needs the bench extra: pip install jaxrl_llm[bench]"
        found = pytest.importorskip("torch", reason=reason)
        pytest.importorskip("trl", reason=reason)
    return found


def of_both(torch, theirs, ours, logits):
    """Assert one value and gradient, in float64."""
    given = torch.tensor(logits, requires_grad=True)
    value = theirs(given)
    value.backward()
    with jax.enable_x64(True):
        here, gradient = jax.value_and_grad(ours)(jnp.asarray(logits))
    np.testing.assert_allclose(here, value.item(), rtol=1e-9)
    np.testing.assert_allclose(gradient, given.grad.numpy(), rtol=1e-8, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("beta", BETAS)
def test_equals_gkd_of_trl(torch, beta):
    """The loss of GKDTrainer, `generalized_jsd_loss`, with a temperature and labels that mask."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl.experimental.gkd import GKDTrainer  # pyright: ignore[reportMissingImports]

    logits, taught = np.random.default_rng(0).normal(size=(2, 3, 4, 5)) * 3
    labels = torch.tensor(np.where(MASK, 1, -100))
    tokens = MASK.sum()

    def theirs(x):
        return GKDTrainer.generalized_jsd_loss(
            x, torch.tensor(taught), labels, beta, temperature=0.7, num_items_in_batch=torch.tensor(tokens)
        )

    def ours(x):
        own, other = (jax.nn.log_softmax(jnp.asarray(y) / 0.7) for y in (x, taught))
        return jnp.sum(generalized_jsd(own, other, beta), where=jnp.asarray(MASK)) / tokens

    of_both(torch, theirs, ours, logits)


@pytest.mark.slow
def test_the_rest_as_one_entry_equals_trl(torch):
    """Forward KL to a server's top k with a tail, as ServerDistillationTrainer has it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl.experimental.server_distillation.server_distillation_trainer import (  # pyright: ignore
            ServerDistillationTrainer,
        )

    logits, taught = np.random.default_rng(1).normal(size=(2, 3, 4, 6))
    top, ids = torch.topk(torch.log_softmax(torch.tensor(taught), -1), 2)
    stand_in: Any = types.SimpleNamespace(
        loss_add_tail=True, _reduce_divergence_loss=ServerDistillationTrainer._reduce_divergence_loss
    )

    def theirs(x):
        return ServerDistillationTrainer._compute_server_forward_kl_loss(
            stand_in,
            {"topk_logprobs": top, "topk_token_ids": ids},
            torch.log_softmax(x, -1),
            torch.tensor(np.where(MASK, 1, -100)),
        )

    def ours(x):
        own, other = (jax.nn.log_softmax(jnp.asarray(y)).reshape(-1, 6) for y in (x, taught))
        found = generalized_jsd(*top_and_rest(own, other, 2), beta=0.0).reshape(3, 4)
        return jnp.sum(found, where=jnp.asarray(MASK)) / MASK.sum()

    of_both(torch, theirs, ours, logits)


@pytest.mark.slow
@pytest.mark.parametrize("beta", BETAS)
def test_chunks_equal_the_distillation_trainer_of_trl(torch, beta):
    """`_chunked_divergence_loss` of DistillationTrainer, float32: hidden states of two widths, value and gradient."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl.trainer.distillation_trainer import _chunked_divergence_loss  # pyright: ignore

    rng = np.random.default_rng(3)
    shapes = [(3, 4, 3), (3, 4, 5), (7, 3), (7, 5)]
    own, taught, head, wider = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    given = [torch.tensor(x, requires_grad=place in (0, 2)) for place, x in enumerate((own, taught, head, wider))]
    loss: Any = _chunked_divergence_loss
    value, *_ = loss(*given, torch.tensor(MASK), beta, temperature=0.8)
    value.backward()

    def ours(own, head):
        flat = own.reshape(-1, 3), jnp.asarray(taught).reshape(-1, 5)
        found = divergence_of_states(*flat, head, jnp.asarray(wider.T), divisors=(0.8, 0.8), beta=beta)
        return jnp.sum(found.reshape(3, 4), where=jnp.asarray(MASK)) / MASK.sum()

    here, gradients = jax.value_and_grad(ours, (0, 1))(jnp.asarray(own), jnp.asarray(head.T))
    np.testing.assert_allclose(here, value.item(), rtol=1e-5)
    np.testing.assert_allclose(gradients[0], given[0].grad, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(gradients[1], given[2].grad.T, rtol=1e-4, atol=1e-6)
