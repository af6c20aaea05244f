"""The rollout engine: samples groups of answers to prompts and returns them as a `Rollout`."""

import dataclasses
import functools
import time
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Key as Keys

from jaxrl_llm.ground import sharding
from jaxrl_llm.ground.array_typing import Array, Integer, Key, Params
from jaxrl_llm.ground.by_name import ByName
from jaxrl_llm.ground.masking import bucket
from jaxrl_llm.ground.ranges import in_range
from jaxrl_llm.models import EXACT, Model, Router, Routing, no_record
from jaxrl_llm.rollout.decoder import Answers, Decoder, is_end
from jaxrl_llm.rollout.loops import decode
from jaxrl_llm.rollout.placement import in_place, placed_shapes, spread_rows
from jaxrl_llm.rollout.rollout import Rollout, Routes
from jaxrl_llm.rollout.sampling import Sampling, answer_keys

_BETWEEN_MESHES = ByName({"move": "jaxrl_llm.rollout.parameter_moves"})


@dataclasses.dataclass(frozen=True)
class Engine:
    """How answers are sampled: the model, the distribution, the group and the bounds. Equal engines share one trace."""

    model: Model
    sampling: Sampling
    group_size: int
    max_new_tokens: int
    end_ids: tuple[int, ...]  # an answer ends with the first of these tokens
    slots: int = 0  # answers decoded at once; 0 = all
    dtype: str = "float32"  # of weights, activations and cache (float8_e4m3: weights); log-probs stay float32
    router: Router = EXACT
    record_routing: bool = True
    record_router_logits: bool = False  # also the router's logits, for a replay of logits
    record_kept: bool = False  # also the tokens that each could have been drawn from, at most sampling.top_k
    prompt_buckets: int = 1  # prompts are cut to the smallest of so many widths that holds them; each compiles once
    rows_on: jax.sharding.Mesh | None = None  # the mesh over which a rollout's rows are spread; None: the model's
    remote: ClassVar[bool] = False  # a remote engine answers while the devices train

    def __post_init__(self) -> None:
        for name, least in (("group_size", 1), ("max_new_tokens", 1), ("slots", 0), ("prompt_buckets", 1)):
            in_range(f"rollout.{name}", getattr(self, name), least=least)
        if not self.end_ids:
            raise ValueError("end_ids=() names no token that ends an answer; give those of the tokenizer")
        assert self.sampling.top_k > 0 or not self.record_kept, "a record of what was kept has the width of a top-k"

    def prepare(self, params: Params) -> Params:
        """The parameters of training on the mesh of the rollout's model, in the rollout's dtype.

        Returns:
          Parameters as of `Model.unstack`; the given ones where both meshes lay them out alike, which `generate` then
          cuts and casts each time.
        """
        return params if in_place(self.model, params) else _prepare(self, _mesh_of(params), params)

    def take_weights(self, params: Params, version: int = 0) -> tuple[Any, dict[str, float]]:
        """Prepare parameters for `generate`.

        Returns:
          What `prepare` makes of them, and metrics: the seconds and bytes of moving them, empty if nothing moved.
        """
        start = time.monotonic()
        prepared = self.prepare(params)
        if prepared is params:
            return params, {}
        jax.block_until_ready(prepared)
        seconds, size = time.monotonic() - start, float(sharding.local_bytes(prepared))
        return prepared, {"time/parameters_moved_s": seconds, "rollout/parameters_moved_bytes": size}

    def release(self, prepared: Params, params: Params) -> None:
        """Free what `prepare` made of these parameters; traced functions may refer to it until a garbage collection."""
        if prepared is not params:
            for x in jax.tree.leaves(prepared):
                x.delete()

    def trace_prepare(self, params: Params) -> jax.stages.Traced | None:
        """The program of `prepare` for abstract parameters; None if nothing moves."""
        return None if in_place(self.model, params) else _prepare.trace(self, _mesh_of(params), params)

    def generate(
        self,
        params: Params,
        prompts: Integer[Array | np.ndarray, "p tp"],
        lengths: Integer[Array | np.ndarray, "p"],
        uids: Integer[Array | np.ndarray, "p"],
        key: Key,
        limits: Integer[Array | np.ndarray, "b"] | None = None,
    ) -> Rollout:
        """Sample `group_size` answers to every prompt.

        Args:
          params: from `prepare`, or from `Model.init` on the model's mesh; the latter are cast to the rollout dtype.
          prompts: left-aligned, padding right.
          lengths: tokens in each prompt, 1..tp.
          uids: what tells prompts apart: an answer depends on (key, uid, sample index), never on its place.
          limits: the most tokens of each answer, 1..max_new_tokens; None: max_new_tokens for all.

        Returns:
          b = p * group_size rows in (prompt, sample) order, t = tp + max_new_tokens, whatever width was computed.

        Raises:
          ValueError: an empty prompt, a length beyond the prompts' width, or a limit out of range.
        """
        count = prompts.shape[0] * self.group_size
        limits = np.full(count, self.max_new_tokens, np.int32) if limits is None else limits
        for name, given, most in (("lengths", lengths, prompts.shape[1]), ("limits", limits, self.max_new_tokens)):
            host = np.asarray(given)
            if host.size and (host.min() < 1 or host.max() > most):
                raise ValueError(f"{name} from {host.min()} to {host.max()} must lie in 1..{most}")
        if limits.shape != (count,):
            raise ValueError(f"limits of shape {limits.shape} must be one for each of {count} answers")
        width = bucket(int(np.max(lengths, initial=1)), prompts.shape[1], self.prompt_buckets)
        out = _generate(self, width, params, *map(jnp.asarray, (prompts, lengths, uids, limits)), key)
        return out if self.rows_on in (None, self.model.mesh) else spread_rows(self.rows_on, out)

    def prepared_shapes(self, params: Params) -> Params:
        """The result of `prepare` for abstract parameters."""
        if in_place(self.model, params):
            return params
        return placed_shapes(self.model, jax.eval_shape(functools.partial(_prepare, self, _mesh_of(params)), params))

    def trace(self, params: Params, count: int, width: int) -> jax.stages.Traced:
        """The program of `generate` for `count` prompts of at most `width` tokens.

        params: abstract, as `prepare` would be given them.
        """
        params = self.prepared_shapes(params)
        shape = jax.ShapeDtypeStruct  # on no device yet, as `generate` is given them: a sharding is another program
        uids, key = shape((count,), jnp.uint32), shape((), jax.random.key(0).dtype)
        lengths, limits = shape((count,), jnp.int32), shape((count * self.group_size,), jnp.int32)
        prompts = shape((count, width), jnp.int32)
        return _generate.trace(self, width, params, prompts, lengths, uids, limits, key)

    def decoder(self, params: Params, prompts: Array, lengths: Array, keys: Keys[Array, "b"], limits: Array) -> Decoder:
        model, params = by_layer(self, params)
        slots = min(self.slots, len(limits)) or len(limits)
        return Decoder(
            model=model,
            params=model.for_decoding(params, slots, self.max_new_tokens),
            sampling=self.sampling,
            end_ids=self.end_ids,
            prompts=prompts,
            lengths=lengths,
            keys=keys,
            limits=limits,
            max_new_tokens=self.max_new_tokens,
            record_routing=self.record_routing,
            record_router_logits=self.record_router_logits,
            record_kept=self.record_kept,
        )


