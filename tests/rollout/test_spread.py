"""Who is to blame for an answer that failed: a server that is lost takes no question with it."""

import random
import threading
import time

import numpy as np
import pytest
from absl import logging

from jaxrl_llm.rollout.answer_fields import Answer
from jaxrl_llm.rollout.bounded_http import Fault
from jaxrl_llm.rollout.server import Server
from jaxrl_llm.rollout.spread import ask_all

QUESTIONS = range(12)


@pytest.fixture(autouse=True)
def _silent(monkeypatch):
    monkeypatch.setattr(logging, "warning", lambda *_: None)


def answer_to(question):
    tokens = np.array([question])
    return Answer(tokens, tokens * 0.0, tokens * 0, None, tokens[1:])


def asked(servers, dead, poison=None):
    """The answers of servers of which some never answer and one question fails everywhere."""
    draw = random.Random(0)

    def ask(server, question):
        time.sleep(draw.random() / 2000)
        if server.address in dead or question == poison:
            raise Fault(f"{server.address} failed")
        return answer_to(question)

    out = ask_all(QUESTIONS, [Server(one) for one in servers], 4 * len(servers), ask, lambda _: None)
    return [one.tokens[0] for one in out]


def test_all_is_answered_while_one_server_is_left():
    for _ in range(20):  # threads fall out in another order each time
        assert asked("abc", dead="ab") == [*QUESTIONS]


def test_no_server_is_left():
    for _ in range(20):
        with pytest.raises(ValueError, match=r"12 answers are left and no server for them: . failed; . failed"):
            asked("ab", dead="ab")


def test_an_answer_that_fails_everywhere_ends_the_run():
    for _ in range(20):
        with pytest.raises(ValueError, match=r"an answer failed 9 times|answers are left and no server"):
            asked("ab", dead="", poison=3)


def test_an_answer_that_fails_while_others_are_answered_ends_the_run():
    """One server fails question 0 each time that it has answered two others, which clear its name: four times are
    borne, the fifth is one too many."""
    turn, answered, failed = threading.Condition(), [], []

    def ask(server, question):
        with turn:
            if question == 0:
                assert turn.wait_for(lambda: len(answered) == 2 * len(failed) + 2, timeout=5)
                failed.append(question)
            else:
                turn.wait_for(lambda: len(answered) < 2 * len(failed) + 2, timeout=5)
                answered.append(question)
            turn.notify_all()
        if question == 0:
            raise Fault(f"{server.address} failed")
        return answer_to(question)

    with pytest.raises(ValueError, match=r"^an answer failed 5 times, at last because a failed$"):
        ask_all(range(40), [Server("a")], 2, ask, lambda _: None)
    assert len(failed) >= 5
