"""The transformer: blocks, stacked and scanned, as a pure function of a params pytree.

Flax NNX is used to define the modules and nowhere else: `Model.init` returns a plain nested dict, and jit, grad,
optimizer, checkpoint and sharding only see that dict and `Model.apply`. Consecutive layers of one kind run in one scan;
for the decode loop, where a slice per step would be a copy, `Model.unstack` cuts the stacks into per-layer arrays,
except in bfloat16 on a TPU.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxrl_llm.ground import sharding
from jaxrl_llm.ground.array_typing import Array, Float, Integer, Key, Params, SegmentIds, Tokens
from jaxrl_llm.ground.by_name import ByName
from jaxrl_llm.models.architecture import DELTA, Kind, ModelConfig, Rows
from jaxrl_llm.models.attention import kv_cache
from jaxrl_llm.models.attention.choice import kept_of_attention
from jaxrl_llm.models.attention.grouped_query import Attention, positions_of
from jaxrl_llm.models.attention.kv_cache import KVCache, LayerCache, Layout
from jaxrl_llm.models.attention.rotary import rotation
from jaxrl_llm.models.experts.moe import MoE, SwiGLU
from jaxrl_llm.models.kernels import Kernels, Seen, in_a_loop
from jaxrl_llm.models.layers import FEW_ROWS, OfLayer, RMSNorm, Transposed, embedded, matrix, project, scaled
from jaxrl_llm.models.routing import EXACT, Router, Routing, no_record, routing_dtype

_KERNELS = ByName(
    {
        "ClampedMoE": "jaxrl_llm.models.experts.clamped_experts",
        "GeGLU": "jaxrl_llm.models.experts.geglu",
        "DeltaNet": "jaxrl_llm.models.attention.delta_net",
        "LatentAttention": "jaxrl_llm.models.attention.latent",
        "with_post_norms": "jaxrl_llm.models.post_norms",
        "exact_block": "jaxrl_llm.models.exact.exact_block",
        "exact_norm": "jaxrl_llm.models.exact.exact_scores",
        "first_difference": "jaxrl_llm.models.exact.first_difference",
        "of_layer": "jaxrl_llm.models.attention.layer_views",
        "with_views": "jaxrl_llm.models.attention.layer_views",
    }
)
_WORTH_TRANSPOSING = 32  # decode steps: it takes as long as 5 to 25 steps win by it


class ModelOutput(flax.struct.PyTreeNode):
    """hidden: the final normed states. routing: None for a dense model. cache: None unless asked for."""

    hidden: Float[Array, "b t d"]
    routing: Routing | None
    cache: KVCache | None


LAYERS: dict[str, tuple[Any, Any]] = {"dense": (Attention, SwiGLU), "moe": (Attention, MoE)}


class Block(nnx.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)), of the two classes that `LAYERS` has for its kind."""

    def __init__(self, config: ModelConfig, kind: str, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.hidden_size, config)
        attention, feed = LAYERS[kind.removeprefix("delta_")]
        if kind.endswith("moe") and (config.expert_bias or config.swiglu_limit):
            feed = _KERNELS["ClampedMoE"]
        if kind.endswith("dense") and config.hidden_act != "silu":
            feed = _KERNELS["GeGLU"]
        if config.kv_lora_rank:
            attention = _KERNELS["LatentAttention"]
        if kind in DELTA:
            attention = _KERNELS["DeltaNet"]
        self.attention = attention(config, rngs)
        self.mlp_norm = RMSNorm(config.hidden_size, config)
        self.mlp = feed(config, rngs)
        self.factor = config.residual_multiplier

    def __call__(
        self, x: Array, seen: Seen, cache: LayerCache | None, replay: Routing | None
    ) -> tuple[Array, Any, Routing | None]:
        place, mesh = (*seen.axes, None), seen.kernels.mesh
        y, kv = self.attention(self.attention_norm(x), seen, cache)
        x = sharding.constrain(x + scaled(y, self.factor), place, mesh)
        y, route = self.mlp(self.mlp_norm(x), seen, replay)
        return sharding.constrain(x + scaled(y, self.factor), place, mesh), kv, route


