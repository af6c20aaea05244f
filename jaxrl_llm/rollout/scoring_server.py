"""A server of vLLM as its own command `vllm serve` starts it, which scores given tokens: a teacher elsewhere."""

import contextlib
import os
from collections.abc import Iterator, Sequence

import numpy as np

from jaxrl_llm.rollout import answer_fields
from jaxrl_llm.rollout.bounded_http import CONNECT_S, Fault
from jaxrl_llm.rollout.server import Server
from jaxrl_llm.rollout.serving import TOKEN


class ScoringServer(Server):
    """A server whose weights are its own. Every method raises `Fault`."""

    def __init__(self, address: str):
        super().__init__(address, os.environ.get(TOKEN, ""))

    def served(self) -> tuple[str, int]:
        """The name of its model, and the most tokens that it holds."""
        return self._read(self._call("GET", "/v1/models"), answer_fields.read_served)

    def encode(self, model: str, text: str) -> list[int]:
        """The token ids of a text, without any that its tokenizer puts around it."""
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        return self._read(self._call("POST", "/tokenize", body, CONNECT_S), answer_fields.read_ids)

    def score(self, model: str, tokens: Sequence[int], timeout: float) -> np.ndarray:
        """log p(token_t | tokens_<t) at temperature 1, float32[t], 0 of the first; it samples one token more."""
        body = {"model": model, "prompt": list(tokens), "max_tokens": 1, "prompt_logprobs": 0}
        bound = answer_fields.most_bytes(len(tokens) + 1)
        data = self._call("POST", "/v1/completions", body, timeout, most_bytes=bound)
        return self._read(data, lambda data: answer_fields.read_scores(data, tokens))


@contextlib.contextmanager
def told_of(path: str) -> Iterator[None]:
    """A server's `Fault` as a ValueError that names the field."""
    try:
        yield
    except Fault as fault:
        raise ValueError(f"teacher.path={path}: {fault}") from fault


def served_model(path: str) -> tuple[str, int]:
    """`ScoringServer.served` of an address.

    Raises:
      ValueError: it does not answer, or not as it should.
    """
    with told_of(path):
        return ScoringServer(path).served()
