"""What training carries from step to step, and the batch that it learns from."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from jaxrl_llm import sharding
from jaxrl_llm.array_typing import Mask, PerToken, SegmentIds, Tokens
from jaxrl_llm.models.routing import Routing
from jaxrl_llm.models.transformer import Model

__all__ = ["TrainBatch", "TrainState", "make_state", "parameter_axes", "with_value_head"]


class TrainState(flax.struct.PyTreeNode):
    """params: the policy (with "value_head" for critic.kind = head). critic: a separate critic's parameters or None.

    updates [] int32 counts optimizer steps; a minibatch without a single unmasked token does not count. Untyped, as all
    fields are: trees of states also carry host arrays, abstract shapes and shardings.
    """

    params: Any
    opt_state: Any
    critic: Any
    critic_opt_state: Any
    updates: Any


class TrainBatch(flax.struct.PyTreeNode):
    """A scored rollout; every array is indexed [b t], the routing [l b t k].

    old_logprobs is None where the first forward itself gives them (one update a rollout). routing is what the training
    forward must replay, recorded is the old policy's own routing, for diagnostics. sampled is the rollout's, where the
    first forward is to be compared with it.
    """

    tokens: Tokens
    segment_ids: SegmentIds
    loss_mask: Mask
    advantages: PerToken
    sampler_logprobs: PerToken
    old_logprobs: PerToken | None = None
    ref_logprobs: PerToken | None = None
    old_values: PerToken | None = None
    returns: PerToken | None = None
    routing: Routing | None = None
    recorded: Routing | None = None
    sampled: Routing | None = None


def with_value_head(params: Any, hidden_size: int) -> Any:
    """Parameters with a linear value head that starts at 0."""
    head = {"kernel": jnp.zeros(hidden_size, jnp.float32), "bias": jnp.zeros((), jnp.float32)}
    return dict(params) | {"value_head": head}


def parameter_axes(model: Model, params: Any) -> Any:
    """Logical axes of the parameters, a value head included."""
    axes = model.axes()
    return axes | {"value_head": {"kernel": ("norm",), "bias": ()}} if "value_head" in params else axes


def make_state(
    model: Model,
    params: Any,
    optimizer: optax.GradientTransformation,
    critic: Any = None,
    critic_optimizer: optax.GradientTransformation | None = None,
) -> TrainState:
    """A fresh state, all of it on the model's mesh: the optimizer's moments are born where their parameters are."""

    def placed(params: Any) -> Any:
        if model.mesh is None:
            return params
        shapes = jax.eval_shape(lambda: params)
        return jax.device_put(params, sharding.shardings(parameter_axes(model, params), shapes, model.mesh))

    def born(optimizer: optax.GradientTransformation, params: Any) -> Any:
        if model.mesh is None:
            return jax.jit(optimizer.init)(params)
        where = jax.tree.map(lambda x: x.sharding, params)
        shapes = jax.eval_shape(optimizer.init, params)
        whole = sharding.replicated(model.mesh)
        places = optax.tree_map_params(optimizer, lambda _, s: s, shapes, where, transform_non_params=lambda _: whole)
        return jax.jit(optimizer.init, out_shardings=places)(params)

    params, critic = placed(params), None if critic is None else placed(critic)
    critic_opt_state = born(critic_optimizer, critic) if critic_optimizer is not None else None
    updates = jnp.zeros((), jnp.int32)
    if model.mesh is not None:
        updates = jax.device_put(updates, sharding.replicated(model.mesh))
    return TrainState(params, born(optimizer, params), critic, critic_opt_state, updates)
