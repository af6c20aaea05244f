"""A frozen teacher behind a vLLM server, which is sent the answers' token ids and says their log-probs."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl_llm.ground import processes, sharding
from jaxrl_llm.rollout.bounded_http import Fault
from jaxrl_llm.rollout.rollout import Rollout
from jaxrl_llm.rollout.scoring_server import ScoringServer, served_model, told_of
from jaxrl_llm.rollout.spread import ask_all
from jaxrl_llm.run.settings import Settings
from jaxrl_llm.run.teacher import other_ids
from jaxrl_llm.training.layout import Layout
from jaxrl_llm.training.step import Learner

_BACK_S = 300.0  # until a server that lost an answer is back
_TEXT = 'Ids 0123456789 of a text, {"x": [-1.5]}\n\tdéjà vu, 東京.'


@dataclasses.dataclass(frozen=True)
class ServedTeacher:
    """The model of a server at http://host:port; its log-probs are of the whole vocabulary at temperature 1."""

    settings: Settings
    path: str
    identity: str  # what the server calls its model
    parts: tuple[Any, ...] = ()  # no model on this machine
    params: Any = None
    shapes: Any = None
    place: str = "a model on a server"

    @classmethod
    def find(cls, s: Settings, mesh: Any = None, path: str = "") -> "ServedTeacher":
        """The teacher at this address, which has scored the first and the last token of the policy's vocabulary.

        Raises:
          ValueError: it does not answer, has other token ids, or holds no whole answer.
        """
        path, own, most = path or s.teacher.path, s.task.tokenizer, s.task.row_length(s.answer_length) + 1
        (name, holds), server = served_model(path), ScoringServer(path)
        if holds < most:
            raise ValueError(
                f"teacher.path={path} holds at most {holds} tokens, and an answer of this run with its prompt and the "
                f"token that a server adds takes {most}; start it with --max-model-len {most}"
            )
        with told_of(path):
            server.score(name, (0, own.vocab_size - 1), s.rollout.deadline_s)
            # A tokenizer of single characters has no counterpart at a server.
            if hasattr(own, "backend") and server.encode(name, _TEXT) != own.encode(_TEXT):
                raise other_ids(path, "text", own)
        return cls(s, path, name)

    def load(self) -> "ServedTeacher":
        return self

    def scored(self, learner: Learner, rollout: Rollout, layouts: Sequence[Layout], *drawn: Any) -> Rollout:
        """The rollout with the server's log-probs of the tokens that are learnt; each process asks for its own rows.

        Raises:
          ValueError: the server is lost, serves another model, or failed too often for one answer.
        """
        tokens, mask = processes.fetch((rollout.tokens, rollout.loss_mask))
        rows = processes.share(len(tokens))
        asked = {i: tokens[i, : np.flatnonzero(mask[i])[-1] + 1].tolist() for i in rows if mask[i].any()}
        found, failed = np.zeros((len(rows), tokens.shape[1]), np.float32), ""
        server, at_once = ScoringServer(self.path), self.settings.rollout.slots or self.settings.rows

        def ask(server: ScoringServer, row: list[int]) -> np.ndarray:
            return server.score(self.identity, row, self.settings.rollout.deadline_s)

        try:
            self._recover(server)
            scores = ask_all(list(asked.values()), [server], at_once, ask, self._recover)
            for i, one in zip(asked, scores, strict=True):
                found[i - rows.start, : len(one)] = one
        except (Fault, ValueError) as error:
            failed = f"teacher.path={self.path}: {error}"
        for fault in filter(None, processes.gather([failed])):
            raise ValueError(fault)
        whole = np.where(mask, processes.gather_rows(found, len(tokens)), 0)
        return rollout.replace(teacher_logprobs=sharding.put_rows(whole, learner.model.mesh))

    def _recover(self, server: ScoringServer) -> None:
        """Wait until the server is there; raises `Fault` if it is not, ValueError if it serves another model."""
        server.wait(_BACK_S)
        if (name := server.served()[0]) != self.identity:
            raise ValueError(f"it serves {name} now, and this run began with {self.identity}; serve that again")
