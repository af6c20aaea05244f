"""python -m tests.reference.vllm_answers ENVIRONMENT: what a real vLLM server said to the questions of the quick tests.

It starts the server that `make vllm` installs, asks what tests/rollout/test_remote.py asks, and writes
tests/golden/vllm_answers.json, which `tests.reference.fake_vllm` replays.
"""

import functools
import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_llm.models import Model, ModelConfig
from jaxrl_llm.rollout.answer_fields import Question
from jaxrl_llm.rollout.remote import RemoteEngine
from jaxrl_llm.rollout.sampling import Sampling
from jaxrl_llm.rollout.server import Server
from jaxrl_llm.rollout.serving import Serving

FILE = Path(__file__).parents[1] / "golden" / "vllm_answers.json"
MODEL = Model(
    ModelConfig(
        vocab_size=13,
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
    )
)
PROMPTS = np.array([[3, 4, 5, 6, 7, 0], [12, 2, 9, 8, 11, 4], [2, 3, 0, 0, 0, 0]], np.int32)
LENGTHS = np.array([5, 6, 2], np.int32)
UIDS = np.array([7, 8, 9], np.uint32)


@functools.cache
def params(seed: int = 0) -> Any:
    return MODEL.init(jax.random.key(seed))


def engine(*servers: str, **changes: Any) -> RemoteEngine:
    """Two answers of at most five tokens to every prompt, at temperature 0.7."""
    own: dict[str, Any] = dict(sampling=Sampling(0.7), group_size=2, prompt_length=6, max_new_tokens=5, end_ids=(1,))
    return RemoteEngine(**{"model": MODEL, "servers": servers, "deadline_s": 5.0, "at_once": 4, **own, **changes})


def generate(engine: RemoteEngine, version: int = 0) -> Any:
    held, moved = engine.take_weights(params(), version)
    return engine.generate(held, PROMPTS, LENGTHS, UIDS, jax.random.key(0)), moved


def question(body: Any) -> str:
    """What tells questions apart."""
    return json.dumps([body["token_ids"], body["sampling_params"]], sort_keys=True)


def _kept(said: Any) -> Any:
    choice = {name: said["choices"][0][name] for name in ("token_ids", "routed_experts", "weight_versions", "logprobs")}
    for one in choice["logprobs"]["content"]:
        del one["top_logprobs"], one["rank"]
    forced = said["prompt_logprobs"]
    plain = forced and [one and {token: {"logprob": x["logprob"]} for token, x in one.items()} for one in forced]
    return {"choices": [choice], "prompt_logprobs": plain}


def main(environment: str) -> None:
    said: dict[str, Any] = {}
    asked: list[tuple[list[int], Any]] = []
    call = Server._call

    def listen(self: Server, method: str, path: str, body: Any = None, *rest: Any, **named: Any) -> bytes:
        out = call(self, method, path, body, *rest, **named)
        if path.endswith("generate"):
            said[question(body)] = _kept(json.loads(out))
            asked.append((body["token_ids"], said[question(body)]))
        return out

    Server._call = listen
    remote = engine(launch=environment, deadline_s=300.0)
    vars(remote)["_serving"] = Serving(
        environment, remote.folder, token=remote._link[1], dtype="float32", max_length=32, at_once=4
    )
    try:
        print(generate(remote)[1])
        Server._call = call
        for prompt, answer in asked:  # what a server says that leaves the temperature out of its log-probs
            tokens = answer["choices"][0]["token_ids"]
            once = {"max_tokens": 1, "prompt_logprobs": 0, "stop_token_ids": []}
            asked = Question([*prompt, *tokens], once, MODEL.config.vocab_size, remote._labels, 0, None)
            answer["raw"] = remote._servers[0].ask(asked, 300.0).prompt_logprobs[-len(tokens) :].tolist()
    finally:
        remote.close()
    FILE.write_text(json.dumps(said, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
