"""The divergence of the policy from a teacher over the vocabulary, by token, inside the training forward."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxrl_llm.ground import sharding
from jaxrl_llm.ground.array_typing import Array, Float, PerToken
from jaxrl_llm.models import Model, Rows, from_chunks, in_chunks, score_chunk, scoring
from jaxrl_llm.objectives.distillation import generalized_jsd, top_and_rest
from jaxrl_llm.rollout.rollout import Rollout


@dataclasses.dataclass(frozen=True)
class TeacherDivergence:
    """`generalized_jsd` of two models at the same prefixes, without the logits of more than a chunk of tokens.

    The teacher reads each micro-batch once and routes freshly. Both logits of a chunk are computed again in the
    backward, so the memory is 2 x chunk x vocabulary however many tokens there are.

    model: the teacher's. top_k: as in `top_and_rest`; 0: the whole vocabulary. add_tail: False leaves the rest out.
    """

    model: Model
    beta: float
    top_k: int = 0
    add_tail: bool = True

    def __call__(
        self,
        frozen: Any,
        student: Model,
        params: Any,
        hidden: Float[Array, "b t d"],
        micro: Rollout,
        *,
        temperature: float,
        rows: Rows,
        most: int,
    ) -> PerToken:
        """D of softmax(logits / temperature) of both at the state before token t, 0 outside the loss mask.

        Args:
          frozen: the teacher's parameters.
          params, hidden: of the student, whose forward gave the states.
          most: tokens of the mask in a row; 0: all may be.
        """
        taught = self.model.apply(frozen, micro.tokens, segment_ids=micro.segment_ids, rows=rows).hidden
        heads = student.head(params), self.model.head(frozen)
        divisors = [temperature * model.config.logits_scaling for model in (student, self.model)]
        how: Any = {"divisors": divisors, "beta": self.beta, "top_k": self.top_k, "add_tail": self.add_tail}
        how["platform"] = sharding.platform(student.mesh)
        of_states = _on_devices(student.mesh, functools.partial(divergence_of_states, **how))

        def of(states: Any, tokens: Array, kept: Array | None) -> tuple[PerToken, ...]:
            flat = [sharding.flat(x, sharding.MICRO_BATCH, student.mesh) for x in states]
            found = of_states(*flat, *heads)
            return (sharding.unflat(found, tokens.shape, sharding.MICRO_BATCH, student.mesh),)

        time = micro.tokens.shape[1]
        whole = not 0 < most < time or sharding.shards("time", student.mesh) > 1
        source = scoring.source_of(micro.segment_ids, rows)
        given = micro.tokens, micro.loss_mask, None, source, time if whole else most
        return scoring.of_some(of, (hidden, taught), *given)[0]


def divergence_of_states(
    own: Float[Array, "n d"],
    taught: Float[Array, "n e"],
    head: Float[Array, "d v"],
    teacher_head: Float[Array, "e w"],
    *,
    divisors: Sequence[float] = (1.0, 1.0),
    beta: float = 1.0,
    top_k: int = 0,
    add_tail: bool = True,
    platform: str = "cpu",
) -> Float[Array, "n"]:
    """`generalized_jsd` of softmax(states @ head / divisor) of policy and teacher, float32, by chunks of tokens.

    Where one head has more rows than the other, as published vocabularies are padded, those are left out.
    """
    vocabulary = min(head.shape[1], teacher_head.shape[1])

    @jax.checkpoint
    def of_chunk(states: tuple[Array, Array]) -> Array:
        logs = []
        for x, matrix, divisor in zip(states, (head, teacher_head), divisors, strict=True):
            # The cast is in here, so that the gradient of a head is summed over chunks in the head's own type.
            columns = matrix[:, :vocabulary].astype(x.dtype)
            logs.append(jax.nn.log_softmax(jnp.matmul(x, columns, preferred_element_type=jnp.float32) / divisor))
        if 0 < top_k < vocabulary:
            logs = top_and_rest(logs[0], logs[1], top_k, add_tail)
        return generalized_jsd(logs[0], logs[1], beta)

    cut = jax.tree.map(functools.partial(in_chunks, chunk=score_chunk(platform)), (own, taught))
    return from_chunks(lax.map(of_chunk, cut), len(own))


def _on_devices(mesh: Any, run: Callable[..., Array]) -> Callable[..., Array]:
    """`run` on each device's own tokens, with both heads gathered once."""
    if mesh is None or mesh.size == 1:
        return run

    def spread(*arrays: Array) -> Array:
        tokens = [sharding.spec(("tokens", None), x.shape, mesh) for x in arrays[:2]]
        heads = [sharding.spec(("embed", "vocab"), x.shape, mesh) for x in arrays[2:]]

        def on_device(own: Array, taught: Array, *parts: Array) -> Array:
            return run(own, taught, *(sharding.gathered(x, cuts, mesh) for x, cuts in zip(parts, heads, strict=True)))

        into = sharding.spec(("tokens",), arrays[0].shape[:1], mesh)
        given: Any = {"in_specs": (*tokens, *heads), "out_specs": into, "check_vma": False}
        return jax.shard_map(on_device, mesh=mesh, **given)(*arrays)

    return spread
