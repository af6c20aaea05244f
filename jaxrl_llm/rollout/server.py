"""One vLLM server over HTTP: its weights are replaced, and it answers with tokens, log-probs and experts."""

import base64
import dataclasses
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import urllib3

_CONNECT_S = 5.0


class Fault(Exception):
    """A server did not answer, or not as it should; another one, or the same later, may. The message names it."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a server says to one question: n tokens of an answer to a prompt of p."""

    tokens: Sequence[int]
    logprobs: Sequence[float]  # of the tokens, under the distribution they were drawn from
    versions: Sequence[str]  # of the weights that sampled each token
    experts: np.ndarray | None  # [p + n - 1, layers, k] of every token that was fed; None: the server does not say
    prompt_logprobs: Sequence[float]  # of the prompt's tokens but the first, at temperature 1; empty if not asked for


class Server:
    """A server at an address, http://host:port. Every method raises `Fault`, and `ValueError` for what it refuses."""

    def __init__(self, address: str):
        self.address = address.rstrip("/")
        self._pool = urllib3.PoolManager(maxsize=1024, retries=False)  # as many as are asked at once

    def healthy(self) -> bool:
        try:
            self._call("GET", "/health", timeout=_CONNECT_S)
        except (Fault, ValueError):
            return False
        return True

    def model(self, timeout: float) -> Mapping[str, Any]:
        """The sizes of its model and its dtype."""
        said = self._call("POST", "/collective_rpc", {"method": "describe_model"}, timeout)
        try:
            return said["results"][0]
        except (KeyError, IndexError, TypeError) as error:
            raise Fault(f"{self.address} does not say what it serves: {str(said)[:200]}") from error

    def label(self) -> str:
        """Of its weights; empty where it does not answer."""
        try:
            return self._call("GET", "/weight_info").get("weight_version", "")
        except (Fault, ValueError):
            return ""

    def take_weights(self, folder: str, label: str, timeout: float) -> None:
        """Replace its weights by those of a folder that it sees, and call them `label`; running answers go on."""
        self._call("POST", "/pause?mode=keep", {}, timeout)
        self._call("POST", "/collective_rpc", {"method": "replace_weights", "args": [folder]}, timeout)
        self._call("POST", "/update_weight_version", {"new_version": label}, timeout)
        self._call("POST", "/resume", {}, timeout)

    def ask(self, prompt: Sequence[int], sampling: Mapping[str, Any], timeout: float) -> Answer:
        """The answer to one prompt (token ids)."""
        fixed = {"n": 1, "logprobs": 0, "ignore_eos": True, "detokenize": False}
        body = {"token_ids": list(prompt), "sampling_params": {**sampling, **fixed}}
        said = self._call("POST", "/inference/v1/generate", body, timeout)
        try:
            return _answer(said, list(prompt), sampling["max_tokens"])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise Fault(f"{self.address} gave an answer that cannot be read ({error!r}): {str(said)[:200]}") from error

    def _call(self, method: str, path: str, body: Any = None, timeout: float = _CONNECT_S) -> Any:
        limit = urllib3.Timeout(connect=_CONNECT_S, read=timeout)
        try:
            said = self._pool.request(method, self.address + path, json=body, timeout=limit)
        except urllib3.exceptions.ReadTimeoutError as error:
            raise Fault(f"{self.address} gave no answer within {timeout:g} s") from error
        except urllib3.exceptions.HTTPError as error:
            fault = f"{self.address} does not answer ({_cause(error)}); start it as docs/engines.md says"
            raise Fault(fault) from error
        text = said.data.decode(errors="replace")
        if said.status >= 400:
            kind = ValueError if said.status < 500 else Fault
            raise kind(f"{self.address}{path.partition('?')[0]} says {said.status}: {' '.join(text.split())[:300]}")
        try:
            return json.loads(text) if text else {}
        except json.JSONDecodeError as error:
            raise Fault(f"{self.address} gave an answer that is cut off: {text[-80:]!r}") from error


def _cause(error: urllib3.exceptions.HTTPError) -> str:
    """The system's own words, where there are any."""
    inner: Any = error.__cause__ or error.__context__ or (error.args[1] if len(error.args) > 1 else error)
    return getattr(inner, "strerror", None) or str(inner) or type(error).__name__


def _answer(said: Any, prompt: list[int], most: int) -> Answer:
    choice = said["choices"][0]
    tokens, scored = choice["token_ids"], choice["logprobs"]["content"]
    versions = [span["version"] for span in choice["weight_versions"] for _ in range(span["start"], span["end"])]
    if not 1 <= len(tokens) <= most or len(versions) != len(tokens) or [x["token_id"] for x in scored] != tokens:
        raise ValueError("tokens, log-probs and versions are not of the same length")
    experts = choice["routed_experts"]
    if experts is not None:
        fed = len(prompt) + len(tokens) - 1
        experts = np.load(io.BytesIO(base64.b64decode(experts)), allow_pickle=False)
        if len(experts) != fed:
            raise ValueError(f"experts of {len(experts)} tokens, and {fed} were fed")
    forced = said["prompt_logprobs"] or [None]
    if len(forced) > 1 and len(forced) != len(prompt):
        raise ValueError("log-probs of another number of tokens than the prompt has")
    pairs: Any = zip(prompt[1:], forced[1:], strict=False)
    scores = [one[str(token)]["logprob"] for token, one in pairs]
    return Answer(tokens, [x["logprob"] for x in scored], versions, experts, scores)