def as_sampler(model: Model, params: Params, dtype: str, router: Router) -> tuple[Model, Params]:
    """The model and the parameters that sample: in `dtype`, with this router.

    float8_e4m3 rounds the matrices of the layers, except the router's, through that type and computes in the model's
    own: the largest entry of each matrix is scaled to the type's largest number, as engines do.

    Args:
      params: stacked, as `Model.init` has them.
      dtype: float32, bfloat16 or float8_e4m3.
    """
    model = dataclasses.replace(model, router=router)
    if dtype != "float8_e4m3":
        if dtype == model.config.dtype:
            return model, params
        # The configured attention was chosen for the other dtype.
        config = dataclasses.replace(model.config, dtype=dtype, attention_implementation="auto")
        return dataclasses.replace(model, config=config), params

    def rounded(path: Any, x: Array) -> Array:
        name = jax.tree_util.keystr(path)
        if x.ndim < 3 or "router" in name:  # a stack of vectors: norms and biases
            return x
        scale = float(jnp.finfo(jnp.float8_e4m3fn).max) / jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True)
        scale = jnp.where(jnp.isfinite(scale), scale, 1)
        return ((x * scale).astype(jnp.float8_e4m3fn).astype(x.dtype) / scale).astype(x.dtype)

    kinds = {kind: jax.tree_util.tree_map_with_path(rounded, params[kind]) for kind in set(model.config.kinds)}
    return model, {**params, **kinds}


