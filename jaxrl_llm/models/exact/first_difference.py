"""The first operation of a model that gives a token other bits in another arrangement of the batch."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.ground import sharding
from jaxrl_llm.ground.array_typing import Array
from jaxrl_llm.models.attention.kv_cache import LayerCache
from jaxrl_llm.models.attention.layer_views import of_layer, with_views
from jaxrl_llm.models.attention.rotary import rotation
from jaxrl_llm.models.exact.exact_block import parts_of_block
from jaxrl_llm.models.exact.exact_scores import exact_scores
from jaxrl_llm.models.kernels import Kernels, Seen

_ROWS = 3  # of tokens, of more than one block of columns


def first_difference(model: Any) -> str:
    """Return a sentence that names the operation and its layer.

    Each layer of fresh parameters gets the same states twice: in whole rows, as a trainer has them, and token by token
    with a cache, as a sampler does. All its parts are compared to the last bit.
    """
    config, how = model.config, model.kernels.exact
    params = dataclasses.replace(model, mesh=None).init(jax.random.key(0))
    length, done = how.columns + 2, dict.fromkeys(config.kinds, 0)
    tokens = jax.random.randint(jax.random.key(1), (_ROWS, length), 0, config.vocab_size)
    x = jnp.take(params["ends"]["embedding"], tokens, axis=0).astype(config.compute_dtype)
    for number, kind in enumerate(config.kinds):
        weights = jax.tree.map(lambda w, at=done[kind]: w[at], params[kind])
        done[kind] += 1
        (x, whole), stepwise = _whole(model, x, weights, number), _stepwise(model, x, weights, number)
        for name, part in whole.items():
            if share := _differ(part, stepwise[name]):
                return f"The first difference is in {name} of layer {number} (from 0): {share:.1%} of tokens."
    head, targets = model.head(params).astype(x.dtype), tokens.reshape(-1)
    states = x.reshape(len(targets), -1)
    scored = jax.jit(functools.partial(exact_scores, how, kept=None, temperature=1.0))
    alone = [scored(states[at : at + 1], head, targets[at : at + 1]) for at in range(len(targets))]
    together = scored(states, head, targets)
    if share := _differ(together, jax.tree.map(lambda *parts: jnp.concatenate(parts), *alone)):
        return f"The first difference is in the head and its log-softmax: {share:.1%} of tokens."
    return (
        "Whole rows and single tokens agree in every operation, so that another part of the run makes the difference."
    )


def _seen(model: Any, positions: Array, layer: Any) -> Seen:
    config, ones = model.config, jnp.ones_like(positions)
    turned = rotation(positions, config.rope)
    kernels = Kernels.of(config, None)
    seen = Seen(turned, jnp.ones((1, 1, 1), bool), ones, sharding.MICRO_BATCH, "padded", kernels, config.gate)
    if config.alike:
        return seen
    seen = with_views(config, seen, positions, None)
    return of_layer(seen, jnp.asarray(seen.views.of_layers)[layer])


@functools.partial(jax.jit, static_argnums=0)
def _whole(model: Any, x: Array, weights: Any, layer: Any) -> Any:
    """The output, and all parts with rows of tokens first."""
    positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
    y, _, _, parts = parts_of_block(model.config, _seen(model, positions, layer), x, weights, None, None)
    return y, parts


@functools.partial(jax.jit, static_argnums=0)
def _step(model: Any, x: Array, weights: Any, layer: Any, kv: Any, column: Array) -> Any:
    cache = LayerCache(keys=kv[0], values=kv[1], column=column, prefix=((), ()))
    return parts_of_block(model.config, _seen(model, column[:, None], layer), x, weights, cache, None)[1:]


def _stepwise(model: Any, x: Array, weights: Any, layer: int) -> dict[str, Any]:
    """All parts as `_whole` has them, of one token of each row at a time."""
    config, (rows, length, _) = model.config, x.shape
    empty = (jnp.zeros((rows, config.num_key_value_heads, length, config.head_dim), x.dtype),)
    kv, steps = (empty, empty), []
    for at in range(length):
        kv, _, parts = _step(model, x[:, at : at + 1], weights, layer, kv, jnp.full(rows, at, jnp.int32))
        steps.append(parts)
    return jax.tree.map(lambda *of: jnp.stack(of, axis=1).reshape(-1, *of[0].shape[1:]), *steps)


def _differ(a: Any, b: Any) -> float:
    """Return the share of tokens of which any bit differs."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    other = [np.any(np.reshape(np.asarray(x) != np.asarray(y), (len(x), -1)), axis=1) for x, y in pairs]
    return float(np.mean(np.any(other, axis=0)))
