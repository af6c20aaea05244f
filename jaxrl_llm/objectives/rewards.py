"""Rewards before they become advantages: sums of sources, overlong rules, the KL inside the reward."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.ground.array_typing import Array, Bool, Float, Integer, Mask, PerAnswer, PerToken
from jaxrl_llm.ground.metrics import Mean, Metric
from jaxrl_llm.ground.ranges import in_range, one_of


def weighted_rewards(
    sources: Mapping[str, Any], weights: Mapping[str, float], *, where: Bool[Array, "b"] | None = None
) -> tuple[PerAnswer, dict[str, Metric]]:
    """R = sum over names of weight * source, and `reward/NAME` of every source, before its weight.

    One without a weight is logged and not summed; weights may be negative. `where`: answers that enter the metrics.

    Raises:
      ValueError: no weight, a weight for an unknown source, or sources of different shapes.
    """
    if not weights:
        raise ValueError(f"weights is empty; give at least one of {', '.join(sources)} a weight")
    for name in weights:
        one_of("reward source", name, sources)
    shapes = {name: jnp.shape(x) for name, x in sources.items()}
    if len(set(shapes.values())) > 1 or any(len(shape) != 1 for shape in shapes.values()):
        raise ValueError(f"reward sources have shapes {shapes}; give each one number an answer, [b]")
    rewards = {name: jnp.asarray(x, jnp.float32) for name, x in sources.items()}
    counted = jnp.ones(next(iter(shapes.values())), bool) if where is None else where
    metrics: dict[str, Metric] = {f"reward/{name}": Mean.of(x, counted) for name, x in rewards.items()}
    total = sum((weight * rewards[name] for name, weight in weights.items()), jnp.zeros(counted.shape))
    return total, jax.lax.stop_gradient(metrics)


def overlong_penalty(lengths: Integer[Array, "b"], *, max_length: int, cache: int) -> PerAnswer:
    """Soft overlong punishment: 0 up to L - C, then (L - C - |y|) / C down to -1 at L, -1 beyond.

    |y| is the answer's length in tokens, EOS included; L = max_length; C = cache is the width of the ramp, 0 < C <= L.

    Source: DAPO, arXiv 2503.14476 eq. 13 (L 20480, C 4096).
    """
    in_range("cache", cache, above=0, most=max_length)
    return -jnp.clip((lengths - (max_length - cache)) / cache, 0.0, 1.0)


def overlong_filter(mask: Mask, truncated: Bool[Array, "b"]) -> Mask:
    """The mask without truncated answers: out of loss and count.  Source: DAPO, arXiv 2503.14476 section 3.4."""
    return mask & ~truncated[:, None]


def token_rewards(
    rewards: PerAnswer | PerToken,
    mask: Mask,
    *,
    old_logprobs: PerToken | None = None,
    ref_logprobs: PerToken | None = None,
    kl_coef: float | Float[Array, ""] = 0.0,
) -> PerToken:
    """rho_t = R 1[t = T] - beta (log pi_old - log pi_ref)_t, with T the last response token. [b] -> [b t].

    Rewards [b t] stand at the tokens that earned them already.

    The KL part is a constant (k1 inside the reward), so its return-to-go is the sequence KL.

    Source: InstructGPT, arXiv 2203.02155 section 3.5.
    """
    steered = isinstance(kl_coef, jax.Array)
    if not steered:
        in_range("reward_kl_coef", kl_coef, least=0, below=math.inf)
    if rewards.ndim == 1:
        later = jnp.cumsum(mask[:, ::-1], axis=1)[:, ::-1]
        out = jnp.where(mask & (later == 1), jnp.broadcast_to(rewards[:, None], mask.shape), 0)
    else:
        out = jnp.where(mask, rewards, 0)
    if steered or kl_coef:
        if old_logprobs is None or ref_logprobs is None:
            raise ValueError(f"reward_kl_coef={kl_coef} needs old_logprobs and ref_logprobs; score both or set it to 0")
        out = out - kl_coef * jnp.where(mask, old_logprobs - ref_logprobs, 0)
    return out


@dataclasses.dataclass(frozen=True)
class KlController:
    """beta_{k+1} = beta_k (1 + gain e_k) with e_k = clip(KL_k / target - 1, -0.2, 0.2); fixed without a target.

    The state is one number, beta: it starts at `initial`, goes into the next rollout's rewards (`token_rewards`) and
    into the checkpoint. KL is the mean over answers of the sum over tokens of log pi - log pi_ref, in nats an answer,
    measured on the rollout itself: the quantity that the reward pays for.

    Source: Ziegler et al. 2019, arXiv 1909.08593 section 2.2 (gain 0.1).
    """

    initial: float
    target: float | None = None
    gain: float = 0.1

    def __post_init__(self) -> None:
        in_range("reward_kl_coef", self.initial, least=0, below=math.inf)
        in_range("kl_gain", self.gain, above=0, most=1)
        if self.target is not None:
            in_range("kl_target", self.target, above=0)
            if not self.initial:
                raise ValueError(
                    f"kl_target={self.target!r} with reward_kl_coef=0 never moves, as the coefficient is multiplied; "
                    "start from a positive reward_kl_coef"
                )

    def next(self, coefficient: float, kl: float) -> float:
        """The coefficient of the next rollout, from this one's and its KL; FloatingPointError if that is not finite."""
        if self.target is None:
            return coefficient
        if not math.isfinite(kl):
            raise FloatingPointError(f"kl={kl} cannot steer reward_kl_coef; look at the step's log-probs")
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        return coefficient * (1 + self.gain * error)
