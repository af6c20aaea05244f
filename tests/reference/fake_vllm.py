"""A server that replays what a real vLLM server said (tests/golden/vllm_answers.json), with faults on request."""

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

from tests.reference.vllm_answers import FILE, MODEL, question


class _Handler(BaseHTTPRequestHandler):
    server: Any
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.say({"weight_version": self.server.fake.label} if self.path == "/weight_info" else {})

    def do_POST(self) -> None:
        fake, path = self.server.fake, self.path.partition("?")[0]
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        if path == "/collective_rpc" and body["method"] == "describe_model":
            return self.say({"results": [fake.model]})
        if path == "/update_weight_version" and not fake.stuck:
            fake.label = body["new_version"]
        if path != "/inference/v1/generate":
            return self.say({})
        said, training = (
            json.loads(json.dumps(fake.answers[question(body)])),
            "prompt_logprobs" not in body["sampling_params"],
        )
        choice = said["choices"][0]
        with fake.lock:
            fake.served += training
            fault = training and fake.faults.pop(0) if fake.faults and training else None
        if fault == "slow":
            time.sleep(1)
        if fault == "short":
            choice["logprobs"]["content"].pop()
        if fault == "restart":
            fake.label = "default"
        if fault == 500:
            return self.say({"error": "worker failed"}, 500)
        choice["weight_versions"] = [{"version": fake.label, "start": 0, "end": len(choice["token_ids"])}]
        if fake.raw:
            for one, logprob in zip(choice["logprobs"]["content"], said["raw"], strict=True):
                one["logprob"] = logprob
        if fake.off:
            for one in (said["prompt_logprobs"] or [])[1:]:
                for x in one.values():
                    x["logprob"] -= fake.off
        if not fake.routes:
            choice["routed_experts"] = None
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


@contextlib.contextmanager
def fake_vllm(**changes: Any) -> Iterator[Any]:
    """A fake server with its `address` and `served`, the answers of training that were asked of it.

    Args:
      faults: of the next answers of training, in turn: None, "slow" (by a second), "cut", "short" (of a log-prob), 500,
        "restart" (it forgets its weights).
      off: what its log-probs of prompts lack. raw: its log-probs are of temperature 1. routes: whether it returns
        experts. stuck: its weights keep their label. model: what it says of its model.
    """
    config = MODEL.config
    sizes = {name: getattr(config, name) for name in ("vocab_size", "hidden_size", "num_hidden_layers")}
    fake = SimpleNamespace(faults=[], served=0, label="default", lock=threading.Lock())
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
