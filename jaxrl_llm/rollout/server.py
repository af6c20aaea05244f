"""One vLLM server over HTTP: its weights are replaced, and it answers with tokens, log-probs and experts."""

import base64
import hashlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from jaxrl_llm.rollout import answer_fields
from jaxrl_llm.rollout.answer_fields import Answer, Question, Unreadable
from jaxrl_llm.rollout.bounded_http import CONNECT_S, Fault, request

_VERB_BYTES = 2**18  # of an answer that is not one to a question
T = TypeVar("T")


class Server:
    """A server at an address, http://host:port, that lets in who knows the token. Every method raises `Fault`."""

    def __init__(self, address: str, token: str = ""):
        self.address = address.rstrip("/")
        self.taking = threading.Lock()  # held while it takes weights
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def healthy(self) -> bool:
        try:
            self._call("GET", "/health")
        except Fault:
            return False
        return True

    def wait(self, seconds: float) -> None:
        """Until it answers, and no longer than this."""
        end = time.monotonic() + seconds
        while not self.healthy() and time.monotonic() < end:
            time.sleep(1)

    def model(self, timeout: float) -> dict[str, Any]:
        """The sizes of its model and its dtype."""
        data = self._call("POST", "/collective_rpc", {"method": "describe_model"}, timeout)
        return self._read(data, answer_fields.read_model)

    def label(self) -> str:
        """The label of the weights that the server holds; "" if it cannot be reached."""
        try:
            return self._text(self._call("GET", "/weight_info"), "weight_version")
        except Fault:
            return ""

    def send_weights(self, folder: Path, label: str, timeout: float) -> str:
        """Copy the files of a folder to the server's machine; the folder there, which `take_weights` is given."""
        there = ""
        for path in sorted(folder.iterdir()):
            with path.open("rb") as file:
                digest = base64.b64encode(hashlib.file_digest(file, "sha256").digest()).decode()
                file.seek(0)
                headers = {"Content-Length": str(path.stat().st_size), "Repr-Digest": f"sha-256=:{digest}:"}
                data = self._call("PUT", f"/weights/{label}/{path.name}", file, timeout, headers)
            there = self._text(data, "folder")
        return there

    def take_weights(self, folder: str, label: str, timeout: float) -> None:
        """Replace its weights by those of a folder that it sees, and call them `label`; running answers go on."""
        self._call("POST", "/pause?mode=keep", {}, timeout)
        self._call("POST", "/collective_rpc", {"method": "replace_weights", "args": [folder]}, timeout)
        self._call("POST", "/update_weight_version", {"new_version": label}, timeout)
        self._call("POST", "/resume", {}, timeout)

    def ask(self, question: Question, timeout: float) -> Answer:
        """The answer to one prompt, whose fields are what they may be."""
        fixed = {"n": 1, "logprobs": 0, "ignore_eos": True, "detokenize": False}
        body = {"token_ids": list(question.prompt), "sampling_params": {**question.sampling, **fixed}}
        data = self._call("POST", "/inference/v1/generate", body, timeout, most_bytes=question.most_bytes)
        return self._read(data, lambda data: answer_fields.read_answer(data, question))

    def _call(
        self,
        method: str,
        path: str,
        body: Any = None,
        timeout: float = CONNECT_S,
        headers: dict[str, str] | None = None,
        most_bytes: int = _VERB_BYTES,
    ) -> bytes:
        told = self._headers | (headers or {})
        return request(method, self.address + path, body, seconds=timeout, most_bytes=most_bytes, headers=told)

    def _text(self, data: bytes, name: str) -> str:
        return self._read(data, lambda data: answer_fields.read_text(data, name))

    def _read(self, data: bytes, read: Callable[[bytes], T]) -> T:
        try:
            return read(data)
        except Unreadable as error:
            raise Fault(f"{self.address} gave an answer that cannot be read: {error}") from error
