"""A server that replays what a real vLLM server said (tests/golden/vllm_answers.json), with faults on request."""

import asyncio
import base64
import contextlib
import io
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.rollout.served.vllm_guard import Guard
from tests.reference.vllm_answers import FILE, MODEL, question


class _Handler(BaseHTTPRequestHandler):
    server: Any
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.say({"weight_version": self.server.fake.label} if self.path == "/weight_info" else {})

    def do_PUT(self) -> None:
        """The server's own door takes the weights."""
        length = int(self.headers["Content-Length"])
        headers = [(name.lower().encode(), value.encode()) for name, value in self.headers.items()]
        scope = {"type": "http", "method": "PUT", "path": self.path, "headers": headers}
        status, body = through(Guard(_no_vllm), scope, self.rfile.read(length))
        self.server.fake.sent.append(self.path)
        self.say(json.loads(body), status)

    def do_POST(self) -> None:
        fake, path = self.server.fake, self.path.partition("?")[0]
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        if path == "/collective_rpc" and body["method"] == "describe_model":
            return self.say({"results": [fake.model]})
        if path == "/collective_rpc" and body["method"] == "replace_weights":
            fake.folders += body["args"]
        if path == "/update_weight_version" and not fake.stuck:
            fake.label = body["new_version"]
        if path != "/inference/v1/generate":
            return self.say({})
        said, training = (
            json.loads(json.dumps(fake.answers[question(body)])),
            "prompt_logprobs" not in body["sampling_params"],
        )
        choice, label = said["choices"][0], said.pop("label", fake.label)
        with fake.lock:
            fake.served += training
            fake.shaken += not training
            fault = training and fake.faults.pop(0) if fake.faults and training else None
        if fault == "slow":
            time.sleep(1)
        if fault == "restart":
            fake.label = label = "default"
        if fault == 500:
            return self.say({"error": "worker failed"}, 500)
        choice["weight_versions"] = [{"version": label, "start": 0, "end": len(choice["token_ids"])}]
        if fake.raw:
            for one, logprob in zip(choice["logprobs"]["content"], said["raw"], strict=True):
                one["logprob"] = logprob
        if fake.off:
            for one in (said["prompt_logprobs"] or [])[1:]:
                for x in one.values():
                    x["logprob"] -= fake.off
        if not fake.routes:
            choice["routed_experts"] = None
        elif callable(fake.routes):
            choice["routed_experts"] = as_base64(fake.routes(as_array(choice["routed_experts"])))
        if isinstance(fault, Wrong):
            fault.change(said)
        if isinstance(fault, Spoken):
            self.close_connection = True
            with contextlib.suppress(OSError):  # it is not heard to the end
                for piece in fault.pieces(json.dumps(said).encode()):
                    self.wfile.write(piece)
            return
        self.say(said, cut=fault == "cut")

    def say(self, said: Any, status: int = 200, cut: bool = False) -> None:
        data = json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if cut else data)
        if cut:
            self.close_connection = True
            self.connection.shutdown(2)


class Wrong(NamedTuple):
    """A fault: an answer that is changed in place."""

    change: Callable[[Any], Any]


class Spoken(NamedTuple):
    """A fault: what goes over the wire in place of the answer, whose body is given."""

    pieces: Callable[[bytes], Iterable[bytes]]


def as_array(text: str) -> np.ndarray:
    return np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)


def as_base64(array: Any) -> str:
    file = io.BytesIO()
    np.save(file, np.asarray(array))
    return base64.b64encode(file.getvalue()).decode()


def through(app: Any, scope: Any, body: bytes) -> tuple[int, bytes]:
    """Status and body of an ASGI application's answer to a request in pieces of 1000 bytes."""
    pieces = [body[i : i + 1000] for i in range(0, max(len(body), 1), 1000)]
    come = [{"body": piece, "more_body": i + 1 < len(pieces)} for i, piece in enumerate(pieces)]
    said: list[Any] = []

    async def receive() -> Any:
        return come.pop(0) if come else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        said.append(message)

    asyncio.run(app(scope, receive, send))
    return said[0]["status"], b"".join(one["body"] for one in said[1:])


async def _no_vllm(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError(f"{scope['path']} reached vLLM")


@contextlib.contextmanager
def fake_vllm(**changes: Any) -> Iterator[Any]:
    """A fake server with its `address`; how many answers it was asked for, `served` of training and `shaken` of
    handshakes; the paths of files that were `sent`, and the `folders` whose weights it took.

    Args:
      faults: of the next answers of training, in turn: None, "slow" (by a second), "cut", 500,
        "restart" (it forgets its weights), `Wrong` or `Spoken`.
      off: what its log-probs of prompts lack. raw: its log-probs are of temperature 1. routes: whether it returns
        experts, or how they are changed. stuck: its weights keep their label. model: what it says of its model.
    """
    config = MODEL.config
    sizes = {name: getattr(config, name) for name in ("vocab_size", "hidden_size", "num_hidden_layers")}
    fake = SimpleNamespace(faults=[], served=0, shaken=0, sent=[], folders=[], label="default", lock=threading.Lock())
    vars(fake).update(off=0.0, raw=False, routes=True, stuck=False)
    fake.model = sizes | {"dtype": "float32", "max_model_len": 64} | changes.pop("model", {})
    fake.answers = json.loads(FILE.read_text())
    vars(fake).update(changes)
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads, server.fake = True, fake
    fake.address, fake.stop = f"http://127.0.0.1:{server.server_address[1]}", server.shutdown
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
