"""A block whose output for a token depends on the tokens that it sees and on nothing else, to the last bit.

Its parts take rows of tokens in tiles (`tiles.py`): norm, projections and RoPE; attention, over the columns that a
token sees in their order; output projection, norm and gate; experts in blocks of one size; and the sum over a token's
experts in the order of its slots. The backward is that of the block that `fast` computes, from the same states and with
the same experts.
"""

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxrl_llm.ground import sharding
from jaxrl_llm.ground.array_typing import Array, Float, Integer, Params, SegmentIds
from jaxrl_llm.models.architecture import ModelConfig
from jaxrl_llm.models.attention.kv_cache import LayerCache, write
from jaxrl_llm.models.attention.layer_views import of_layer
from jaxrl_llm.models.attention.rotary import rotate
from jaxrl_llm.models.exact.tiles import Tiles, in_order, on_rows
from jaxrl_llm.models.kernels import Seen
from jaxrl_llm.models.layers import LowRank
from jaxrl_llm.models.routing import Routing

_EXPERTS = "gate", "up", "down"  # matrices of a layer's experts


def exact_block(config: ModelConfig, seen: Seen, fast: Callable[[Seen], Any]) -> Any:
    """A block as a function (x, parameters, cache, replay, view) -> (x, keys and values, routing); fast: makes another
    one from what layers share, for the backward."""

    def shared(arrays: Any) -> Seen:
        rotation, visible, segment_ids, window = arrays
        return seen._replace(rotation=rotation, visible=visible, segment_ids=segment_ids, window=window)

    def forward(params: Params, x: Array, arrays: Any, cache: Any, replay: Any) -> Any:
        return parts_of_block(config, shared(arrays), x, params, cache, replay)[:3]

    def everywhere(x: Array, params: Params, arrays: Any, cache: Any, replay: Any) -> Any:
        places: Any = dict.fromkeys(params, PartitionSpec())
        if "router" in params["mlp"]:
            of_experts = dict.fromkeys(_EXPERTS, PartitionSpec(_spread(config, seen.kernels.mesh)))
            places["mlp"] = dict.fromkeys(params["mlp"], PartitionSpec()) | of_experts
        return on_rows(forward, seen.kernels.mesh, seen.axes[0], (x, arrays, cache, replay), params, places)

    # A custom derivative makes the trees of its arguments of placeholders, so it is given no records.
    def plainly(tree: Any, x: Array, weights: list[Array], arrays: Any, replay: Any) -> Any:
        y, _, route = everywhere(x, jax.tree.unflatten(tree, weights), arrays, None, _record(replay))
        return y, _plain(route)

    def keep(tree: Any, x: Array, weights: list[Array], arrays: Any, replay: Any) -> Any:
        y, route = plainly(tree, x, weights, arrays, replay)
        return (y, route), (x, weights, arrays, replay, None if route is None else _record(route).choice)

    def back(tree: Any, residuals: Any, cotangents: Any) -> Any:
        x, weights, arrays, replay, choice = residuals
        block = fast(shared(arrays)._replace(gate=functools.partial(seen.gate, choice=choice)))

        def again(x: Array, weights: list[Array]) -> Any:
            y, _, route = block(x, jax.tree.unflatten(tree, weights), None, _record(replay), None)
            return y, None if route is None else route.logits

        (_, logits), pull = jax.vjp(again, x, weights)
        dy, of_route = cotangents
        return *pull((dy, None if logits is None else of_route[1])), None, None

    trained: Any = jax.custom_vjp(plainly, nondiff_argnums=(0,))
    trained.defvjp(keep, back)

    def block(x: Array, params: Params, cache: LayerCache | None, replay: Routing | None, view: Any) -> Any:
        own = seen if view is None else of_layer(seen, view)
        arrays = own.rotation, own.visible, own.segment_ids, own.window
        if seen.axes == sharding.ROLLOUT:
            return everywhere(x, params, arrays, cache, replay)
        weights, tree = jax.tree.flatten(params)
        y, route = trained(tree, x, weights, arrays, _plain(replay))
        return y, None, _record(route)

    return block


def _plain(routing: Routing | None) -> Any:
    return None if routing is None else (routing.experts, routing.logits, routing.chosen)


def _record(parts: Any) -> Any:
    return None if parts is None else Routing(*parts)


