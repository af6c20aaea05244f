"""Verifiers in worker processes: one that hangs is killed and counted, one that raises is a counted 0."""

import contextlib
import dataclasses
import os
import subprocess
import sys
import time

import psutil
import pytest

from jaxrl_llm import tasks
from jaxrl_llm.tasks import verifiers
from jaxrl_llm.tasks.verifiers import TIMEOUT, Verdict, submit
from jaxrl_llm.tasks.verifiers.named_verifiers import MathVerifier
from tests.tasks import verifiers_for_tests as V

TASK = dataclasses.replace(tasks.make("sort"), isolated=True, time_limit=1.0)


def judged(task, questions):
    return submit(task, questions).result()


def ask(verify, answers, **changes):
    task = dataclasses.replace(TASK, verify=verify, **changes)
    return judged(task, [("prompt", answer, "gold", {}) for answer in answers])


@pytest.fixture(scope="module", autouse=True)
def _no_worker_stays():
    verifiers.close()
    others = workers()  # that of chat templates, where another file rendered one
    yield
    verifiers.close()
    assert workers() <= others


def workers():
    return {child.pid for child in psutil.Process().children() if "import work" in " ".join(child.cmdline())}


def test_rewards_come_in_the_order_of_the_answers():
    answers = ["x" * n for n in range(50)]
    assert ask(V.length, answers) == [Verdict(float(n)) for n in range(50)]
    assert ask(V.length, []) == []
    with_row = [("", "abc", "", {"minus": n}) for n in range(3)]
    verdicts = judged(dataclasses.replace(TASK, verify=V.length), with_row)
    assert [verdict.reward for verdict in verdicts] == [3.0, -7.0, -17.0]  # any number is a reward


def test_workers_are_other_processes_and_stay():
    first = {verdict.reward for verdict in ask(V.process, ["a"] * 200)}
    again = {verdict.reward for verdict in ask(V.process, ["a"] * 200)}
    assert os.getpid() not in first
    assert len(again) <= len(os.sched_getaffinity(0))
    assert first & again


def test_trouble_costs_one_answer():
    began = time.monotonic()
    verdicts = ask(V.troubled, ["", "hang", "raise", "print", "spin", "die", "nan", "none", "text", ""])
    assert time.monotonic() - began < 30  # two limits of a second, and the start of processes
    fine = Verdict(2.5)
    assert verdicts[:5] == [
        fine, Verdict(0.0, TIMEOUT), Verdict(0.0, "KeyError: 'no such thing'"), fine, Verdict(0.0, TIMEOUT),
    ]  # fmt: skip
    assert verdicts[5] == Verdict(0.0, "the worker died")
    assert [v.error.partition(":")[0] for v in verdicts[6:9]] == ["ValueError", "TypeError", "ValueError"]
    assert verdicts[9] == fine


@pytest.mark.slow
def test_math_verify_hangs_past_its_own_limit_and_is_killed():
    """7^(9999 * 9999) has 84 million digits; sympy tries to write them."""
    pytest.importorskip("math_verify")
    task = dataclasses.replace(TASK, verify=MathVerifier(), time_limit=2.0)
    began = time.monotonic()
    verdicts = judged(task, [("", text, "x + 1", {}) for text in (r"\boxed{7^{9999 \cdot 9999}}", r"\boxed{1 + x}")])
    assert time.monotonic() - began < 60
    assert verdicts == [Verdict(0.0, TIMEOUT), Verdict(1.0)]


def test_a_future_does_not_wait():
    task = dataclasses.replace(TASK, verify=V.troubled)
    began = time.monotonic()
    future = submit(task, [("", "hang", "", {})])
    assert time.monotonic() - began < 0.5
    assert future.result() == [Verdict(0.0, TIMEOUT)]


def test_a_verifier_that_cannot_be_used_is_an_error_at_once():
    with pytest.raises(ValueError, match=r"task 'sort' is isolated, but its verify cannot be sent to a process"):
        ask(lambda *given: 1.0, ["a"])
    with pytest.raises(ValueError, match=r"cannot be loaded in a worker \(ImportError: something is not installed\)"):
        ask(V.Unloadable(), ["a"])


def test_a_quick_rule_runs_here_and_may_raise():
    here = [("", answer, "", {}) for answer in ("", "raise", "nan")]
    verdicts = judged(dataclasses.replace(TASK, verify=V.troubled, isolated=False), here)
    assert [v.reward for v in verdicts] == [2.5, 0.0, 0.0]
    assert [bool(v.error) for v in verdicts] == [False, True, True]
    assert judged(dataclasses.replace(TASK, verify=V.process, isolated=False), here[:1]) == [
        Verdict(float(os.getpid()))
    ]


def test_workers_end_with_their_program(tmp_path):
    """Also when it ends while one hangs, and without a warning."""
    script = (
        "import dataclasses\n"
        "from jaxrl_llm import tasks\n"
        "from jaxrl_llm.tasks.verifiers import submit\n"
        "from tests.tasks import verifiers_for_tests as V\n"
        "task = dataclasses.replace(tasks.make('sort'), verify=V.troubled, isolated=True, time_limit=1.0)\n"
        "submit(task, [('', 'print', '', {})]).result()\n"
        "submit(task, [('', 'hang', '', {})])\n"
    )
    mark = {"STARTED_BY": str(tmp_path)}  # other tests have workers too
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | mark,
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == "a verifier may print\n"
    left = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            left += [process] * (mark.items() <= process.environ().items())
    assert left == []
