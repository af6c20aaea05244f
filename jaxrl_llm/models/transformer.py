"""The transformer: blocks, stacked and scanned, as a pure function of a params pytree.

Flax NNX is used to define the modules and nowhere else: `Model.init` returns a plain nested dict, and jit, grad,
optimizer, checkpoint and sharding only see that dict and `Model.apply`. Consecutive layers of one kind run in one scan;
for the decode loop, where a slice per step would be a copy, `Model.unstack` cuts the stacks into per-layer arrays,
except in bfloat16 on a TPU.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxrl_llm.ground import sharding
from jaxrl_llm.ground.array_typing import Array, Bool, Float, Integer, Key, Params, SegmentIds, Tokens
from jaxrl_llm.models.architecture import Kind, ModelConfig, Rows
from jaxrl_llm.models.attention import kv_cache
from jaxrl_llm.models.attention.flash import choose_attention, kept_of_attention
from jaxrl_llm.models.attention.grouped_query import Attention, rotation
from jaxrl_llm.models.attention.kv_cache import KVCache, LayerCache, Layout
from jaxrl_llm.models.experts.moe import MoE, SwiGLU
from jaxrl_llm.models.layers import FEW_ROWS, OfLayer, RMSNorm, Transposed, embedded, matrix, project
from jaxrl_llm.models.routing import EXACT, Router, Routing, no_record, routing_dtype

_UNROLLED = {"cpu": 8, "gpu": 48}  # layers; for more, compile time matters
_WORTH_TRANSPOSING = 32  # decode steps: it takes as long as 5 to 25 steps win by it


def in_a_loop(config: ModelConfig, mesh: Mesh | None, layers: int) -> bool:
    """Whether so many equal layers are trained in a loop of XLA or one after the other.

    A loop stacks what the backward needs and copies each layer's weights out of their stack, which costs more than
    compiling the layers: a step of 1 B parameters takes 1.07 (dense) and 1.18 times (a mixture) as long on an H200.
    Remat of blocks stacks little. Without the loop XLA keeps weights that were gathered from the devices of a mesh, and
    TPUs compile many layers for minutes.
    """
    platform = sharding.platform(mesh)
    unrolled_for = {"cpu": ("none",), "gpu": ("none", "dots") if sharding.shards("embed", mesh) == 1 else ()}
    return config.remat not in unrolled_for.get(platform, ()) or layers > _UNROLLED[platform]


class _Seen(NamedTuple):
    """What a block is told of the tokens besides their states; axes are the logical axes of b and t."""

    rotation: tuple[Array, Array]
    visible: Bool[Array, "b t s"]
    segment_ids: SegmentIds
    axes: tuple[str, str | None]
    rows: Rows


class ModelOutput(flax.struct.PyTreeNode):
    """hidden: the final normed states. routing: None for a dense model. cache: None unless asked for."""

    hidden: Float[Array, "b t d"]
    routing: Routing | None
    cache: KVCache | None


class Block(nnx.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, config: ModelConfig, kind: str, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.hidden_size, config)
        self.attention = Attention(config, rngs)
        self.mlp_norm = RMSNorm(config.hidden_size, config)
        self.mlp = MoE(config, rngs) if kind == "moe" else SwiGLU(config, rngs)

    def __call__(
        self, x: Array, seen: _Seen, cache: Any, replay: Routing | None, mesh: Mesh | None, router: Router
    ) -> tuple[Array, Any, Routing | None]:
        place = (*seen.axes, None)
        y, kv = self.attention(self.attention_norm(x), *seen, cache, mesh)
        x = sharding.constrain(x + y, place, mesh)
        inputs = self.mlp_norm(x)
        if isinstance(self.mlp, MoE):
            y, route = self.mlp(inputs, replay, mesh, seen.axes, router)
        else:
            y, route = self.mlp(inputs), None
        return sharding.constrain(x + y, place, mesh), kv, route


class Ends(nnx.Module):
    """What is not a layer: embedding, final norm, output head (absent when tied)."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        v, d = config.vocab_size, config.hidden_size
        values = jax.random.normal(rngs.params(), (v, d), jnp.float32) * d**-0.5
        self.embedding = nnx.Param(values.astype(config.param_dtype), logical=("vocab", "embed"))
        self.norm = RMSNorm(d, config)
        if not config.tie_word_embeddings:
            self.head = matrix(rngs, (d, v), ("embed", "vocab"), config)


