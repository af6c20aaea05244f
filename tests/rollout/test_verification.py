"""What verifier and reward functions see of sampled tokens, and what their verdicts become."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import tasks
from jaxrl_llm.rollout.rollout import Rollout
from jaxrl_llm.rollout.verification import verify
from jaxrl_llm.tasks.golds import AnyRight
from jaxrl_llm.tasks.verifiers import TIMEOUT, exact, numeric
from tests.tasks import verifiers_for_tests as V

BYTES, WIDTH = tasks.ByteTokenizer(), 40
TASK = dataclasses.replace(tasks.make("sort"), tokenizer=BYTES, verify=exact)


def judged(task, ids, gold="42", truncated=(), row=None):
    """The verdicts on one prompt's answers, given as ids without their end."""
    tokens, mask = np.zeros((len(ids), WIDTH), np.int32), np.zeros((len(ids), WIDTH), bool)
    for i, one in enumerate(ids):
        tokens[i, : len(one) + 1], mask[i, : len(one) + 1] = [*one, 1], True
    cut = np.isin(np.arange(len(ids)), truncated)
    out = Rollout(*map(jnp.asarray, (tokens, mask.astype(np.int32), mask, np.zeros(mask.shape, np.float32), cut)))
    prompts = {"prompt": ["?"], "answer": [gold], "row": [row or {}]}
    return verify(out, task, prompts, len(ids))


def rewards(*given, **also):
    """The task's own."""
    return judged(*given, **also)[1]["verifier"].tolist()


def texts(*answers):
    return [[byte + 2 for byte in (one if isinstance(one, bytes) else one.encode())] for one in answers]


@pytest.mark.parametrize("verifier", [exact, numeric, AnyRight(exact)])
def test_half_a_character_at_the_end_does_not_make_an_answer_wrong(verifier):
    """The first bytes of 'é' and of '😀'."""
    ids = texts("42", b"42\xc3", b"42\xf0\x9f\x98", b"41\xc3")
    texts_found, found, _ = judged(dataclasses.replace(TASK, verify=verifier), ids)
    assert found["verifier"].tolist() == [1, 1, 1, 0]
    assert texts_found[1] == "42" + tasks.UNKNOWN  # what is saved is what was sampled


def test_half_a_character_before_the_answer_is_the_verifiers_to_judge():
    ids = texts(b"\xf0\x9f! The total is 42", b"4\xc32", "42é")
    assert rewards(dataclasses.replace(TASK, verify=numeric), ids)[:2] == [1, 0]
    assert rewards(TASK, ids) == [0, 0, 0]


def test_an_id_without_a_character_makes_an_answer_wrong():
    task = dataclasses.replace(tasks.make("sort"), verify=exact)
    ids = task.tokenizer.encode("12")
    assert rewards(task, [ids, [*ids, 99], [ids[0], 99, ids[1]]], gold="12") == [1, 0, 0]


def test_only_what_follows_the_last_end_of_thought_is_verified():
    answers = ["42", "<think>42</think>41", "<think>41</think>42", "41</think>41</think>42", "<think>42", "42</think>"]
    assert rewards(dataclasses.replace(TASK, verify=numeric), texts(*answers)) == [1, 0, 1, 1, 1, 1]
    thoughtful = dataclasses.replace(TASK, verify=numeric, think_end_token="</think>")
    assert rewards(thoughtful, texts(*answers)) == [0, 0, 1, 1, 0, 0]
    seen = []
    noting = dataclasses.replace(thoughtful, verify=lambda *given: float(seen.append(given[1]) is None))
    assert rewards(noting, texts(*answers)) == [0, 1, 1, 1, 0, 1]
    assert seen == ["41", "42", "42", ""]


def long(prompt, answer, gold, row):
    return float(len(answer))


def test_functions_have_verdicts_of_their_own_and_see_the_whole_answer():
    functions = {"long": (long, False), "again": (AnyRight(exact), False)}
    task = dataclasses.replace(TASK, functions=functions, think_end_token="</think>")
    _, found, errors = judged(
        task, texts("42", "x</think>42", "</think>1", "42"), truncated=[3], row={"other_right_answers": ["1"]}
    )
    assert list(found) == ["verifier", "long", "again"]
    assert [one.tolist() for one in found.values()] == [[0, 1, 1, 0], [2, 11, 9, 0], [1, 0, 0, 0]]
    assert errors == [{}] * 4


def test_a_function_that_fails_costs_its_own_reward_alone():
    task = dataclasses.replace(TASK, functions={"odd": (V.troubled, True), "long": (long, False)}, time_limit=1.0)
    _, found, errors = judged(task, texts("42", "raise", "hang", "nan"), gold="hang")
    assert found["verifier"].tolist() == [0, 0, 1, 0]
    assert found["odd"].tolist() == [2.5, 0, 0, 0]
    assert found["long"].tolist() == [2, 5, 4, 3]
    assert [list(error) for error in errors] == [[], ["odd"], ["odd"], ["odd"]]
    assert errors[2] == {"odd": TIMEOUT}
    assert TIMEOUT not in (errors[1]["odd"], errors[3]["odd"])