def _held(how: Tiles, params: Params, config: ModelConfig) -> Any:
    """Weights as `Tiles.product` takes them, adapters merged; router and norms as they are, in float32."""

    def one(path: Any, weight: Any) -> Array:
        name, weight = jax.tree_util.keystr(path), in_order(weight)
        if "router" in name or "norm" in name:
            return weight.astype(jnp.float32)
        return how.held(weight, config.dtype)

    return jax.tree_util.tree_map_with_path(one, params, is_leaf=lambda x: isinstance(x, LowRank))


def parts_of_block(config: ModelConfig, seen: Seen, x: Array, params: Params, cache: Any, replay: Any) -> Any:
    """One block on rows that lie here, x [b t d]: the output, keys and values as `Attention` returns them, the routing,
    and the result of every part by its name, rows of tokens first."""
    shape, flat = x.shape, functools.partial(jnp.reshape, shape=(x.shape[0] * x.shape[1], -1))
    how: Tiles = seen.kernels.exact
    weights, dtype = _held(how, params, config), config.dtype
    rounded = functools.partial(how.rounded, dtype=dtype)
    product = functools.partial(how.product, dtype=dtype)
    normed = functools.partial(normalised, how, eps=config.rms_norm_eps, dtype=dtype)
    of, feed = weights["attention"], weights["mlp"]

    def projected(x: Array, name: str) -> Array:
        y, bias = product(x, of[name]), of.get(f"{name}_bias")
        return y if bias is None else how.by_row(lambda y, bias: rounded(y + bias), (y,), bias[None])

    def enter(x: Array, cos: Array, sin: Array) -> Any:
        x = normed(rounded(x), weights["attention_norm"]["scale"])

        def heads(name: str) -> Array:
            y = projected(x, name)
            if f"{name}_norm" in of:
                scale = of[f"{name}_norm"]["scale"]
                y = normed(y.reshape(len(x), -1, len(scale)), scale)
            return y.reshape(len(x), -1, config.head_dim)

        def turned(y: Array, factor: float = 1.0) -> Array:
            def of_rows(y: Array, cos: Array, sin: Array) -> Array:
                return rounded(rotate(y, (cos, sin), config.rope_interleave)) * factor

            return how.by_row(of_rows, (y[:, None], cos[:, None, None], sin[:, None, None]))[:, 0]

        factor = config.attention_multiplier * config.head_dim**0.5 or 1.0
        return turned(heads("q"), factor), turned(heads("k")), heads("v")

    q, k, v = how.in_tiles(enter, flat(x), *map(flat, seen.rotation))
    parts: dict[str, Any] = OrderedDict({"norm, q, k, v and RoPE": (q, k, v)})  # jit sorts another one
    k, v = (a.reshape(*shape[:2], *a.shape[1:]).astype(x.dtype) for a in (k, v))
    attended, kv = _attention(seen, q, k, v, cache, of.get("sinks"))
    parts["attention"] = attended

    def added(x: Array, y: Array) -> Array:
        return how.by_row(lambda x, y: rounded(x + rounded(y * config.residual_multiplier)), (x, y))

    def gated(x: Array, feed: Any) -> Array:
        up = product(x, feed["gate"]), product(x, feed["up"])
        return product(how.by_row(lambda a, b: rounded(jax.nn.silu(a) * b), up), feed["down"])

    def leave(x: Array, y: Array, replay: Any) -> Any:
        x = added(rounded(x), projected(y, "o"))
        h = normed(x, weights["mlp_norm"]["scale"])
        if "router" not in feed:
            return added(x, gated(h, feed))

        def choose(logits: Array, replay: Any) -> Any:
            return seen.gate.choose(logits, {name: feed[name] for name in config.gate.shapes(0)}, replay)

        routing, gates = how.without_kernel(choose, how.product(h, feed["router"], jnp.float32), replay)
        shared: Any = gated(h, feed["shared"]) if "shared" in feed else None
        if "shared_gate" in feed:
            shares = product(h, feed["shared_gate"])
            shared = how.by_row(lambda a, y: rounded(jax.nn.sigmoid(a) * y), (shares, shared))
        return x, h, routing, gates, shared

    left = how.in_tiles(leave, flat(x), attended, jax.tree.map(flat, replay))
    if "router" not in feed:
        parts["o, norm and feed-forward"] = left
        return left.reshape(shape).astype(x.dtype), kv, None, parts
    parts["o, norm, gate and shared expert"] = left
    x1, h, routing, gates, shared = left
    matrices = tuple(feed[name] for name in _EXPERTS)
    outputs = _slots(how, h, routing.experts, matrices, dtype, _spread(config, seen.kernels.mesh))

    def combine(x: Array, outputs: Array, gates: Array, shared: Array | None) -> Array:
        def of_rows(outputs: Array, gates: Array, shared: Array | None = None) -> Array:
            terms = [outputs[:, slot] * gates[:, slot, None] for slot in range(gates.shape[1])]
            y = rounded(functools.reduce(jnp.add, terms))
            return y if shared is None else rounded(y + shared)

        rows = (outputs, gates) if shared is None else (outputs, gates, shared)
        return added(x, how.by_row(of_rows, rows))

    y = how.in_tiles(combine, x1, outputs, gates, shared)
    parts["experts"], parts["the sum over experts"] = outputs, y
    routing = jax.tree.map(lambda a: a.reshape(*shape[:2], -1), routing)
    return y.reshape(shape).astype(x.dtype), kv, routing, parts


