"""Pairs keep what is theirs: margins, log-probs of the start, and the places of chosen and rejected answers."""

from types import SimpleNamespace
from unittest.mock import Mock

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm import objectives
from jaxrl_llm.training.layout import UpdateConfig
from jaxrl_llm.training.pairs import PairData, Pairs
from jaxrl_llm.training.state import make_state
from jaxrl_llm.training.step import Learner
from tests.reference import tiny_training as tiny

PAIRS, TIME = 2, 3
UPDATES = UpdateConfig(minibatches=1, shuffle="groups")
MASK = np.array([[0, 1, 1], [0, 1, 0], [0, 1, 0], [0, 1, 1]], bool)
SEGMENTS = np.array([[1, 1, 1], [1, 1, 0], [1, 1, 0], [1, 1, 1]], np.int32)
ROWS = {"tokens": SEGMENTS, "segment_ids": SEGMENTS, "loss_mask": MASK}


class Tokens(Learner):
    """Scores that say whose they are: the log-prob of a token is minus its id."""

    def score(self, policy, rollout, layouts, wanted, routing=None):
        return {"logprobs": -rollout.tokens.astype(jnp.float32)}


def source(data, pairs=PAIRS, **fields):
    learner = Tokens(tiny.make_model(num_experts=0), objectives.make("dpo", beta=0.5), optax.sgd(1.0), rows="padded")
    return Pairs(learner, Mock(spec=PairData, answer_length=2, **data), 0, pairs, UPDATES, **fields)


def state():
    return make_state(tiny.make_model(num_experts=0), {}, optax.sgd(1.0))


def test_a_batch_has_the_margins_and_the_reference_of_its_own_pairs():
    """Pair 7 with margin 0.25 stands before pair 3 with 0.5, and the reference is kept by the names of pairs."""
    reference = {uid: np.array([[0, uid, 1], [0, uid, 2]], np.float32) for uid in (3, 5, 7)}
    pairs = source({"have_margins": True}, reference=reference)
    given = ROWS | {"uid": np.array([7, 3]), "margins": np.array([0.25, 0.5], np.float32)}
    batch = pairs.next(iter([given]), 1, state()).rollout
    np.testing.assert_array_equal(batch.margins, [[0, 0.25, 0.25], [0, 0.25, 0], [0, 0.5, 0], [0, 0.5, 0.5]])
    np.testing.assert_array_equal(batch.ref_logprobs, [[0, 7, 1], [0, 7, 2], [0, 3, 1], [0, 3, 2]])
    np.testing.assert_array_equal(batch.advantages, [[0, 1, 1], [0, -1, 0], [0, 1, 0], [0, -1, -1]])


class ByName:
    """An encoder of pairs whose rows hold the pair's name and the side."""

    def rows(self, pairs):
        rows = np.array([[1, pair["uid"], side] for pair in pairs for side in (0, 1)], np.int32)
        return {"tokens": rows, "segment_ids": np.ones_like(rows), "loss_mask": np.ones(rows.shape, bool)}


def test_the_reference_is_that_of_the_start_for_every_pair():
    """Three pairs to learn from and two held out, scored two pairs at a time, so that the last ones fill a batch."""
    train, test = ([{"uid": uid} for uid in uids] for uids in ((9, 4, 6), (8, 2)))
    splits = SimpleNamespace(train=train, test=test, encoder=ByName())
    found = source({"splits": splits, "test": {"tokens": np.zeros((4, TIME))}}).started(state(), None)
    assert list(found.reference) == [9, 4, 6]
    for uid, two in found.reference.items():
        np.testing.assert_array_equal(two, [[-1, -uid, 0], [-1, -uid, -1]])
    np.testing.assert_array_equal(found.held_out_reference, [[-1, -8, 0], [-1, -8, -1], [-1, -2, 0], [-1, -2, -1]])


def test_held_out_pairs_are_judged_by_hand():
    """Rewards are 0.5 (log pi - log pi_ref) summed over the answer: 0.5 (-3 + 5) = 1 and 0.5 (-4 + 3) = -0.5 of the
    first pair, 0.5 (-5 + 4) = -0.5 and 0.5 (-5 + 3) = -1 of the second."""
    tokens = np.array([[9, 1, 2], [9, 4, 0], [9, 5, 0], [9, 2, 3]], np.int32)
    reference = np.array([[-9, -1, -4], [-9, -3, 0], [-9, -4, 0], [-9, -1, -2]], np.float32)
    test = ROWS | {"tokens": tokens, "prompt": ["p", "q"], "chosen": ["pc", "qc"], "rejected": ["pr", "qr"]}
    metrics, rows = source({"test": test}, samples=2, held_out_reference=reference).evaluate(state())
    expected = {
        "eval/pair_accuracy": 1.0,
        "eval/pair_margin": 1.0,
        "eval/reward_chosen": 0.25,
        "eval/reward_rejected": -0.75,
        "eval/logprob_chosen": -4.0,
        "eval/logprob_rejected": -4.5,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    names = ("prompt", "chosen", "rejected", "reward_chosen", "reward_rejected")
    shown = [tuple(row[name] for name in names) for row in rows]
    assert shown == [("p", "pc", "pr", 1, -0.5), ("q", "qc", "qr", -0.5, -1)]