@functools.lru_cache(maxsize=64)
def _definition(config: ModelConfig, part: str) -> tuple[Any, Any]:
    """(graphdef, logical axes) of a block or of the ends, without making arrays."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: _make(config, part, jax.random.key(0))))
    axes = jax.tree.map(lambda v: v.get_metadata()["logical"], state, is_leaf=lambda v: isinstance(v, nnx.Variable))
    return graphdef, nnx.to_pure_dict(axes)


def _make(config: ModelConfig, part: str, key: Key) -> nnx.Module:
    rngs = nnx.Rngs(params=key)
    return Ends(config, rngs) if part == "ends" else Block(config, part, rngs)


def positions_of(segment_ids: SegmentIds, rows: Rows = "packed") -> Integer[Array, "b t"]:
    """Position of each token inside its segment (segments are contiguous); answers to a shared prompt continue it."""
    index = jnp.broadcast_to(jnp.arange(segment_ids.shape[1]), segment_ids.shape)
    first = jnp.ones_like(segment_ids[:, :1], bool)
    starts = jnp.concatenate([first, segment_ids[:, 1:] != segment_ids[:, :-1]], axis=1)
    positions = index - jax.lax.cummax(jnp.where(starts, index, 0), axis=1)
    if rows != "shared":
        return positions
    return positions + jnp.where(segment_ids > 1, jnp.sum(segment_ids == 1, axis=1, keepdims=True), 0)


@dataclasses.dataclass(frozen=True)
class Model:
    """The pure functions of one architecture on one mesh; hashable, so it is closed over or passed statically."""

    config: ModelConfig
    mesh: Mesh | None = None
    router: Router = EXACT

    def init(self, key: Key) -> dict[str, Any]:
        """Fresh parameters: {"ends": ..., "dense": stacked dense blocks, "moe": stacked MoE blocks}."""

        def make(part: str, key: Key) -> dict[str, Any]:
            return nnx.to_pure_dict(nnx.state(_make(self.config, part, key)))

        params = {"ends": make("ends", jax.random.fold_in(key, 0))}
        for salt, kind in enumerate(("dense", "moe"), start=1):
            if count := self.config.kinds.count(kind):
                keys = jax.random.split(jax.random.fold_in(key, salt), count)
                params[kind] = jax.vmap(functools.partial(make, kind))(keys)
        return params

    def axes(self) -> dict[str, Any]:
        """The logical axes of every parameter, in the same tree."""
        axes = {"ends": _definition(self.config, "ends")[1]}
        for kind in dict.fromkeys(self.config.kinds):
            layer = _definition(self.config, kind)[1]
            axes[kind] = jax.tree.map(lambda a: ("layers", *a), layer, is_leaf=lambda a: isinstance(a, tuple))
        return axes

    def shapes(self) -> dict[str, Any]:
        """Shape, dtype and sharding of every parameter, without creating any."""
        shapes = jax.eval_shape(self.init, jax.random.key(0))
        if self.mesh is None:
            where = jax.tree.map(lambda _: jax.sharding.SingleDeviceSharding(jax.devices()[0]), shapes)
        else:
            where = sharding.shardings(self.axes(), shapes, self.mesh)
        return jax.tree.map(lambda s, to: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=to), shapes, where)

    def init_sharded(self, key: Key) -> dict[str, Any]:
        """Parameters created on the mesh, so that no device ever holds a full copy."""
        if self.mesh is None:
            return jax.jit(self.init)(key)
        return jax.jit(self.init, out_shardings=jax.tree.map(lambda s: s.sharding, self.shapes()))(key)

    def unstack(self, params: Params, dtype: Any = None) -> dict[str, Any]:
        """Parameters for the decode loop, by layer or by stack as its caches are, cast once to `dtype`; the router and
        the norms stay as they are."""

        def cast(path: Any, x: Array) -> Array:
            name = jax.tree_util.keystr(path)
            return x if dtype is None or "router" in name or "norm" in name else x.astype(dtype)

        params = dict(jax.tree_util.tree_map_with_path(cast, dict(params)))
        layout = self.cache_layout
        for kind in dict.fromkeys(self.config.kinds):
            mine = [places for of, places in kv_cache.groups(self.config, layout) if of == kind]
            cuts = [slice(at.start, at.stop) if layout.stacked else at.start for at in mine]
            params[kind] = tuple(jax.tree.map(lambda x, cut=cut: x[cut], params[kind]) for cut in cuts)
        return params

    def for_decoding(self, params: Params, rows: int, steps: int) -> Params:
        """Unstacked parameters as so many decode steps of so many rows want them: for few rows on a CPU, matrices are
        kept transposed. Not those of experts, with which it takes as long, nor the router's."""
        on_cpu = sharding.platform(self.mesh) == "cpu" and (self.mesh is None or self.mesh.size == 1)
        if not on_cpu or not 1 < rows <= FEW_ROWS or steps < _WORTH_TRANSPOSING:
            return params

        def turned(path: Any, x: Array) -> Any:
            matrix = x.ndim == 2 and "router" not in jax.tree_util.keystr(path)
            return Transposed(x.T) if matrix else x

        layers = {kind: jax.tree_util.tree_map_with_path(turned, params[kind]) for kind in set(self.config.kinds)}
        ends = {name: Transposed(x.T) if name == "head" else x for name, x in params["ends"].items()}
        return {**params, **layers, "ends": ends}

    @property
    def cache_layout(self) -> Layout:
        return kv_cache.layout_of(self.config, sharding.platform(self.mesh))

    def empty_cache(self, rows: int, length: int) -> KVCache:
        """For so many tokens of each row, to be filled by `apply`."""
        return kv_cache.empty(self.config, rows, length, self.cache_layout)

    def head(self, params: Params) -> Float[Array, "d v"]:
        """The output matrix; the transposed embedding when tied."""
        ends = params["ends"]
        return ends["embedding"].T if self.config.tie_word_embeddings else ends["head"]

    def logits(self, params: Params, hidden: Float[Array, "*n d"]) -> Float[Array, "*n v"]:
        """hidden @ head, accumulated and returned in float32; params may be those of `for_decoding`."""
        if not self.config.tie_word_embeddings:
            return project(hidden, params["ends"]["head"], jnp.float32)
        if sharding.platform(self.mesh) == "cpu":
            return project(hidden, Transposed(params["ends"]["embedding"]), jnp.float32)
        return project(hidden, self.head(params), jnp.float32)

    def apply(
        self,
        params: Params,
        tokens: Tokens,
        *,
        segment_ids: SegmentIds | None = None,
        positions: Integer[Array, "b t"] | None = None,
        routing: Routing | None = None,
        cache: KVCache | None = None,
        prefill: bool = False,
        router_logits: bool = False,
        rows: Rows = "packed",
    ) -> ModelOutput:
        """One forward.

        Args:
          params: of `init`, or of `unstack`.
          segment_ids: 0 = padding; attention and positions stay inside a segment. Default: one segment a row.
          positions: default from segment_ids. With a cache they name the t columns to write.
          routing: experts (and perhaps logits) to replay where there is a record.
          prefill: return a cache of these tokens; there is none yet.
          router_logits: also return the current router's logits.
          rows: what a row holds. `packed`: any segments. `padded`: one, with padding behind it. `shared`: a prompt,
            segment 1, and answers, which see the prompt and continue its positions.

        Raises:
          ValueError: `routing` for a dense model, or of the wrong shape; a shared prompt with flash attention, or on a
            mesh that splits time.
        """
        config = self.config
        segment_ids = jnp.ones_like(tokens) if segment_ids is None else segment_ids
        positions = positions_of(segment_ids, rows) if positions is None else positions
        assert cache is None or not (prefill or rows == "shared")
        if rows == "shared" and choose_attention(config, sharding.platform(self.mesh)) == "flash":
            raise ValueError(
                "answers that share a prompt (updates.layout=shared) need plain attention; set "
                "model.attention_implementation=plain, or updates.layout=packed"
            )
        if rows == "shared" and sharding.shards("time", self.mesh) > 1:
            raise ValueError(
                "answers that share a prompt (updates.layout=shared) are not split over devices; set the context axis, "
                "the fifth size of mesh.shape, to 1, or updates.layout=packed"
            )
        _check_routing(config, tokens, routing)
        if cache is not None:
            layered, visible = kv_cache.by_group(cache, positions, self.cache_layout)
        else:
            layered, causal = None, jnp.tril(jnp.ones((tokens.shape[1], tokens.shape[1]), bool))
            same = (segment_ids[:, :, None] == segment_ids[:, None, :]) & (segment_ids != 0)[:, None, :]
            if rows == "shared":
                same |= (segment_ids == 1)[:, None, :]
            visible = same & causal[None]
        axes = sharding.MICRO_BATCH if cache is None and not prefill else sharding.ROLLOUT
        x = embedded(params["ends"]["embedding"], tokens, config.compute_dtype, axes, self.mesh)
        rotated = rotation(positions, config.head_dim, config.rope_theta, config.rope_scaling)
        seen = _Seen(rotated, visible, segment_ids, axes, rows)
        if prefill or cache is not None or isinstance(params[config.kinds[0]], tuple):
            x, caches, routes = self._by_groups(params, x, seen, routing, layered)
        else:
            caches, (x, routes) = [], self._scan(params, x, seen, routing)
        out = None
        if routes:
            out = jax.tree.map(lambda *parts: jnp.concatenate(parts), *routes)
            experts = out.experts.astype(routing_dtype(config.num_experts))
            experts = jnp.where((segment_ids != 0)[None, :, :, None], experts, no_record(experts))
            out = out.replace(experts=experts) if router_logits else Routing(experts)
        if layered is not None and self.cache_layout.stacked:
            caches = [kv_cache.write_stack(old, *new, self.mesh) for old, new in zip(layered, caches, strict=True)]
        if prefill or cache is not None:
            keys, values = map(tuple, zip(*caches, strict=True))
            cache = KVCache(keys, values, None if cache is None else cache.prefix)
        ends = nnx.merge(_definition(config, "ends")[0], dict(params["ends"]))
        return ModelOutput(ends.norm(x), out, cache)

    def _block(self, kind: Kind, seen: _Seen) -> Any:
        """A block as a function (x, parameters, cache, replay) -> (x, keys and values, routing)."""
        graphdef = _definition(self.config, kind)[0]

        def block(x: Array, params: Params, cache: LayerCache | None, replay: Routing | None) -> Any:
            return nnx.merge(graphdef, params)(x, seen, cache, replay, self.mesh, self.router)

        return block

    def _scan(self, params: Params, x: Array, seen: _Seen, routing: Any) -> tuple[Array, list[Any]]:
        """All layers from their stacks, with one scan per run of equal layers; returns x and each run's routing."""
        routes = []
        for kind, places in self.config.runs:
            block = self._block(kind, seen)

            def without_cache(x: Array, inputs: Any, block: Any = block) -> tuple[Array, Any]:
                layer, replay = inputs
                x, _, route = block(x, layer, None, replay)
                return x, route

            here = slice(places.start, places.stop)
            stack = jax.tree.map(lambda a, here=here: a[here], params[kind])
            rolled = in_a_loop(self.config, self.mesh, len(places))
            # Outside of a loop, and one turn is none, XLA would keep what it was told to compute again.
            body = self._rematerialised(without_cache, prevent_cse=not rolled or len(places) == 1)
            inputs = (stack, _of_layers(here, kind, routing))
            x, route = jax.lax.scan(body, x, inputs, unroll=1 if rolled else len(places))
            routes += [] if route is None else [route]
        return x, routes

    def _by_groups(
        self, params: Params, x: Array, seen: _Seen, routing: Any, cached: Sequence[LayerCache] | None
    ) -> tuple[Array, list[Any], list[Any]]:
        """All layers, one by one or in a loop over each stack; returns x, the keys and values of each, and its routing.

        Layers that follow one by one are traced once. On a CPU a loop over stacks compiles in half the time and needs
        no second copy of the weights, but a token of SmolLM2 costs 7 to 12 % more: each turn copies its slice of
        weights and cache.
        """
        caches, routes = [], []
        stacked = self.cache_layout.stacked
        blocks = {kind: jax.jit(self._block(kind, seen)) for kind in dict.fromkeys(self.config.kinds)}
        if not isinstance(params[self.config.kinds[0]], tuple):
            params = self.unstack(params)
        given = {kind: iter(params[kind]) for kind in blocks}
        for number, (kind, places) in enumerate(kv_cache.groups(self.config, self.cache_layout)):
            layers, cache = next(given[kind]), None if cached is None else cached[number]
            replay = _of_layers(slice(places.start, places.stop), kind, routing)
            if stacked:
                x, (kv, route) = _in_turns(blocks[kind], x, layers, cache, replay)
            else:
                x, kv, route = blocks[kind](x, layers, cache, jax.tree.map(lambda r: r[0], replay))
                route = jax.tree.map(lambda r: r[None], route)
            caches.append(kv)
            routes += [] if route is None else [route]
        return x, caches, routes

    def _rematerialised(self, block: Any, prevent_cse: bool) -> Any:
        if self.config.remat == "none" and sharding.platform(self.mesh) != "tpu":
            return block
        dots = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        policies = {
            "none": sharding.but_gathered,
            "dots": jax.checkpoint_policies.save_from_both_policies(dots, kept_of_attention),
        }
        return jax.checkpoint(block, policy=policies.get(self.config.remat), prevent_cse=prevent_cse)