def _spread(config: ModelConfig, mesh: Mesh | None) -> tuple[str, ...]:
    """Axes of the mesh whose devices hold some experts each; all other weights are gathered."""
    return () if mesh is None else sharding.cutting(sharding.spec(("expert",), (config.num_experts,), mesh)[0], mesh)


def _slots(
    how: Tiles,
    x: Float[Array, "n d"],
    experts: Integer[Array, "n k"],
    weights: tuple[Array, ...],
    dtype: Any,
    axes: tuple[str, ...],
) -> Float[Array, "n k d"]:
    """`Tiles.experts`; each device of these axes computes the slots of its experts, for the rows of all.

    Nothing is summed: a slot comes from the one device that has its expert.
    """
    if not axes:
        return how.experts(x, experts, weights, dtype)
    count, experts = len(weights[0]), experts.astype(jnp.int32)
    rows, wanted = (jax.lax.all_gather(a, axes, tiled=True) for a in (x, experts))
    own = wanted - count * jax.lax.axis_index(axes)
    own = jnp.where((own >= 0) & (own < count), own, count)  # count: of no expert here
    slots = jax.lax.all_to_all(how.experts(rows, own, weights, dtype), axes, 0, 0, tiled=True)
    slots = slots.reshape(-1, *experts.shape, x.shape[-1])
    return jnp.take_along_axis(slots, (experts // count)[None, ..., None], axis=0)[0]


def normalised(how: Tiles, x: Float[Array, "*n d"], scale: Array, eps: float, dtype: Any) -> Float[Array, "*n d"]:
    """RMSNorm of float32 numbers, inside of `Tiles.in_tiles`."""

    def of_rows(x: Array, scale: Array) -> Array:
        inverse = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
        return how.rounded(x * inverse * scale, dtype)

    return how.by_row(of_rows, (x,), scale.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,)))


def _attention(
    seen: Seen, q: Float[Array, "n h d"], k: Array, v: Array, cache: Any, sinks: Float[Array, " h"] | None
) -> tuple[Float[Array, "n x"], Any]:
    """Attention of all queries, over these keys and values [b t kv d] or those of the cache, to which they are written;
    and the keys and values to keep."""
    if cache is None:
        keys, values = (jnp.swapaxes(a, 1, 2) for a in (k, v))
        kept, places = ((keys,), (values,)), _columns(seen.segment_ids, seen.rows == "shared")
    else:
        assert cache.prefix == ((), ())
        kept = write(cache.keys, cache.values, k, v, cache.column, seen.kernels.cache)
        (keys,), (values,) = kept
        places = None, None, cache.column[:, None] + jnp.arange(k.shape[1])[None] + 1
    return seen.kernels.exact.attend(q, keys, values, *places, seen.window, sinks), kept


def _columns(segment_ids: SegmentIds, shared: bool) -> tuple[Integer[Array, "b t"] | None, ...]:
    """Places of the tokens that each one sees in rows of whole segments, as `Tiles.attend` takes them: first, shared
    and count. The token itself is the last of `count`."""
    index = jnp.broadcast_to(jnp.arange(segment_ids.shape[1]), segment_ids.shape)
    begins = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    start = jax.lax.cummax(jnp.where(begins, index, 0), axis=1)
    if not shared:
        return start, None, jnp.where(segment_ids == 0, 1, index - start + 1)
    prompt = jnp.where(segment_ids > 1, jnp.sum(segment_ids == 1, axis=1, keepdims=True), 0)
    return start - prompt, prompt, jnp.where(segment_ids == 0, 1, index - start + 1 + prompt)
