"""Tokens drawn in tiles, with the log-probs that a trainer computes for them."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Key as Keys

from jaxrl_llm.ground.array_typing import Array, Bool, Float, Integer
from jaxrl_llm.models import exact_logits, of_logits, on_rows
from jaxrl_llm.rollout.sampling import Sampling, draw


def draw_exactly(
    decoder: Any,
    hidden: Float[Array, "n d"],
    keys: Keys[Array, "n"],
    index: Integer[Array, "n"],
    greedy: Bool[Array, "n"] | None,
) -> tuple[Integer[Array, "n"], Float[Array, "n"], Integer[Array, "n m"] | None]:
    """`sampling.draw` from the states of a decoder, for each row the same whatever the other rows are."""
    sampling: Sampling = decoder.sampling
    model, divisor = decoder.model, decoder.model.config.logits_scaling
    how = model.kernels.exact

    def on_device(head: Array, *rows: Any) -> Any:
        weight = how.held(head, hidden.dtype)

        def of_tile(hidden: Array, words: Array, index: Array, greedy: Array | None) -> Any:
            logits = jax.lax.optimization_barrier(exact_logits(how, hidden, weight))
            tokens, logprobs, kept = draw(logits / divisor, jax.random.wrap_key_data(words), index, sampling, greedy)
            if sampling.greedy or (sampling.cuts and kept is None):
                return tokens, logprobs, kept
            at = jax.lax.optimization_barrier((logits / (sampling.temperature * divisor), tokens, kept))
            scored = of_logits(how, *at)[0]
            return tokens, scored if greedy is None else jnp.where(greedy, 0, scored), kept

        return how.in_tiles(of_tile, *rows)

    rows = hidden, jax.random.key_data(keys), index, greedy
    return on_rows(on_device, model.mesh, "rows", rows, model.head(decoder.params))
