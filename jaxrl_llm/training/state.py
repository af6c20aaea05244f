"""What training carries from step to step, and the batch that it learns from."""

from collections.abc import Callable
from typing import Any

import chex
import flax.struct
import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxrl_llm.ground import sharding
from jaxrl_llm.ground.array_typing import Mask, PerToken, SegmentIds, Tokens
from jaxrl_llm.models import Model
from jaxrl_llm.training.routing_records import RoutingRecords

__all__ = [
    "TrainBatch",
    "TrainState",
    "check_shapes",
    "join",
    "make_state",
    "parameter_axes",
    "split",
    "state_shardings",
    "with_value_head",
]


class TrainState(flax.struct.PyTreeNode):
    """params: the policy (with "value_head" for critic.kind = head). critic: a separate critic's parameters or None.

    updates [] int32 counts optimizer steps; a minibatch without a single unmasked token does not count. All fields are
    untyped, because trees of this structure also hold host arrays, abstract shapes and shardings.
    """

    params: Any
    opt_state: Any
    critic: Any
    critic_opt_state: Any
    updates: Any


class TrainBatch(flax.struct.PyTreeNode):
    """A scored rollout, pairs or given answers; every array is indexed [b t], every record of routing [l b t x].

    Of pairs, rows 2 i and 2 i + 1 are the chosen and the rejected answer of pair i, with advantages 1 and -1. Given
    answers have advantage 1. Both have no sampler. old_logprobs is None where the first forward itself gives them (one
    update a rollout) or no objective reads them.
    """

    tokens: Tokens
    segment_ids: SegmentIds
    loss_mask: Mask
    advantages: PerToken
    sampler_logprobs: PerToken | None = None
    old_logprobs: PerToken | None = None
    ref_logprobs: PerToken | None = None
    old_values: PerToken | None = None
    returns: PerToken | None = None
    margins: PerToken | None = None
    routing: RoutingRecords = RoutingRecords()


def with_value_head(params: Any, hidden_size: int) -> Any:
    """Parameters with a linear value head that starts at 0."""
    head = {"kernel": jnp.zeros(hidden_size, jnp.float32), "bias": jnp.zeros((), jnp.float32)}
    return dict(params) | {"value_head": head}


def split(params: Any, trains: Callable[[tuple[str, ...]], bool]) -> tuple[Any, Any]:
    """(trained, frozen) parameters by the path of each, such as ("moe", "mlp", "router"); `join` undoes it."""
    flat = flatten_dict(params)
    trained, frozen = ({path: x for path, x in flat.items() if bool(trains(path)) is part} for part in (True, False))
    return unflatten_dict(trained), unflatten_dict(frozen)


def join(trained: Any, frozen: Any) -> Any:
    """The parameters of the policy from those that are trained and those that are not.

    Raises:
      ValueError: a parameter is in both.
    """
    ours, others = flatten_dict(trained), flatten_dict(frozen)
    both = sorted(".".join(path) for path in ours.keys() & others.keys())
    if both:
        raise ValueError(f"{', '.join(both[:3])} is both trained and frozen; part the parameters with `split`")
    return unflatten_dict(ours | others)


def parameter_axes(model: Model, params: Any, axes: Any = None) -> Any:
    """Logical axes of these parameters, all or a part of the model's (or of what has these axes), and a head."""
    axes = flatten_dict((axes or model.axes()) | {"value_head": {"kernel": ("norm",), "bias": ()}})
    return unflatten_dict({path: axes[path] for path in flatten_dict(params)})


def state_shardings(
    model: Model,
    state: TrainState,
    optimizer: optax.GradientTransformation,
    critic_optimizer: optax.GradientTransformation | None = None,
    axes: Any = None,
) -> TrainState:
    """The sharding of every array of a state on the model's mesh, from the logical axes of the parameters.

    Args:
      state: of arrays or of abstract shapes, so that a program can be lowered for devices that need not be present.
      axes: logical axes of the parameters, where these are not parameters of the model (adapters).
    """
    mesh: Any = model.mesh
    whole = sharding.replicated(mesh)

    def of_moments(optimizer: Any, opt_state: Any, of_parameters: Any) -> Any:
        """The optimizer's moments are sharded like their parameters."""
        if optimizer is None:
            return None
        return optax.tree_map_params(
            optimizer, lambda _, where: where, opt_state, of_parameters, transform_non_params=lambda _: whole
        )

    params = sharding.shardings(parameter_axes(model, state.params, axes), state.params, mesh)
    critic = None
    if state.critic is not None:
        critic = sharding.shardings(parameter_axes(model, state.critic, axes), state.critic, mesh)
    return TrainState(
        params=params,
        opt_state=of_moments(optimizer, state.opt_state, params),
        critic=critic,
        critic_opt_state=of_moments(critic_optimizer, state.critic_opt_state, critic),
        updates=whole,
    )


def make_state(
    model: Model,
    params: Any,
    optimizer: optax.GradientTransformation,
    critic: Any = None,
    critic_optimizer: optax.GradientTransformation | None = None,
    axes: Any = None,
) -> TrainState:
    """A fresh state, all of it on the model's mesh; `jax.eval_shape` gives its shapes without making an array.

    Args:
      params: those that are trained: the policy's, a part of them (`split`), or adapters.
      axes: as for `state_shardings`.
    """

    def moments(optimizer: Any, params: Any, where: Any) -> Any:
        return None if optimizer is None else jax.jit(optimizer.init, out_shardings=where)(params)

    def shapes(optimizer: Any, params: Any) -> Any:
        return None if optimizer is None else jax.eval_shape(optimizer.init, params)

    where = TrainState(None, None, None, None, None)
    updates = jnp.zeros((), jnp.int32)
    if model.mesh is not None:
        like = TrainState(
            params=params,
            opt_state=shapes(optimizer, params),
            critic=critic,
            critic_opt_state=shapes(critic_optimizer, critic),
            updates=updates,
        )
        where = state_shardings(model, like, optimizer, critic_optimizer, axes)
        places = (where.params, where.critic, where.updates)
        params, critic, updates = jax.device_put((params, critic, updates), places)
    return TrainState(
        params=params,
        opt_state=moments(optimizer, params, where.opt_state),
        critic=critic,
        critic_opt_state=moments(critic_optimizer, critic, where.critic_opt_state),
        updates=updates,
    )


def check_shapes(batch: TrainBatch) -> None:
    """Every array is [b t] and every record [l b t x]; checked at trace time, so it costs a step nothing."""
    chex.assert_equal_shape([x for name, x in vars(batch).items() if name != "routing" and x is not None])
    records = jax.tree.leaves(batch.routing)
    chex.assert_rank(records, 4)
    for record in records:
        chex.assert_equal(record.shape[1:3], batch.tokens.shape)
