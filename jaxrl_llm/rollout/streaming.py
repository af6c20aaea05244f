"""One answer at a time, streamed token by token as it is sampled, for a terminal.

The prompt is prefilled at one of a few widths (powers of two), then one compiled step feeds the last token and draws
the next one over a donated cache. The answer is the same that `Engine` gives to a group of one.
"""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.ground.array_typing import Array, Key, Params
from jaxrl_llm.ground.ranges import at_least
from jaxrl_llm.models import Model, kv_cache
from jaxrl_llm.rollout.decoder import Answers, Decoder, Slots, in_dtype
from jaxrl_llm.rollout.sampling import Sampling, answer_keys
from jaxrl_llm.tasks import UNKNOWN, Tokenizer

__all__ = ["Streamer", "as_text"]

_NARROWEST = 32  # tokens of a prompt's width


@dataclasses.dataclass(frozen=True)
class Streamer:
    """How an answer is sampled; equal streamers share their compiled programs."""

    model: Model
    sampling: Sampling
    max_new_tokens: int
    end_ids: tuple[int, ...]  # an answer ends with the first of these tokens
    dtype: str = "float32"  # of weights, activations and cache

    def __post_init__(self) -> None:
        at_least("max_new_tokens", self.max_new_tokens, 1)

    @functools.partial(jax.jit, static_argnums=0)
    def prepare(self, params: Params) -> dict[str, Any]:
        """The parameters of `Model.init` as `tokens` takes them, layer by layer and in `dtype`."""
        return self.model.unstack(params, jnp.dtype(self.dtype))

    def tokens(self, prepared: Params, prompt: Sequence[int], key: Key, uid: int = 0) -> Iterator[int]:
        """The tokens of the answer to `prompt` (ids), the one that ends it included.

        Args:
          prepared: of `prepare`.
          key, uid: the answer is the one of `Engine.generate` with this key and this uid of the prompt.

        Raises:
          ValueError: the prompt is empty.
        """
        if not prompt:
            raise ValueError("the prompt has no token, and the answer needs something to continue; give some text")
        width = max(_NARROWEST, 1 << (len(prompt) - 1).bit_length())
        row = np.zeros((1, width), np.int32)
        row[0, : len(prompt)] = prompt
        inputs = (jnp.asarray(row), jnp.array([len(prompt)]), answer_keys(key, jnp.array([uid], jnp.uint32), 1))
        answers, slots = self._first(prepared, *inputs)
        while True:
            token, answer = jax.device_get((slots.tokens[0], slots.answer[0]))
            yield int(token)
            if answer > 0:  # the slot is free: the answer ended
                return
            answers, slots = self._next(prepared, *inputs, answers, slots)

    def _decoder(self, prepared: Params, prompt: Array, length: Array, keys: Any) -> Decoder:
        return Decoder(
            model=in_dtype(self.model, self.dtype),
            params=prepared,
            sampling=self.sampling,
            end_ids=self.end_ids,
            prompts=prompt,
            lengths=length,
            keys=keys,
            limits=jnp.full(1, self.max_new_tokens, jnp.int32),
            max_new_tokens=self.max_new_tokens,
            record_routing=False,
            record_router_logits=False,
        )

    @functools.partial(jax.jit, static_argnums=0)
    def _first(self, prepared: Params, prompt: Array, length: Array, keys: Any) -> tuple[Answers, Slots]:
        """Prefill the prompt and draw the first token."""
        decoder, zero = self._decoder(prepared, prompt, length, keys), jnp.zeros(1, jnp.int32)
        prompts, _ = decoder.prefill(zero[0], 1)
        answers, answer, tokens = decoder.draw(decoder.no_answers(), zero, zero, prompts.hidden)
        width = prompt.shape[1]
        # The last token of an answer is never fed.
        cache = kv_cache.empty(decoder.model.config, 1, width + self.max_new_tokens - 1)
        cache = kv_cache.copy_rows(cache, zero, prompts.cache, zero, width)
        return answers, Slots(answer, tokens, zero, length, cache)

    @functools.partial(jax.jit, static_argnums=0, donate_argnames=("answers", "slots"))
    def _next(
        self, prepared: Params, prompt: Array, length: Array, keys: Any, answers: Answers, slots: Slots
    ) -> tuple[Answers, Slots]:
        return self._decoder(prepared, prompt, length, keys).step(answers, slots)


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
