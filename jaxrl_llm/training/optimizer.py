"""AdamW with a schedule, global-norm clipping, a weight-decay mask and a learning-rate factor for the router.

All of it is float32 arithmetic on float32 moments. A learning rate of 1e-6 is far below the rounding of bfloat16 (a
weight of 0.02 has neighbours at a distance of 1.2e-4), so a narrower parameter is updated through a float32 master.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import optax

from jaxrl_llm.ground.declared import Block, declared
from jaxrl_llm.ground.precision import narrow, wide
from jaxrl_llm.training.state import Trained


@dataclasses.dataclass(frozen=True)
class OptimizerConfig(Block, prefix="optimizer."):
    """AdamW."""

    learning_rate: float = declared(1.5e-4, least=0)
    schedule: str = declared("constant", "after the warm-up", among=("constant", "linear", "cosine"))
    warmup_steps: int = declared(0, "optimizer steps", least=0)
    final_fraction: float = declared(0.1, "final rate of linear and cosine, as a fraction", least=0)
    b1: float = declared(0.9, least=0, below=1)
    b2: float = declared(0.95, least=0, below=1)
    eps: float = declared(1e-8, above=0)
    weight_decay: float = declared(0.0, "on matrices; never on norms and embeddings", least=0)
    clip_norm: float = declared(1.0, "global gradient norm; 0: off", least=0)
    router_factor: float = declared(1.0, "learning-rate factor of the router; 0: frozen", least=0)


def decayed(params: Any) -> Any:
    """Weight decay acts on matrices, not on norms, embeddings, biases or a value head."""
    return jax.tree.map(lambda spared: not spared, _named(params, "norm", "embedding", "bias", "sinks", "value_head"))


def _named(params: Any, *words: str) -> Any:
    """Return whether one of these words is in the path of a parameter."""
    return jax.tree.map_with_path(lambda path, _: any(word in jax.tree_util.keystr(path) for word in words), params)


def rate_doubts(rates: Mapping[str, float]) -> dict[str, str]:
    """A warning, {name: text}, about learning rates, {field: rate}, that are too high for AdamW.

    Raises:
      ValueError: one is above 1. An update moves every parameter by about its rate, so nothing of the model is left.
    """
    high = {field: rate for field, rate in rates.items() if rate > _HIGH}
    shown = ", ".join(f"{field}={rate:g}" for field, rate in high.items())
    moved = f"{shown}: an update of AdamW moves every parameter by about so much; rates that learn are below {_HIGH:g}"
    if any(rate > 1 for rate in high.values()):
        raise ValueError(f"{moved}, and above 1 nothing of the model is left; set it to 1e-3 or less")
    return {"learning_rate": moved} if high else {}


_HIGH = 0.1


def make_schedule(config: OptimizerConfig, total_steps: int) -> optax.Schedule:
    """The learning rate of optimizer step 0, 1, ...: warm-up, then the schedule.

    Args:
      total_steps: optimizer steps of the run, at whose end a decay arrives at `final_fraction` of the peak.
    """
    peak, after = config.learning_rate, max(total_steps - config.warmup_steps, 1)
    decay = {
        "constant": optax.constant_schedule(peak),
        "linear": optax.linear_schedule(peak, peak * config.final_fraction, after),
        "cosine": optax.cosine_decay_schedule(peak, after, config.final_fraction),
    }[config.schedule]
    warmup = optax.linear_schedule(0.0, peak, config.warmup_steps)
    return optax.join_schedules([warmup, decay], [config.warmup_steps]) if config.warmup_steps else decay


def make_optimizer(
    config: OptimizerConfig, total_steps: int, critic_learning_rate: float | None = None, *, masters: bool = True
) -> optax.GradientTransformation:
    """clip -> AdamW(schedule) -> router factor, for the policy and with its own rate for a separate critic.

    Each of the two has its own moments and its own gradient norm. Equal arguments return the same object, so that
    compiled steps are shared.

    Args:
      total_steps: optimizer steps, N a rollout.
      critic_learning_rate: None if there is no separate critic.
      masters: keep a float32 copy of every narrower parameter, which takes the updates; the parameter is its rounding.
        Otherwise an update below a parameter's rounding is lost.
    """
    return _made(config, 0 if config.schedule == "constant" else total_steps, critic_learning_rate, masters)


@functools.lru_cache(maxsize=64)
def _made(config: OptimizerConfig, total_steps: int, critic_learning_rate: float | None, masters: bool) -> Any:
    def of(config: OptimizerConfig) -> optax.GradientTransformation:
        widened = _in_float32(_adamw(config, total_steps))
        return _with_masters(widened) if masters else widened

    policy = of(config)
    if critic_learning_rate is None:
        return policy
    of_critic = dataclasses.replace(config, learning_rate=critic_learning_rate, router_factor=1.0)
    return optax.partition({"policy": policy, "critic": of(of_critic)}, Trained("policy", "critic"))


class WithMasters(NamedTuple):
    """State of an optimizer that updates float32 masters of parameters that are narrower."""

    masters: Any  # optax.MaskedNode in the places of parameters that are float32 themselves
    inner: Any


def _with_masters(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The optimizer with masters, where there are narrow parameters: what it adds to one gives the rounding of its new
    master."""

    def init(params: Any) -> Any:
        masters = jax.tree.map(lambda p: wide(p) if narrow(p) else optax.MaskedNode(), params)
        inner = optimizer.init(params)
        return WithMasters(masters, inner) if jax.tree.leaves(masters) else inner

    def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if not isinstance(state, WithMasters):
            return optimizer.update(gradients, state, params)
        whole = jax.tree.map(lambda p, m: m if narrow(p) else p, params, state.masters)
        changes, inner = optimizer.update(gradients, state.inner, whole)
        new = optax.apply_updates(whole, changes)
        masters = jax.tree.map(lambda p, m, n: n if narrow(p) else m, params, state.masters, new)
        rounded = jax.tree.map(
            lambda p, n, change: wide(n.astype(p.dtype)) - wide(p) if narrow(p) else change, params, new, changes
        )
        return rounded, WithMasters(masters, inner)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def _in_float32(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The optimizer with moments and arithmetic of at least float32, whatever the types of parameters and gradients."""

    def init(params: Any) -> Any:
        return optimizer.init(jax.tree.map(wide, params))

    def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return optimizer.update(jax.tree.map(wide, gradients), state, jax.tree.map(wide, params))

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def _adamw(config: OptimizerConfig, total_steps: int) -> optax.GradientTransformation:
    schedule = make_schedule(config, total_steps)
    parts = [optax.clip_by_global_norm(config.clip_norm)] if config.clip_norm else []
    parts.append(
        optax.adamw(schedule, config.b1, config.b2, config.eps, weight_decay=config.weight_decay, mask=decayed)
    )
    if config.router_factor != 1:
        parts.append(optax.masked(optax.scale(config.router_factor), lambda params: _named(params, "router")))
    return optax.chain(*parts)
