"""A server that scores tokens as vLLM 0.32's `vllm serve` says them, with faults on request."""

import contextlib
import json
import math
import time
from types import SimpleNamespace

from tests.reference.fake_server import Handler, served


def _completion(logprobs, tokens):
    entries = [{str(t): {"logprob": x, "rank": 1, "decoded_token": "?"}} for t, x in zip(tokens, logprobs, strict=True)]
    return {"choices": [{"index": 0, "text": "?", "prompt_logprobs": [None, *entries[1:]]}]}


def _changed(change):
    """A fault that changes the entries of an answer in place."""
    return lambda said: change(said["choices"][0]["prompt_logprobs"])


def _put(value):
    return _changed(lambda given: next(iter(given[-1].values())).update(logprob=value))


# name: (an HTTP status, seconds of waiting, or a change of the answer; the words that name it)
FAULTS = {
    "worker failed": (500, "/v1/completions says 500: .*worker failed"),
    "out of time": (1.4, r"gave no answer within 0.9 s"),
    "short": (_changed(list.pop), "prompt_logprobs has .* entries, and not a list of"),
    "NaN": (_put(math.nan), "prompt_logprobs holds nan, and not numbers from -9999 to 0.0001"),
    "None": (_put(None), "prompt_logprobs holds None, and not numbers"),
    "positive": (_put(0.5), "prompt_logprobs holds 0.5, and not numbers"),
    "a text": (_put("-1.0"), "prompt_logprobs holds '-1.0', and not numbers"),
    "no number": (_changed(lambda given: given[-1].popitem()[1].clear()), "prompt_logprobs holds {}, and not the"),
    "another token": (_changed(lambda given: given.__setitem__(-1, {"99": {}})), "and not the log-prob of token"),
    "none at all": (lambda said: said["choices"][0].update(prompt_logprobs=None), "prompt_logprobs holds None"),
}


class _Scorer(Handler):
    fake = SimpleNamespace()

    def do_GET(self):
        held = {"data": [{"id": self.fake.name, "max_model_len": self.fake.holds}]}
        self.say(200, held if self.path == "/v1/models" else {})

    def do_POST(self):
        fake, body = self.fake, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        fake.asked.append(body)
        if self.path == "/tokenize":
            return self.say(200, {"tokens": fake.encode(body["prompt"])})
        if max(body["prompt"]) >= fake.vocabulary:
            return self.say(400, {"error": {"message": f"Token id {max(body['prompt'])} is out of vocabulary"}})
        said = _completion(fake.logprobs(body["prompt"]), body["prompt"])
        fault = fake.faults.pop(0) if fake.faults else None
        if isinstance(fault, int):
            return self.say(fault, {"error": "worker failed"})
        if isinstance(fault, float):
            time.sleep(fault)
        elif fault is not None:
            fault(said)
        with contextlib.suppress(OSError):  # a client that waits no longer
            self.say(200, said)


@contextlib.contextmanager
def scorer(logprobs, **changes):
    """A server with its `address` and what it was `asked`.

    Args:
      logprobs: of the given tokens, the first of which is not read.
      faults: of the next scores, in turn. name, holds, vocabulary: of its model. encode: its tokenizer.
    """
    fake = SimpleNamespace(logprobs=logprobs, faults=[], asked=[], name="teacher", holds=64, vocabulary=99)
    vars(fake).update({"encode": lambda text: []} | changes)
    with served(type("Scorer", (_Scorer,), {"fake": fake})) as address:
        fake.address = address
        yield fake
