"""The two loops over `Decoder.step`: a slot for every answer, or fewer slots, each of which is refilled.

With a slot for every answer all start at once, and the keys and values of a prompt are stored and read once per group,
before those of the answers (`kv_cache.Prefix`). Fewer slots are in `refilled_slots.py`.
"""

import jax
import jax.numpy as jnp

from jaxrl_llm.ground import sharding
from jaxrl_llm.ground.by_name import ByName
from jaxrl_llm.models import Prefix, Routing
from jaxrl_llm.rollout.decoder import Answers, Decoder, Slots

_FEWER_SLOTS = ByName({"Refilled": "jaxrl_llm.rollout.refilled_slots"})


def decode(decoder: Decoder, slots: int) -> tuple[Answers, Routing | None]:
    """Every answer to its end, in so many slots (0: one for each), and the routing of the prompts [l p tp k]."""
    count = min(slots, len(decoder.limits)) or len(decoder.limits)
    prompts, shards = len(decoder.lengths), sharding.shards("rows", decoder.model.mesh)
    # On a mesh, answers can read the prompt of their group if it is on the same devices. Exact attention reads a cache
    # that is one array, and a state goes on from that of the prompt.
    together = prompts % shards == 0 or shards % prompts == 0
    apart = decoder.model.kernels.exact or decoder.model.config.linear_num_value_heads
    if count == len(decoder.limits) and together and not apart:
        return _together(decoder)
    return _FEWER_SLOTS["Refilled"](decoder, count).decode()


def _together(decoder: Decoder) -> tuple[Answers, Routing | None]:
    count = len(decoder.limits)
    decoder.model.config.check_length(decoder.prompts.shape[1] + decoder.max_new_tokens)
    prompts, routing = decoder.prefill(jnp.zeros((), jnp.int32), len(decoder.lengths))
    prefix = Prefix(prompts.cache.keys, prompts.cache.values, decoder.lengths)
    answer, index = jnp.arange(count), jnp.zeros(count, jnp.int32)
    prompt = answer // decoder.group
    answers, answer, tokens = decoder.draw(decoder.no_answers(), answer, index, prompts.hidden[prompt])
    # The last token of an answer is never fed, so n - 1 columns hold the others.
    cache = decoder.model.empty_cache(count, decoder.max_new_tokens - 1)
    slots = decoder.pin(Slots(answer, tokens, index, decoder.lengths[prompt], cache))
    answers, _ = jax.lax.while_loop(
        lambda carry: jnp.any(decoder.active(carry[1])), lambda carry: decoder.step(*carry, prefix), (answers, slots)
    )
    return answers, routing
