"""Layers that differ in what they see: a window of columns, rotary positions of their own. Loaded where a config has
them.

A view of each kind is computed once for all layers, and a layer takes its own by a number: a loop over layers that
alternate stays one loop.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.ground.array_typing import Array, Bool, Float, Integer
from jaxrl_llm.models.architecture import ModelConfig
from jaxrl_llm.models.attention.kv_cache import KVCache, Layout, starts
from jaxrl_llm.models.attention.layer_kinds import FULL, SLIDING
from jaxrl_llm.models.attention.rotary import Rope, rotation
from jaxrl_llm.models.kernels import Seen


@dataclasses.dataclass(frozen=True)
class View:
    """A window of columns, 0 for all, and rotary positions, None for none."""

    window: int
    rope: Rope | None


class Views(NamedTuple):
    """The views of a model, and the number of each layer's."""

    of_layers: Integer[np.ndarray, " l"]
    rotation: tuple[Float[Array, "v b t 1 half"], Float[Array, "v b t 1 half"]]
    visible: Bool[Array, "v b t s"]
    window: Integer[Array, "v b t"]  # columns that a token sees at most


def views_by_layer(config: ModelConfig) -> list[View]:
    """Return the view of every layer."""
    rope = config.rope
    sliding = (
        dataclasses.replace(rope, theta=config.sliding_rope_theta, scaling=()) if config.sliding_rope_theta else rope
    )
    kinds = config.layer_types or [SLIDING if config.sliding_window else FULL] * config.num_hidden_layers
    views = [View(config.sliding_window, sliding) if kind == SLIDING else View(0, rope) for kind in kinds]
    for layer in config.no_rope_layers:
        views[layer] = dataclasses.replace(views[layer], rope=None)
    return views


def with_views(config: ModelConfig, seen: Seen, positions: Integer[Array, "b t"], cache: KVCache | None) -> Seen:
    """Return `seen` with the views of all layers, for tokens at these positions and a cache before their columns."""
    of_layers = views_by_layer(config)
    views = list(dict.fromkeys(of_layers))
    columns = positions if cache is None else _columns(cache, positions, seen.kernels.cache)
    age = positions[:, :, None] - columns[:, None, :]
    windows = [view.window or np.iinfo(np.int32).max for view in views]
    turned = [_rotation(positions, view.rope, config.rotary_dim) for view in views]
    return seen._replace(
        views=Views(
            np.array([views.index(view) for view in of_layers], np.int32),
            tuple(jnp.stack(parts) for parts in zip(*turned, strict=True)),  # pyright: ignore
            jnp.stack([seen.visible & (age < window) for window in windows]),
            jnp.stack([jnp.full(positions.shape, window, jnp.int32) for window in windows]),
        )
    )


def of_layer(seen: Seen, view: Any) -> Seen:
    """Return the arguments of the layers with this view."""
    rotation, visible, window = jax.tree.map(lambda a: a[view], seen.views[1:])
    return seen._replace(rotation=rotation, visible=visible, window=window)


def _rotation(positions: Array, rope: Rope | None, size: int) -> Any:
    """cos and sin; without RoPE those of no rotation."""
    if rope is not None:
        return rotation(positions, rope)
    still = jnp.ones((*positions.shape, 1, size // 2), jnp.float32)
    return still, 0 * still


def _columns(cache: KVCache, positions: Array, layout: Layout) -> Integer[Array, "b s"]:
    """The position of every column that attention over a cache has, as `kv_cache.by_group` orders them."""
    rows, first, parts = len(positions), jnp.zeros((len(positions), 1), jnp.int32), []
    if cache.prefix is not None:
        first = jnp.repeat(cache.prefix.lengths, rows // len(cache.prefix.lengths))[:, None]
        width = starts(cache.prefix.values[0])[-1]
        parts = [jnp.broadcast_to(jnp.arange(width)[None], (rows, width))]
    parts.append(first + jnp.arange(starts(cache.values[0])[-1])[None])
    return jnp.concatenate([*parts, positions] if layout.stacked else parts, axis=1)
