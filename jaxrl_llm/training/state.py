"""The state that training carries from step to step."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxrl_llm.ground import heap, sharding
from jaxrl_llm.models import Model
from jaxrl_llm.training.policy import Policy


class Trained(flax.struct.PyTreeNode):
    """Parameters that the optimizer updates: the policy's, and those of a separate critic of its architecture."""

    policy: Any
    critic: Any = None


def _moments(x: Any) -> bool:
    return isinstance(x, Trained)


class TrainState(flax.struct.PyTreeNode):
    """updates [] int32 counts optimizer steps; a minibatch without a single unmasked token does not count.

    base: the frozen parameters under the adapters of LoRA, with their scale; None without adapters. No update changes
    them and no checkpoint holds them. All fields are untyped, because trees of this structure also hold host arrays,
    abstract shapes and shardings.
    """

    trained: Trained
    opt_state: Any
    updates: Any
    base: Any = None
    scale: float = flax.struct.field(pytree_node=False, default=1.0)

    @property
    def policy(self) -> Policy:
        return Policy(self.trained.policy, self.base, self.scale)

    @property
    def critic(self) -> Policy | None:
        return None if self.trained.critic is None else Policy(self.trained.critic, self.base, self.scale)

    def saved(self) -> "Saved":
        """The state as a checkpoint has it."""
        inner = getattr(self.opt_state, "inner_states", None)
        states = (self.opt_state, None) if inner is None else (inner["policy"].inner_state, inner["critic"].inner_state)

        def part(state: Any, name: str) -> Any:
            """The optimizer's state of one part: its moments have the tree of that part's parameters."""
            return jax.tree.map(lambda x: getattr(x, name) if _moments(x) else x, state, is_leaf=_moments)

        moments = part(states[0], "policy"), part(states[1], "critic")
        return Saved(self.trained.policy, moments[0], self.trained.critic, moments[1], self.updates)

    def shapes(self) -> "TrainState":
        """This state with shapes in the place of its arrays, but for the base, which no checkpoint holds."""

        def of(x: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)

        return jax.tree.map(of, self.replace(base=None)).replace(base=self.base)

    def restored(self, saved: "Saved") -> "TrainState":
        """This state with the arrays of a checkpoint."""
        leaves, structure = jax.tree.flatten(self.replace(base=None))
        order = jax.tree.leaves(jax.tree.unflatten(structure, range(len(leaves))).saved())
        found = dict(zip(order, jax.tree.leaves(saved), strict=True))
        return jax.tree.unflatten(structure, [found[place] for place in range(len(leaves))]).replace(base=self.base)


class Saved(flax.struct.PyTreeNode):
    """The names and the order of the arrays in a checkpoint, whatever a state is like in memory."""

    params: Any
    opt_state: Any
    critic: Any
    critic_opt_state: Any
    updates: Any


def parameter_axes(model: Model, params: Any, axes: Any = None) -> Any:
    """Logical axes of these parameters, all or a part of the model's (or of what has these axes), and a head."""
    axes = flatten_dict((axes or model.axes()) | {"value_head": {"kernel": ("norm",), "bias": ()}})
    return unflatten_dict({path: axes[path] for path in flatten_dict(params)})


def state_shardings(model: Model, state: TrainState, axes: Any = None) -> TrainState:
    """The sharding of every array of a state on the model's mesh, from the logical axes of the parameters.

    Args:
      state: of arrays or of abstract shapes.
      axes: logical axes of the parameters, where these are not parameters of the model (adapters).
    """
    mesh: Any = model.mesh
    whole = sharding.replicated(mesh)

    def of(params: Any) -> Any:
        if params is None:
            return None
        return sharding.shardings(parameter_axes(model, params, axes), params, mesh)

    trained = Trained(of(state.trained.policy), of(state.trained.critic))

    def absent(x: Any) -> bool:
        return isinstance(x, optax.MaskedNode)

    def of_moments(x: Any) -> Any:
        """Moments are sharded like their parameters; an optimizer of a part has none for the other."""
        if not _moments(x):
            return whole
        return jax.tree.map(lambda m, to: m if absent(m) else to, x, trained, is_leaf=absent)

    opt_state = jax.tree.map(of_moments, state.opt_state, is_leaf=_moments)
    return TrainState(trained, opt_state, whole, scale=state.scale)


def make_state(
    model: Model,
    params: Any,
    optimizer: optax.GradientTransformation,
    critic: Any = None,
    *,
    axes: Any = None,
    base: Any = None,
    scale: float = 1.0,
) -> TrainState:
    """A fresh state on the model's mesh, as `jax.eval_shape` too can make it.

    Args:
      params: those that are trained: the policy's, or adapters on `base`.
      optimizer: of a `Trained`, as `make_optimizer` makes it.
      critic: parameters of a separate critic; None: there is none.
      axes: as for `state_shardings`.
      base: frozen parameters under adapters; None: `params` are the policy's own.
      scale: of adapters, alpha / rank.
    """
    state = TrainState(Trained(params, critic), None, jnp.zeros((), jnp.int32), scale=scale)
    if model.mesh is None:
        return state.replace(opt_state=jax.jit(optimizer.init)(state.trained), base=base)
    shapes = state.replace(opt_state=jax.eval_shape(optimizer.init, state.trained))
    where = state_shardings(model, shapes, axes)
    trained, updates = jax.device_put((state.trained, state.updates), (where.trained, where.updates))
    opt_state = jax.jit(optimizer.init, out_shardings=where.opt_state)(trained)
    return TrainState(trained, opt_state, updates, base, scale)


def settled(state: TrainState) -> TrainState:
    """The state in memory of its own, which updates overwrite, and behind it room for what is small."""
    state = state.restored(heap.owned(state.saved()))
    heap.settle()
    return state
