"""The rollout engine: one prefill per prompt, shared by its group, then a jitted loop that decodes every answer."""

import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import sharding
from jaxrl_llm.array_typing import Array, Bool, Float, Integer, Key, Params
from jaxrl_llm.models import KVCache, Model, kv_cache
from jaxrl_llm.models.routing import Routing, no_record
from jaxrl_llm.rollout.sampling import Sampling, answer_keys, draw
from jaxrl_llm.rollout.trajectory import Trajectory

__all__ = ["Engine"]


@dataclasses.dataclass(frozen=True)
class Engine:
    """How answers are sampled: the model, the distribution, the group and the bounds. Equal engines share one trace."""

    model: Model
    sampling: Sampling
    group_size: int
    max_new_tokens: int
    eos_id: int
    slots: int = 0  # answers decoded at once; 0 = all
    dtype: str = "float32"  # of weights, activations and cache; router, logits and log-probs stay float32
    record_routing: bool = True

    def __post_init__(self) -> None:
        for name, least in (("group_size", 1), ("max_new_tokens", 1), ("slots", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"rollout.{name}={getattr(self, name)} must be at least {least}")

    def generate(
        self,
        params: Params,
        prompts: Integer[Array | np.ndarray, "p tp"],
        lengths: Integer[Array | np.ndarray, "p"],
        uids: Integer[Array | np.ndarray, "p"],
        key: Key,
    ) -> Trajectory:
        """Sample `group_size` answers to every prompt.

        Args:
          params: of `Model.init`; cast once to the rollout dtype.
          prompts: [p tp], left-aligned, padding right.
          lengths: [p], tokens in each prompt, 1..tp.
          uids: [p], what tells prompts apart: an answer depends on (key, uid, sample index), never on its place.
          key: of this rollout.

        Returns:
          b = p * group_size rows in (prompt, sample) order, t = tp + max_new_tokens.

        Raises:
          ValueError: an empty prompt, or a length beyond the prompts' width.
        """
        host = np.asarray(lengths)
        if host.size and (host.min() < 1 or host.max() > prompts.shape[1]):
            raise ValueError(f"lengths={host.tolist()} must lie in 1..{prompts.shape[1]}, the width of prompts")
        return _generate(self, params, jnp.asarray(prompts), jnp.asarray(lengths), jnp.asarray(uids), key)


class _Answers(flax.struct.PyTreeNode):
    """What was sampled so far, step-major: row n holds the n-th token of every answer."""

    tokens: Integer[Array, "n b"]
    logprobs: Float[Array, "n b"]
    experts: Integer[Array, "n l b k"] | None


class _State(flax.struct.PyTreeNode):
    step: Integer[Array, ""]
    cache: KVCache
    tokens: Integer[Array, "b"]  # sampled last, fed next
    count: Integer[Array, "b"]  # answer tokens so far
    done: Bool[Array, "b"]
    answers: _Answers


@functools.partial(jax.jit, static_argnums=0)
def _generate(engine: Engine, params: Params, prompts: Array, lengths: Array, uids: Array, key: Key) -> Trajectory:
    model = dataclasses.replace(engine.model, config=dataclasses.replace(engine.model.config, dtype=engine.dtype))
    params = model.unstack(params, model.config.compute_dtype)
    group, bound = engine.group_size, engine.max_new_tokens
    width = prompts.shape[1]
    keys = answer_keys(key, uids, group)

    segment_ids = (jnp.arange(width)[None] < lengths[:, None]).astype(jnp.int32)
    out = model.apply(params, prompts, segment_ids=segment_ids, cache=kv_cache.empty(model.config, len(prompts), width))
    last = jnp.take_along_axis(out.hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
    expand = lambda x, axis=0: sharding.constrain_rows(jnp.repeat(x, group, axis=axis), model.mesh, axis)  # noqa: E731
    grow = lambda x: jnp.pad(expand(x), ((0, 0), (0, 0), (0, bound - 1), (0, 0)))  # noqa: E731
    assert out.cache is not None
    cache, start = jax.tree.map(grow, out.cache), expand(lengths)
    rows = start.shape[0]
    zero = jnp.zeros(rows, jnp.int32)
    tokens, logprobs = draw(expand(model.logits(params, last)), keys, zero, engine.sampling)

    experts = None
    if engine.record_routing and out.routing is not None:
        recorded = out.routing.experts
        experts = jnp.full((bound, recorded.shape[0], rows, recorded.shape[-1]), no_record(recorded), recorded.dtype)
    answers = _Answers(
        tokens=jnp.zeros((bound, rows), jnp.int32).at[0].set(tokens),
        logprobs=jnp.zeros((bound, rows), jnp.float32).at[0].set(logprobs),
        experts=experts,
    )

    def step(state: _State) -> _State:
        n = state.step
        out = model.apply(params, state.tokens[:, None], positions=(start + n)[:, None], cache=state.cache)
        tokens, logprobs = draw(model.logits(params, out.hidden[:, 0]), keys, zero + n + 1, engine.sampling)
        answers = state.answers
        experts = answers.experts
        if experts is not None and out.routing is not None:
            experts = experts.at[n].set(out.routing.experts[:, :, 0])
        assert out.cache is not None
        return _State(
            step=n + 1,
            cache=out.cache,
            tokens=tokens,
            count=state.count + ~state.done,
            done=state.done | (tokens == engine.eos_id),
            answers=_Answers(answers.tokens.at[n + 1].set(tokens), answers.logprobs.at[n + 1].set(logprobs), experts),
        )

    state = _State(jnp.zeros((), jnp.int32), cache, tokens, zero + 1, tokens == engine.eos_id, answers)
    state = jax.lax.while_loop(lambda s: (s.step < bound - 1) & ~jnp.all(s.done), step, state)
    routing = out.routing.experts if experts is not None and out.routing is not None else None
    return _assemble(state, expand(prompts), start, None if routing is None else expand(routing, 1))


def _assemble(state: _State, prompts: Array, start: Array, routing: Array | None) -> Trajectory:
    """Prompt and answer side by side, without a gap."""
    answers, width = state.answers, prompts.shape[1]
    bound = answers.tokens.shape[0]
    column = jnp.arange(width + bound)[None]
    index = column - start[:, None]
    mask = (index >= 0) & (index < state.count[:, None])
    at = jnp.clip(index, 0, bound - 1)
    take = lambda x: jnp.take_along_axis(x.T, at, axis=1)  # noqa: E731
    wide = jnp.pad(prompts, ((0, 0), (0, bound)))
    tokens = jnp.where(mask, take(answers.tokens), jnp.where(index < 0, wide, 0))
    fed = (index >= 0) & (index < state.count[:, None] - 1)
    experts = None
    if routing is not None and answers.experts is not None:
        none = no_record(routing)
        sampled = jnp.take_along_axis(answers.experts.transpose(1, 2, 0, 3), at[None, :, :, None], axis=2)
        given = jnp.pad(routing, ((0, 0), (0, 0), (0, bound), (0, 0)), constant_values=none)
        experts = jnp.where((index < 0)[None, :, :, None], given, jnp.where(fed[None, :, :, None], sampled, none))
    return Trajectory(
        tokens=tokens,
        segment_ids=(index < state.count[:, None]).astype(jnp.int32),
        loss_mask=mask,
        sampler_logprobs=jnp.where(mask, take(answers.logprobs), 0.0),
        truncated=~state.done,
        routing=None if experts is None else Routing(experts=experts),
    )