class Ends(nnx.Module):
    """Parts that are no layer: embedding, final norm, output head (absent when tied)."""

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
    if part == "ends":
        return Ends(config, rngs)
    return (Block if config.norm_placement == "pre" else _KERNELS["with_post_norms"](Block))(config, part, rngs)


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
        for salt, kind in enumerate((*LAYERS, *DELTA), start=1):
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
        return _initialisation(self)(key)

    def unstack(self, params: Params, dtype: Any = None) -> dict[str, Any]:
        """Parameters for the decode loop, by layer or by stack as its caches are, cast once to `dtype`; the router,
        norms and decays stay as they are."""

        def cast(path: Any, x: Array) -> Array:
            name = jax.tree_util.keystr(path)
            return x if dtype is None or any(of in name for of in ("router", "norm", "decay")) else x.astype(dtype)

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
        on_cpu = self.kernels.platform == "cpu" and (self.mesh is None or self.mesh.size == 1)
        if not on_cpu or self.kernels.exact or not 1 < rows <= FEW_ROWS or steps < _WORTH_TRANSPOSING:
            return params

        def turned(path: Any, x: Array) -> Any:
            name = jax.tree_util.keystr(path)
            matrix = x.ndim == 2 and not any(part in name for part in ("router", "bias", "kv_b"))
            return Transposed(x.T) if matrix else x

        layers = {kind: jax.tree_util.tree_map_with_path(turned, params[kind]) for kind in set(self.config.kinds)}
        ends = {name: Transposed(x.T) if name == "head" else x for name, x in params["ends"].items()}
        return {**params, **layers, "ends": ends}

    @property
    def kernels(self) -> Kernels:
        """The choices of this platform."""
        return Kernels.of(self.config, self.mesh)

    @property
    def cache_layout(self) -> Layout:
        """How a cache lies in memory, for `kv_cache.copy_rows`."""
        return self.kernels.cache

    def empty_cache(self, rows: int, length: int) -> KVCache:
        """For so many tokens of each row, to be filled by `apply`."""
        return kv_cache.empty(self.config, rows, length, self.cache_layout)

    def head(self, params: Params) -> Float[Array, "d v"]:
        """The output matrix; the transposed embedding when tied."""
        ends = params["ends"]
        return ends["embedding"].T if self.config.tie_word_embeddings else ends["head"]

    def logits(self, params: Params, hidden: Float[Array, "*n d"]) -> Float[Array, "*n v"]:
        """hidden @ head, accumulated and returned in float32; params may be those of `for_decoding`."""
        head = params["ends"].get("head", Transposed(params["ends"]["embedding"]))
        if self.config.tie_word_embeddings and self.kernels.platform != "cpu":
            head = self.head(params)
        return scaled(project(hidden, head, jnp.float32), 1 / self.config.logits_scaling)

    def first_difference(self) -> str:
        """Return a sentence that names the first operation whose result depends on the arrangement of a batch."""
        return _KERNELS["first_difference"](self)

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
        kernels = self.kernels
        if rows == "shared" and kernels.attention == "flash":
            raise ValueError(
                "answers that share a prompt (updates.layout=shared) need plain attention; set "
                "model.attention_implementation=plain, or updates.layout=packed"
            )
        if rows == "shared" and sharding.shards("time", self.mesh) > 1:
            raise ValueError(
                "answers that share a prompt (updates.layout=shared) are not split over devices; set the context axis, "
                "the fifth size of mesh.shape, to 1, or updates.layout=packed"
            )
        if routing is not None:
            routing.check(config.num_moe_layers, tokens.shape, config.num_experts_per_tok, config.num_experts)
        if cache is not None:
            layered, visible = kv_cache.by_group(cache, positions, kernels.cache)
        else:
            layered, causal = None, jnp.tril(jnp.ones((tokens.shape[1], tokens.shape[1]), bool))
            same = (segment_ids[:, :, None] == segment_ids[:, None, :]) & (segment_ids != 0)[:, None, :]
            if rows == "shared":
                same |= (segment_ids == 1)[:, None, :]
            visible = same & causal[None]
        axes = sharding.MICRO_BATCH if cache is None and not prefill else sharding.ROLLOUT
        x = embedded(params["ends"]["embedding"], tokens, config.compute_dtype, axes, self.mesh)
        x = scaled(x, config.embedding_multiplier)
        gate = dataclasses.replace(config.gate, router=self.router)
        seen = Seen(rotation(positions, config.rope), visible, segment_ids, axes, rows, kernels, gate)
        seen = seen if config.alike else _KERNELS["with_views"](config, seen, positions, cache)
        x, caches, routes = self._walk(params, x, seen, routing, layered, prefill)
        out = None
        if routes:
            out = jax.tree.map(lambda *parts: jnp.concatenate(parts), *routes)

            def recorded(experts: Array) -> Array:
                experts = experts.astype(routing_dtype(config.num_experts))
                return jnp.where((segment_ids != 0)[None, :, :, None], experts, no_record(experts))

            chosen = None if out.chosen is None else recorded(out.chosen)
            out = Routing(recorded(out.experts), out.logits if router_logits else None, chosen)
        if layered is not None and kernels.cache.stacked:
            caches = [kv_cache.write_stack(old, *new, self.mesh) for old, new in zip(layered, caches, strict=True)]
        if prefill or cache is not None:
            keys, values = map(tuple, zip(*caches, strict=True))
            cache = KVCache(keys, values, None if cache is None else cache.prefix)
        if kernels.exact:
            scale = params["ends"]["norm"]["scale"]
            how = kernels.exact, self.mesh, axes[0]
            return ModelOutput(_KERNELS["exact_norm"](x, scale, config.rms_norm_eps, *how), out, cache)
        ends = nnx.merge(_definition(config, "ends")[0], dict(params["ends"]))
        return ModelOutput(ends.norm(x), out, cache)

    def _walk(
        self, params: Params, x: Array, seen: Seen, routing: Any, cached: Sequence[LayerCache] | None, prefill: bool
    ) -> tuple[Array, list[Any], list[Any]]:
        """All layers: x, and of each array of a cache its keys and values, of each stack its routing.

        Stacks that are trained are scanned, one run of equal layers after the other. For a cache, or from parameters of
        `unstack`, layers follow one by one and are traced once, or where the cache is a stack in a loop whose turns
        read their own. On a CPU that loop compiles in half the time and needs no second copy of the weights, but a
        token of SmolLM2 costs 7 to 12 % more: each turn copies its slice of weights and cache.
        """
        caches, routes, kinds, routed = [], [], dict.fromkeys(self.config.kinds), 0
        unstacked = isinstance(params[self.config.kinds[0]], tuple)
        trained = not (prefill or cached or unstacked)
        blocks = {kind: _block(self.config, kind, seen) for kind in kinds}
        if not trained:
            blocks = {kind: jax.jit(block) for kind, block in blocks.items()}
            params = params if unstacked else self.unstack(params)
            given = {kind: iter(params[kind]) for kind in kinds}
        groups, done = self.config.runs if trained else kv_cache.groups(self.config, seen.kernels.cache), 0
        for number, (kind, places) in enumerate(groups):
            here, mine, block = slice(places.start, places.stop), slice(done, done + len(places)), blocks[kind]
            views, done = None if seen.views is None else seen.views.of_layers[mine], mine.stop
            layers = jax.tree.map(lambda a, here=here: a[here], params[kind]) if trained else next(given[kind])
            moe = kind.endswith("moe")
            replay = routing[routed : routed + len(places)] if moe and routing is not None else None
            if trained:
                x, route = self._scanned(block, x, (layers, replay, views), len(places))
            else:
                cache = None if cached is None else cached[number]
                if seen.kernels.cache.stacked:
                    x, (kv, route) = _in_turns(block, x, layers, cache, (replay, views))
                else:
                    x, kv, route = block(x, layers, cache, *jax.tree.map(lambda r: r[0], (replay, views)))
                    route = jax.tree.map(lambda r: r[None], route)
                caches.append(kv)
            routes, routed = routes + [route] * moe, routed + len(places) * moe
        return x, caches, routes

    def _scanned(self, block: Any, x: Array, stacks: Any, layers: int) -> tuple[Array, Any]:
        """One run of equal layers from the stacks of their parameters, replay and views; returns x and the routing."""

        def without_cache(x: Array, inputs: Any) -> tuple[Array, Any]:
            layer, *others = inputs
            x, _, route = block(x, layer, None, *others)
            return x, route

        rolled = in_a_loop(self.config, self.mesh, layers)
        # Outside of a loop, and one turn is none, XLA would keep what it was told to compute again.
        body = self._rematerialised(without_cache, prevent_cse=not rolled or layers == 1)
        return jax.lax.scan(body, x, stacks, unroll=1 if rolled else layers)

    def _rematerialised(self, block: Any, prevent_cse: bool) -> Any:
        if self.config.remat == "none" and self.kernels.platform != "tpu":
            return block
        dots = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        policies = {
            "none": sharding.but_gathered,
            "dots": jax.checkpoint_policies.save_from_both_policies(dots, kept_of_attention),
        }
        return jax.checkpoint(block, policy=policies.get(self.config.remat), prevent_cse=prevent_cse)


