"""Decoding with a slot for every answer: all start at once, and the answers of a group share their prompt.

The keys and values of a prompt are stored and read once per group, before those of the answers (`kv_cache.Prefix`).
"""

import jax
import jax.numpy as jnp

from jaxrl_llm.ground import sharding
from jaxrl_llm.ground.array_typing import Array
from jaxrl_llm.models import Model, Prefix, Routing, kv_cache
from jaxrl_llm.rollout.decoder import Answers, Decoder, Slots

__all__ = ["decode_together", "groups_share_prompts"]


def groups_share_prompts(model: Model, prompts: int) -> bool:
    """On a mesh only where a group and its prompt fall on the same devices."""
    shards = sharding.row_shards(model.mesh)
    return prompts % shards == 0 or shards % prompts == 0


def decode_together(decoder: Decoder) -> tuple[Answers, Routing | None]:
    """Every answer to its end, and the routing of the prompts [l p tp k]."""
    count = len(decoder.limits)
    prompts, routing = decoder.prefill(jnp.zeros((), jnp.int32), len(decoder.lengths))
    prefix = Prefix(prompts.cache.keys, prompts.cache.values, decoder.lengths)
    answer, index = jnp.arange(count), jnp.zeros(count, jnp.int32)
    prompt = answer // decoder.group
    answers, answer, tokens = decoder.draw(decoder.no_answers(), answer, index, prompts.hidden[prompt])
    # The last token of an answer is never fed, so n - 1 columns hold the others.
    cache = kv_cache.empty(decoder.model.config, count, decoder.max_new_tokens - 1)
    slots = decoder.pin(Slots(answer, tokens, index, decoder.lengths[prompt], cache))

    def unfinished(carry: tuple[Answers, Slots]) -> Array:
        return jnp.any(decoder.active(carry[1]))

    def step(carry: tuple[Answers, Slots]) -> tuple[Answers, Slots]:
        return decoder.step(*carry, prefix)

    return jax.lax.while_loop(unfinished, step, (answers, slots))[0], routing
