"""A server that lies: every field wrong in turn, every fault of the protocol, and records of experts that are not."""

import dataclasses
import json
import re
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from absl import logging

from jaxrl_llm.rollout.answer_fields import Question, RouteFormat, Unreadable, read_answer
from jaxrl_llm.rollout.handshake import experts_differ
from tests.reference.fake_vllm import as_base64, fake_vllm
from tests.reference.hostile_answers import FIELDS, PROTOCOL, SECONDS
from tests.reference.vllm_answers import LENGTHS, PROMPTS, UIDS, engine, params

CASES = FIELDS | PROTOCOL


@pytest.fixture(scope="module")
def hostile():
    """A server that has passed the handshake of three policies, and a rollout of the second while it is honest."""
    with fake_vllm() as server:
        own = engine(server.address, deadline_s=SECONDS, at_once=6)
        _, (held, _), _ = [own.take_weights(params(), version) for version in (3, 4, 5)]
        assert -4 < held.routes.alike < -1  # log of the shares of two layers
        held = held._replace(routes=dataclasses.replace(held.routes, alike=-5.0))  # as of more experts

        def generate(*faults):
            server.faults = list(faults)
            return own.generate(held, PROMPTS, LENGTHS, UIDS, jax.random.key(0))

        yield SimpleNamespace(server=server, generate=generate, honest=generate())


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_is_named_and_asked_again(hostile, monkeypatch, case):
    """The rollout is the honest one to the last bit, experts too, and waits for no answer longer than it may."""
    fault, message = CASES[case]
    warnings = []
    monkeypatch.setattr(logging, "warning", lambda text, *values: warnings.append(text % values))
    start = time.monotonic()
    found = hostile.generate(None, fault)
    assert time.monotonic() - start < 4 * SECONDS
    (warning,) = warnings
    assert warning.startswith(hostile.server.address)
    assert re.search(f"{message}.*; its answers are asked again", warning), warning
    assert "\x1b" not in warning
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(hostile.honest), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        (lambda x: x[:, ::-1], "returns other experts than the trainer's: .*% of those of its MoE layer 0 .bound 5%"),
        (lambda x: x[:1].repeat(len(x), 0), "returns other experts than the trainer's: .* over .* tokens whose choice"),
        (lambda x: x[::-1], "so its record is of other layers or tokens, or of none"),
        (lambda x: (x + 1) % 4, "returns other experts than the trainer's"),
        (np.zeros_like, "routed_experts holds an expert twice for one token of a layer"),
    ],
    ids=["layers reversed", "one token for all", "tokens reversed", "others", "zero"],
)
def test_a_record_that_is_not_of_the_answers_is_found_at_the_start(routes, message):
    with fake_vllm(routes=routes) as server, pytest.raises(ValueError, match=f"{server.address} .*{message}"):
        engine(server.address).take_weights(params(), 0)


def test_near_ties_are_not_compared():
    """By hand: two layers, one answer of two tokens, one expert of three. Standard deviations are 0.82 and 0.46, so
    that a lead of 1e-5 is rounding in float32, and one of 0.03 in bfloat16."""
    logits = np.array([[[[2.0, 1.0, 0.0], [0.0, 1.0, 2.0]]], [[[1.0, 0.0, 1.00001], [0.0, 1.0, 0.97]]]])
    right = np.array([[[[0], [2]], [[2], [1]]]])  # [b t l k]
    assert experts_differ(right, logits, "float32") == ""
    right[0, 0, 1] = 0  # nearly tied
    assert experts_differ(right, logits, "float32") == ""
    right[0, 1, 1] = 2
    assert experts_differ(right, logits, "float32").startswith("100% of those of its MoE layer 1 (bound 5%), over 1 ")
    assert experts_differ(right, logits, "bfloat16") == ""
    every = np.array([[[[0, 1, 2], [2, 1, 0]], [[1, 0, 2], [0, 2, 1]]]])
    assert experts_differ(every, logits, "float32") == ""  # all experts serve every token


def test_what_is_outside_of_the_groups_is_no_near_tie():
    """By hand: two groups of two, of which the first is kept and serves two experts."""
    ranks = np.array([[[[0.4, 0.3, -np.inf, -np.inf]]]])
    assert experts_differ(np.array([[[[1, 0]]]]), ranks, "float32") == ""
    assert experts_differ(np.array([[[[1, 2]]]]), ranks, "float32").startswith("50% of those of its MoE layer 0")


def read(fed=1, alike=0.0, *, token=2, logprob=-1.5, experts=(3, 1)):
    """An answer of `fed` equal tokens to a prompt of one; there are 5 tokens and 4 experts."""
    asked = Question(
        [1], {"max_tokens": fed, "stop_token_ids": []}, 5, {"a-0": 0}, 0, RouteFormat(1, 2, 4, np.uint8, alike=alike)
    )
    choice = {
        "token_ids": [token] * fed,
        "logprobs": {"content": [{"token_id": token, "logprob": logprob}] * fed},
        "weight_versions": [{"version": "a-0", "start": 0, "end": fed}],
        "routed_experts": as_base64(np.tile(np.array(experts, np.int32), (fed, 1, 1))),
    }
    return read_answer(json.dumps({"choices": [choice]}).encode(), asked)


@pytest.mark.parametrize(
    ("field", "ends", "beyond"),
    [("token", (0, 4), (-1, 5)), ("logprob", (-104.0, 0.0), (-104.5, 0.001)), ("experts", (0, 3), (-1, 4))],
)
def test_a_range_ends_where_it_should(field, ends, beyond):
    for value in ends:
        read(**{field: (value, 1) if field == "experts" else value})
    for value in beyond:
        with pytest.raises(Unreadable, match=rf"holds {value}, and not .* from {ends[0]:g} to"):
            read(**{field: (value, 1) if field == "experts" else value})


def test_equal_experts_for_all_tokens_are_a_matter_of_chance():
    """By hand: at e^-2 a token ten equal ones have e^-20, above 1e-9 = e^-20.7, and eleven e^-22; a router that gives
    all tokens the same experts (chance 1) may say so."""
    answer = read(10, -2.0)
    assert {name: x.dtype.name for name, x in vars(answer).items()} == {
        "tokens": "int32", "logprobs": "float32", "versions": "int32", "experts": "uint8", "prompt_logprobs": "float32"
    }  # fmt: skip
    assert answer.experts.tolist() == [[[3, 1]]] * 10
    assert read(11, 0.0).logprobs.tolist() == [-1.5] * 11
    with pytest.raises(Unreadable, match="the same experts for all 11 tokens, and the router spreads them"):
        read(11, -2.0)
