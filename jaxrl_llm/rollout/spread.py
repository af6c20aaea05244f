"""Many questions spread over several servers: each is answered once, whatever happens to a server meanwhile."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from absl import logging

from jaxrl_llm.rollout.server import Answer, Fault, Server

_TRIES = 4  # of a server until it answers; more than as many of every server for one answer are too many
Q = TypeVar("Q")


def ask_all(
    questions: Sequence[Q],
    servers: Sequence[Server],
    at_once: int,
    ask: Callable[[Server, Q], Answer],
    recover: Callable[[Server], None],
) -> list[Answer]:
    """The answers, in the order of the questions. A question whose server fails is asked again elsewhere, or there
    once `recover` has brought the server back.

    Args:
      at_once: questions that all servers together have before them.
      ask: raises `Fault` where a server fails.
      recover: returns when the server may be asked again; raises `Fault` where it is lost.

    Raises:
      ValueError: all servers are lost, or one question failed too often; with what the servers said. Or what `ask` and
        `recover` raise beside `Fault`.
    """
    return _Asking(questions, ask, recover).run(servers, max(1, -(-at_once // len(servers))))


class _Asking:
    def __init__(self, questions: Sequence[Any], ask: Callable[..., Answer], recover: Callable[[Server], None]):
        self.questions, self.ask, self.recover = questions, ask, recover
        self.waiting, self.answers = deque(range(len(questions))), dict[int, Answer]()
        # Which server failed a question, brought back how often: threads of a dead one count as one.
        self.tries = [set[tuple[_Once, int]]() for _ in questions]
        self.most, self.working, self.said = 0, 0, list[str]()
        self.stopped: Exception | None = None
        self.changed = threading.Condition()

    def run(self, servers: Sequence[Server], each: int) -> list[Answer]:
        self.most = _TRIES * len(servers)
        for server in servers:
            recovering = _Once(self.recover, server)
            for _ in range(min(each, len(self.questions))):
                self.working += 1
                threading.Thread(target=self.work, args=(server, recovering), daemon=True).start()
        with self.changed:
            self.changed.wait_for(self.over)
            if self.stopped is None and len(self.answers) < len(self.questions):
                left = len(self.questions) - len(self.answers)
                self.stopped = ValueError(f"{left} answers are left and no server for them: {'; '.join(self.said)}")
            if self.stopped is not None:
                raise self.stopped
            return [self.answers[i] for i in range(len(self.questions))]

    def over(self) -> bool:
        return self.stopped is not None or len(self.answers) == len(self.questions) or not self.working

    def next(self) -> int | None:
        """The next question; waits while others may still give theirs back. None: there is nothing left to do."""
        with self.changed:
            self.changed.wait_for(lambda: self.waiting or self.over())
            return None if self.over() else self.waiting.popleft()

    def work(self, server: Server, recovering: "_Once") -> None:
        try:
            while True:
                began = recovering.times_if_there()
                if (i := self.next()) is None:
                    return
                try:
                    answer = self.ask(server, self.questions[i])
                except Fault as fault:
                    self.give_back(i, fault, (recovering, began))
                    recovering.since(began, fault)
                else:
                    recovering.failed = 0
                    with self.changed:
                        self.answers.setdefault(i, answer)
                        self.changed.notify_all()
        except Fault as fault:  # the server is lost, and the others go on
            with self.changed:
                if str(fault) not in self.said:
                    self.said.append(str(fault))
        except Exception as error:
            with self.changed:
                self.stopped = self.stopped or error
        finally:
            with self.changed:
                self.working -= 1
                self.changed.notify_all()

    def give_back(self, i: int, fault: Fault, tried: tuple["_Once", int]) -> None:
        with self.changed:
            self.tries[i].add(tried)
            if len(self.tries[i]) > self.most:
                self.stopped = ValueError(f"an answer failed {self.most + 1} times, at last because {fault}")
            if str(fault) not in self.said:
                self.said.append(str(fault))
                logging.warning("%s; its answers are asked again", fault)
            self.waiting.appendleft(i)
            self.changed.notify_all()


class _Once:
    """Brings a server back once for all threads that found it wanting."""

    def __init__(self, recover: Callable[[Server], None], server: Server):
        self._recover, self._server, self._lock, self.times = recover, server, threading.Lock(), 0
        self._lost: Fault | None = None
        self.failed = 0  # times that it was brought back since it last answered

    def times_if_there(self) -> int:
        """How often the server was brought back; raises the fault of one that is lost."""
        with self._lock:
            if self._lost is not None:
                raise self._lost
            return self.times

    def since(self, times: int, fault: Fault) -> None:
        """Unless it was brought back since that many times; raises the fault of a server that is lost: it cannot be
        brought back, or that has not helped."""
        with self._lock:
            if self._lost is None and times == self.times:
                self.failed += 1
                if self.failed == _TRIES:
                    self._lost = fault
                else:
                    try:
                        self._recover(self._server)
                    except Fault as worse:
                        self._lost = worse
                self.times += 1
            if self._lost is not None:
                raise self._lost
