"""A fake vLLM server that computes: it loads the weights that it is given, and answers greedily or by its seeds."""

import contextlib
import functools
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import models
from jaxrl_llm.models import Model
from tests.reference.fake_vllm import as_base64, fake_vllm


@functools.partial(jax.jit, static_argnums=0)
def _forward(model: Model, params: Any, tokens: Any) -> Any:
    """Log-probs of every next token at temperature 1 [t v], and experts [t l k], of one row."""
    out = model.apply(params, tokens[None])
    experts = None if out.routing is None else jnp.moveaxis(out.routing.experts[:, 0], 0, 1)
    return jax.nn.log_softmax(model.logits(params, out.hidden[0])), experts


class _Computed:
    """Answers by question, as `fake_vllm` reads them; `asked` are the prompts of training, in their order."""

    def __init__(self, model: Model, length: int, drawn: bool):
        self.model, self.length, self.asked, self.loaded = model, length, list[list[int]](), ("", None)
        self.drawn, self.first = drawn, dict[str, Any]()
        self.fake: Any = None

    def params(self) -> Any:
        if self.loaded[0] != self.fake.folders[-1]:
            self.loaded = self.fake.folders[-1], models.load_params(Path(self.fake.folders[-1]), self.model)
        return self.loaded[1]

    def __getitem__(self, question: str) -> Any:
        prompt, sampling = json.loads(question)
        with self.fake.computing:
            ids, said, label, params = [*prompt], list[Any](), self.fake.label, self.params()
            chance = np.random.default_rng(sampling["seed"]) if self.drawn else None
            self.first = self.first or params
            while len(said) < sampling["max_tokens"] and not (said and ids[-1] in sampling["stop_token_ids"]):
                row = jnp.asarray(ids + [0] * (self.length - len(ids)))
                logprobs, experts = jax.device_get(_forward(self.model, params, row))
                scores = logprobs[len(ids) - 1]
                if chance is not None:
                    own = jax.device_get(_forward(self.model, self.first, row)[0])[len(ids) - 1]
                    scores = own + chance.gumbel(size=len(own))
                token = int(np.argmax(scores))
                said.append({"token_id": token, "logprob": float(logprobs[len(ids) - 1, token])})
                ids.append(token)
            forced = None
            if "prompt_logprobs" in sampling:
                pairs = zip(logprobs, prompt[1:], strict=False)
                forced = [None, *({str(token): {"logprob": float(row[token])}} for row, token in pairs)]
            else:
                self.asked.append(prompt)
        given = None if experts is None else as_base64(experts[: len(ids) - 1])
        choice = {"token_ids": ids[len(prompt) :], "logprobs": {"content": said}, "routed_experts": given}
        return {"choices": [choice], "prompt_logprobs": forced, "label": label}


@contextlib.contextmanager
def computing_vllm(model: Model, length: int, drawn: bool = False, **changes: Any) -> Iterator[Any]:
    """A `fake_vllm` of a model, whose rows have at most so many tokens; `asked` holds the prompts of training.

    drawn: an answer follows from its prompt and its seed, drawn from the first weights; log-probs are of the present.
    """
    answers = _Computed(model, length, drawn)
    sizes = {name: getattr(model.config, name) for name in ("vocab_size", "hidden_size", "num_hidden_layers")}
    with fake_vllm(answers=answers, model=sizes | {"max_model_len": length}, **changes) as fake:
        fake.computing, answers.fake, fake.asked = threading.Lock(), fake, answers.asked
        yield fake