def _in_turns(block: Any, x: Array, stack: Any, cache: LayerCache | None, replay: Any) -> tuple[Array, Any]:
    """A stack of layers in a loop whose turns read their own; returns x, and of all layers columns and routing."""

    def turn(x: Array, inputs: Any) -> tuple[Array, Any]:
        layer, replay = inputs
        own = None if cache is None else cache.of_layer(layer)
        x, kv, route = block(x, jax.tree.map(lambda a: mine(OfLayer(a, layer)), stack), own, replay)
        return x, (kv, route)

    def mine(weight: OfLayer) -> Any:  # a kernel takes the matrices of experts
        return weight if len(weight.shape) > 2 else weight.value

    return jax.lax.scan(turn, x, (jnp.arange(len(jax.tree.leaves(stack)[0])), replay))


def _of_layers(place: slice, kind: Kind, routing: Routing | None) -> Routing | None:
    """The part of `routing` that is replayed in these layers; None in dense layers and without a replay."""
    return routing[place] if kind == "moe" and routing is not None else None


def _check_routing(config: ModelConfig, tokens: Array, routing: Routing | None) -> None:
    if routing is None:
        return
    if not config.num_moe_layers:
        raise ValueError("routing was given to a dense model; set replay.mode='off' or model.num_experts > 0")
    for name, width in (("experts", config.num_experts_per_tok), ("logits", config.num_experts)):
        given, expected = getattr(routing, name), (config.num_moe_layers, *tokens.shape, width)
        if given is not None and given.shape != expected:
            raise ValueError(
                f"routing.{name} has shape {given.shape}, this forward needs {expected} [MoE layers, rows, time, "
                "experts per token or experts]; record it with the same model and the same tokens"
            )