@functools.lru_cache(maxsize=64)
def _initialisation(model: Model) -> Any:
    """Return the program of `Model.init_sharded`, which equal models share."""
    where = None if model.mesh is None else jax.tree.map(lambda s: s.sharding, model.shapes())
    return jax.jit(model.init, out_shardings=where)


def _in_turns(block: Any, x: Array, stack: Any, cache: LayerCache | None, others: Any) -> tuple[Array, Any]:
    """A stack of layers, with their replay and views, in a loop; returns x, and of all layers columns and routing."""

    def turn(x: Array, inputs: Any) -> tuple[Array, Any]:
        layer, replay, view = inputs
        own = None if cache is None else cache.of_layer(layer)
        x, kv, route = block(x, jax.tree.map(lambda a: mine(OfLayer(a, layer)), stack), own, replay, view)
        return x, (kv, route)

    def mine(weight: OfLayer) -> Any:  # a kernel takes the matrices of experts
        return weight if len(weight.shape) > 2 else weight.value

    return jax.lax.scan(turn, x, (jnp.arange(len(jax.tree.leaves(stack)[0])), *others))


def _block(config: ModelConfig, kind: Kind, seen: Seen) -> Any:
    """A block as a function (x, parameters, cache, replay, view) -> (x, keys and values, routing)."""
    graphdef = _definition(config, kind)[0]

    def of(seen: Seen) -> Any:
        def block(x: Array, params: Params, cache: LayerCache | None, replay: Routing | None, view: Any) -> Any:
            own = seen if view is None else _KERNELS["of_layer"](seen, view)
            return nnx.merge(graphdef, params)(x, own, cache, replay)

        return block

    return _KERNELS["exact_block"](config, seen, of) if seen.kernels.exact else of(seen)
