"""AdamW with a schedule, global-norm clipping, a weight-decay mask and a learning-rate factor for the router."""

import dataclasses
import functools
from typing import Any

import jax
import optax

from jaxrl_llm.ground.declared import Block, declared
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


def _path_holds(word: str) -> Any:
    return lambda params: jax.tree_util.tree_map_with_path(lambda p, _: word in jax.tree_util.keystr(p), params)


def decayed(params: Any) -> Any:
    """Weight decay acts on matrices, not on norms, embeddings, biases or a value head."""
    spared = ("norm", "embedding", "bias", "value_head")
    return jax.tree_util.tree_map_with_path(
        lambda path, _: not any(word in jax.tree_util.keystr(path) for word in spared), params
    )


def make_schedule(config: OptimizerConfig, total_steps: int) -> optax.Schedule:
    """The learning rate of optimizer step 0, 1, ...: warm-up, then the schedule to the end of `total_steps`."""
    peak, after = config.learning_rate, max(total_steps - config.warmup_steps, 1)
    decay = {
        "constant": optax.constant_schedule(peak),
        "linear": optax.linear_schedule(peak, peak * config.final_fraction, after),
        "cosine": optax.cosine_decay_schedule(peak, after, config.final_fraction),
    }[config.schedule]
    warmup = optax.linear_schedule(0.0, peak, config.warmup_steps)
    return optax.join_schedules([warmup, decay], [config.warmup_steps]) if config.warmup_steps else decay


def make_optimizer(
    config: OptimizerConfig, total_steps: int, critic_learning_rate: float | None = None
) -> optax.GradientTransformation:
    """clip -> AdamW(schedule) -> router factor, for the policy and with its own rate for a separate critic.

    Each of the two has its own moments and its own gradient norm. Equal arguments return the same object, so that
    compiled steps are shared.

    Args:
      total_steps: optimizer steps, N a rollout.
      critic_learning_rate: None if there is no separate critic.
    """
    total_steps = 0 if config.schedule == "constant" else total_steps
    if critic_learning_rate is None:
        return _make(config, total_steps)
    return _partitioned(
        _make(config, total_steps),
        _make(dataclasses.replace(config, learning_rate=critic_learning_rate, router_factor=1.0), total_steps),
    )


@functools.lru_cache(maxsize=64)
def _partitioned(
    policy: optax.GradientTransformation, critic: optax.GradientTransformation
) -> optax.GradientTransformation:
    return optax.partition({"policy": policy, "critic": critic}, Trained("policy", "critic"))


@functools.lru_cache(maxsize=64)
def _make(config: OptimizerConfig, total_steps: int) -> optax.GradientTransformation:
    schedule = make_schedule(config, total_steps)
    parts = [optax.clip_by_global_norm(config.clip_norm)] if config.clip_norm else []
    parts.append(
        optax.adamw(schedule, config.b1, config.b2, config.eps, weight_decay=config.weight_decay, mask=decayed)
    )
    if config.router_factor != 1:
        parts.append(optax.masked(optax.scale(config.router_factor), _path_holds("router")))
    return optax.chain(*parts)
