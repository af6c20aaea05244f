"""One answer at a time, streamed token by token as it is sampled, for a terminal.

The prompt is prefilled at one of a few widths (powers of two), then one compiled step feeds the last token and draws
the next one over a donated cache.
"""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.ground.array_typing import Key, Params
from jaxrl_llm.ground.ranges import in_range, within
from jaxrl_llm.models import Model, kv_cache
from jaxrl_llm.rollout.decoder import Answers, Decoder, Slots
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.sampling import Sampling, answer_keys
from jaxrl_llm.tasks import UNKNOWN, Tokenizer

_NARROWEST = 32  # tokens of a prompt's width


@dataclasses.dataclass(frozen=True)
class Streamer:
    """How an answer is sampled, in the model's own dtype; equal streamers share their compiled programs."""

    model: Model
    sampling: Sampling
    max_new_tokens: int
    end_ids: tuple[int, ...]  # an answer ends with the first of these tokens

    def __post_init__(self) -> None:
        in_range("max_new_tokens", self.max_new_tokens, least=1)
        within("max_new_tokens", self.max_new_tokens, 1, 2**30)  # positions are int32

    @functools.partial(jax.jit, static_argnums=0)
    def prepare(self, params: Params) -> dict[str, Any]:
        """The parameters of `Model.init` as `tokens` takes them, as `Model.unstack` cuts them, in the model's dtype."""
        return self.model.unstack(params, self.model.config.compute_dtype)

    def tokens(self, prepared: Params, prompt: Sequence[int], key: Key, uid: int = 0) -> Iterator[int]:
        """The tokens of the answer to `prompt` (ids), the one that ends it included: as `Engine.generate` samples it
        with this key and this uid.

        Raises:
          ValueError: the prompt is empty.
        """
        if not prompt:
            raise ValueError("the prompt has no token, and the answer needs something to continue; give some text")
        width = max(_NARROWEST, 1 << (len(prompt) - 1).bit_length())
        row = np.pad(np.asarray(prompt, np.int32), (0, width - len(prompt)))[None]
        model, most = self.model, self.max_new_tokens
        engine = Engine(model, self.sampling, 1, most, self.end_ids, dtype=model.config.dtype, record_routing=False)
        keys, limits = answer_keys(key, jnp.array([uid], jnp.uint32), 1), jnp.full(1, most, jnp.int32)
        decoder = engine.decoder(prepared, jnp.asarray(row), jnp.array([len(prompt)]), keys, limits)
        answers, slots = _first(decoder)
        while True:
            token, answer = jax.device_get((slots.tokens[0], slots.answer[0]))
            yield int(token)
            if answer > 0:  # the slot is free: the answer ended
                return
            answers, slots = _next(decoder, answers, slots)


@jax.jit
def _first(decoder: Decoder) -> tuple[Answers, Slots]:
    zero, width = jnp.zeros(1, jnp.int32), decoder.prompts.shape[1]
    prompts, _ = decoder.prefill(zero[0], 1)
    answers, answer, tokens = decoder.draw(decoder.no_answers(), zero, zero, prompts.hidden)
    # The last token of an answer is never fed.
    cache = decoder.model.empty_cache(1, width + decoder.max_new_tokens - 1)
    cache = kv_cache.copy_rows(cache, zero, prompts.cache, zero, width, decoder.model.cache_layout)
    return answers, Slots(answer, tokens, zero, decoder.lengths, cache)


_next = jax.jit(Decoder.step, donate_argnames=("answers", "slots"))


def as_text(tokens: Iterable[int], tokenizer: Tokenizer) -> Iterator[str]:
    """The text of an answer in pieces, each yielded as soon as its characters are complete.

    A character whose bytes have not all come is held back; if they never come, U+FFFD ends the text, as in `decode`.
    """
    ids: list[int] = []
    shown = 0
    for token in tokens:
        ids.append(token)
        whole = tokenizer.decode(ids).rstrip(UNKNOWN)
        if len(whole) > shown:
            yield whole[shown:]
            shown = len(whole)
    if rest := tokenizer.decode(ids)[shown:]:
        yield rest
