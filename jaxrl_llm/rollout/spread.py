"""Many questions spread over several servers: each is answered once, whatever happens to a server meanwhile."""

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from absl import logging

from jaxrl_llm.rollout.bounded_http import Fault
from jaxrl_llm.rollout.server import Server

_TRIES = 4  # of a server until it answers; more than as many of every server for one answer are too many
Q, A, S = TypeVar("Q"), TypeVar("A"), TypeVar("S", bound=Server)


def ask_all(
    questions: Sequence[Q],
    servers: Sequence[S],
    at_once: int,
    ask: Callable[[S, Q], A],
    recover: Callable[[S], None],
) -> list[A]:
    """The answers, in the order of the questions; arguments and errors as of `Asking`."""
    asking, answers = Asking(servers, at_once, ask, recover), dict[int, A]()
    asking.put(dict(enumerate(questions)))
    while len(answers) < len(questions):
        answers |= asking.some()
    return [answers[i] for i in range(len(questions))]


class Asking:
    """Questions by number on their way to servers. A question whose server fails is asked again elsewhere, or there
    once `recover` has brought the server back.

    Args:
      at_once: questions that all servers together have before them.
      ask: raises `Fault` where a server fails.
      recover: returns when the server may be asked again; raises `Fault` where it is lost.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        at_once: int,
        ask: Callable[[Any, Any], Any],
        recover: Callable[[Any], None],
    ):
        self.ask, self.each, self.most = ask, max(1, -(-at_once // len(servers))), _TRIES * len(servers)
        self.working = {_Once(recover, server): 0 for server in servers}  # threads
        self.questions, self.answers = dict[int, Any](), dict[int, Any]()
        self.waiting, self.left, self.said = deque[int](), 0, list[str]()
        # Which server failed a question, brought back how often: threads of a dead one count as one.
        self.tries = defaultdict[int, set[tuple[_Once, int]]](set)
        self.stopped: Exception | None = None
        self.changed = threading.Condition()

    def put(self, questions: Mapping[int, Any]) -> None:
        """Ask these too. A number whose answer was taken may have another question."""
        with self.changed:
            self.questions.update(questions)
            self.waiting.extend(questions)
            self.left += len(questions)
            for i in questions:
                self.tries.pop(i, None)
            for server in self.working:
                for _ in range(min(self.each, self.left) - self.working[server]):
                    self.working[server] += 1
                    threading.Thread(target=self.work, args=(server,), daemon=True).start()
            self.changed.notify_all()

    def some(self) -> dict[int, Any]:
        """The answers that have come since the last call, at least one.

        Raises:
          ValueError: all servers are lost, or one question failed too often; with what the servers said. Or what `ask`
            and `recover` raise beside `Fault`.
        """
        with self.changed:
            self.changed.wait_for(lambda: self.answers or self.over())
            if self.stopped is None and not self.answers:
                self.stopped = ValueError(
                    f"{self.left} answers are left and no server for them: {'; '.join(self.said)}"
                )
            if self.stopped is not None:
                raise self.stopped
            answers, self.answers = self.answers, {}
            return answers

    def over(self) -> bool:
        return self.stopped is not None or not self.left or not any(self.working.values())

    def work(self, server: "_Once") -> None:
        """Ask one server until nothing is left to do; waits while others may still give their questions back."""
        try:
            while True:
                began = server.times_if_there()
                with self.changed:
                    self.changed.wait_for(lambda: self.waiting or self.over())
                    if self.over():
                        return self.leave(server)
                    i = self.waiting.popleft()
                try:
                    answer = self.ask(server.server, self.questions[i])
                except Fault as fault:
                    self.give_back(i, fault, (server, began))
                    server.since(began, fault)
                else:
                    server.failed = 0
                    with self.changed:
                        self.answers[i] = answer
                        self.left -= 1
                        self.changed.notify_all()
        except Fault as fault:  # the server is lost, and the others go on
            with self.changed:
                if str(fault) not in self.said:
                    self.said.append(str(fault))
                self.leave(server)
        except Exception as error:
            with self.changed:
                self.stopped = self.stopped or error
                self.leave(server)

    def leave(self, server: "_Once") -> None:
        """Count a thread out, under the same lock as what it has found."""
        self.working[server] -= 1
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

    def __init__(self, recover: Callable[[Any], None], server: Server):
        self._recover, self.server, self._lock, self.times = recover, server, threading.Lock(), 0
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
                        self._recover(self.server)
                    except Fault as worse:
                        self._lost = worse
                self.times += 1
            if self._lost is not None:
                raise self._lost