def _mesh_of(params: Params) -> jax.sharding.Mesh:
    return params["ends"]["embedding"].sharding.mesh


@functools.partial(jax.jit, static_argnums=(0, 1))
def _prepare(engine: Engine, mesh: jax.sharding.Mesh, params: Params) -> Params:
    """Layer by layer, so that only one layer, or stack of them, at a time exists twice."""
    source = dataclasses.replace(engine.model, mesh=mesh)
    return _BETWEEN_MESHES["move"](by_layer(engine, params)[1], source, engine.model)


def by_layer(engine: Engine, params: Params) -> tuple[Model, Params]:
    """The model that samples, and its parameters in the rollout's dtype, as `prepare` leaves them."""
    model, rounded = as_sampler(engine.model, params, engine.dtype, engine.router)
    prepared = isinstance(params[model.config.kinds[0]], tuple)
    return model, params if prepared else model.unstack(rounded, model.config.compute_dtype)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _generate(
    engine: Engine, width: int, params: Params, prompts: Array, lengths: Array, uids: Array, limits: Array, key: Key
) -> Rollout:
    keys = answer_keys(key, uids, engine.group_size)
    decoder = engine.decoder(params, prompts[:, :width], lengths, keys, limits)
    rollout = _assemble(decoder, prompts, *decode(decoder, engine.slots))
    rest = sharding.constrain_rows(rollout.replace(routes=Routes()), decoder.model.mesh)
    return rest.replace(routes=sharding.constrain_rows(rollout.routes, decoder.model.mesh, 1))


def _assemble(decoder: Decoder, prompts: Array, answers: Answers, routing: Routing | None) -> Rollout:
    """Put prompt and answer side by side, without a gap, in rows that hold the widest of `prompts`."""
    of_group = functools.partial(jnp.repeat, repeats=decoder.group)
    prompts, start = of_group(prompts, axis=0), of_group(decoder.lengths, axis=0)
    bound, width = answers.tokens.shape[1], prompts.shape[1]
    count = answers.count[:, None]
    index = jnp.arange(width + bound)[None] - start[:, None]
    mask = (index >= 0) & (index < count)
    at = jnp.clip(index, 0, bound - 1)
    final = jnp.take_along_axis(answers.tokens, count - 1, axis=1)[:, 0]
    in_prompt, fed = (m[None, :, :, None] for m in (index < 0, mask & (index < count - 1)))

    def beside(prompt: Any, answer: Any, empty: int) -> Array:  # [l b t x] of [l p tp x] and [b n l x]
        prompt = jnp.pad(of_group(prompt, axis=1), ((0, 0), (0, 0), (0, width + bound - prompt.shape[2]), (0, 0)))
        answer = jnp.take_along_axis(answer, at[:, :, None, None], axis=1).transpose(2, 0, 1, 3)
        return jnp.where(in_prompt, prompt, jnp.where(fed, answer, jnp.asarray(empty, prompt.dtype)))

    record = None
    if routing is not None and answers.experts is not None:
        logits = None if answers.logits is None else beside(routing.logits, answers.logits, 0)
        record = Routing(beside(routing.experts, answers.experts, no_record(routing.experts)), logits)
    kept = answers.kept
    if kept is not None:
        kept = jnp.where(mask[..., None], jnp.take_along_axis(kept, at[..., None], axis=1), -1)
    padded = jnp.pad(prompts, ((0, 0), (0, bound)))
    return Rollout(
        tokens=jnp.where(mask, jnp.take_along_axis(answers.tokens, at, axis=1), jnp.where(index < 0, padded, 0)),
        segment_ids=(index < count).astype(jnp.int32),
        loss_mask=mask,
        sampler_logprobs=jnp.where(mask, jnp.take_along_axis(answers.logprobs, at, axis=1), 0.0),
        truncated=~is_end(final, decoder.end_ids),
        kept=kept,
        routes=Routes(sampled=record),
    )
