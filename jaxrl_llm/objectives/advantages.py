"""Advantages: how good an answer (or a token) was, against the answers to its prompt or a value function."""

import abc
import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxrl_llm.ground.array_typing import Array, Bool, Float, Mask, PerAnswer, PerToken
from jaxrl_llm.ground.masking import masked_mean
from jaxrl_llm.ground.ranges import one_of, within
from jaxrl_llm.objectives.parts import Part, hyperparameter
from jaxrl_llm.objectives.rewards import KlController, token_rewards

_STD = ("sample", "population", "batch", "none")
_BASELINE = ("mean", "leave_one_out", "none")


def _check_convention(std: str, baseline: str) -> None:
    one_of("std", std, _STD)
    one_of("baseline", baseline, _BASELINE)
    if baseline == "none" and std != "none":
        raise ValueError(f'baseline="none" with std={std!r} has no centre to scale around; set std="none"')


def in_groups(rewards: PerAnswer, group_size: int) -> Float[Array, "g n"]:
    """Rewards by group; raises ValueError if groups do not divide them or one is not finite."""
    rewards = jnp.asarray(rewards)
    if rewards.ndim != 1:
        raise ValueError(f"rewards has shape {rewards.shape}; give one number an answer, [b]")
    if group_size < 1 or rewards.shape[0] % group_size:
        raise ValueError(f"group_size={group_size} must divide batch={rewards.shape[0]}; set rollout.group_size")
    if not isinstance(rewards, Tracer) and not np.isfinite(np.asarray(rewards)).all():
        bad = np.flatnonzero(~np.isfinite(np.asarray(rewards)))[:8].tolist()
        raise ValueError(f"rewards of answers {bad} are not finite; make the verifier return finite numbers")
    return rewards.reshape(-1, group_size)


def group_advantages(
    rewards: PerAnswer,
    *,
    group_size: int,
    std: str = "sample",
    baseline: str = "mean",
    eps: float = 1e-6,
    where: Bool[Array, "g"] | None = None,
) -> PerAnswer:
    """A_i = (R_i - b_i) / (sigma + eps) within groups of G = `group_size` contiguous answers.

    A group whose rewards are all alike, and a group of one, gives exactly 0 (unless there is no baseline).

    Args:
      std: sigma. "sample": of the group, divisor G - 1; "population": divisor G; "batch": of all rewards of the batch,
        divisor b - 1; "none": no division.
      baseline: b_i. "mean": of the group; "leave_one_out": of the other answers, = G / (G - 1) times the centred
        reward; "none": 0.
      where: groups that enter the deviation of the batch, all if None: groups that are only padding stay out.

    Raises:
      ValueError: group_size does not divide b; a reward is not finite; a standard deviation without a baseline.

    Source: GRPO, arXiv 2402.03300 section 4.1.2; Dr. GRPO, arXiv 2503.20783 (std "none"); RLOO, arXiv 2402.14740 eq. 7.
    """
    _check_convention(std, baseline)
    groups = in_groups(rewards, group_size)
    if baseline == "none":
        return groups.ravel()
    centred = groups - groups.mean(1, keepdims=True)
    if baseline == "leave_one_out":
        centred = centred * (group_size / max(group_size - 1, 1))
    if std != "none":
        counted, axis = jnp.ones_like(groups, bool), 1
        if std == "batch":
            counted, axis = counted if where is None else counted & where[:, None], (0, 1)
        mean = jnp.expand_dims(masked_mean(groups, counted, axis), axis)
        squares = jnp.sum((groups - mean) ** 2, axis, where=counted)
        divisor = jnp.sum(counted, axis) - (0 if std == "population" else 1)
        centred = centred / (jnp.expand_dims(jnp.sqrt(squares / jnp.maximum(divisor, 1)), axis) + eps)
    alike = groups.max(1) == groups.min(1)
    return jnp.where(alike[:, None], 0, centred).ravel()


def gae(
    rewards: PerToken,
    values: PerToken,
    mask: Mask,
    *,
    gamma: float = 1.0,
    lam: float | PerAnswer = 1.0,
    bootstrap: PerAnswer | None = None,
) -> tuple[PerToken, PerToken]:
    """Generalised advantage estimation: delta_t = rho_t + gamma V_{t+1} - V_t,  A_t = delta_t + gamma lambda A_{t+1}.

    lambda = 0 is one-step TD, lambda = 1 is Monte Carlo. Masked positions carry A_{t+1} and V_{t+1} through.

    Args:
      rewards: rho, see `token_rewards`. One answer a row (packed rows are formed afterwards).
      values: V_old, the value of the state before token t.
      lam: one for all answers, or one for each.
      bootstrap: the value after the last response token: V of the last state for an answer that was cut off, 0 for one
        that ended. None means 0 for all.

    Returns:
      advantages and returns A + V_old, both 0 where masked. Whiten advantages afterwards, not before.

    Source: arXiv 1506.02438 eqs 11-16.
    """
    within("gamma", gamma, 0, 1.0)
    if not isinstance(lam, jax.Array):
        within("lam", lam, 0, 1.0)
    end = jnp.zeros(values.shape[0], values.dtype) if bootstrap is None else bootstrap.astype(values.dtype)
    rewards, values = jnp.where(mask, rewards, 0).astype(values.dtype), jnp.where(mask, values, 0)

    def back(carry: tuple[Array, Array], x: tuple[Array, Array, Array]) -> tuple[tuple[Array, Array], Array]:
        advantage, next_value = carry
        reward, value, valid = x
        here = reward + gamma * next_value - value + gamma * lam * advantage
        return (jnp.where(valid, here, advantage), jnp.where(valid, value, next_value)), jnp.where(valid, here, 0)

    _, transposed = jax.lax.scan(back, (jnp.zeros_like(end), end), (rewards.T, values.T, mask.T), reverse=True)
    advantages = transposed.T
    return advantages, jnp.where(mask, advantages + values, 0)


def whiten(advantages: PerToken, mask: Mask, *, eps: float = 1e-8) -> PerToken:
    """(A - mean) / (std + eps) over the unmasked tokens (sample standard deviation); 0 where masked or constant."""
    n = jnp.sum(mask).astype(advantages.dtype)
    mean = jnp.sum(advantages, where=mask) / jnp.maximum(n, 1)
    centred = jnp.where(mask, advantages - mean, 0)
    std = jnp.sqrt(jnp.sum(centred**2) / jnp.maximum(n - 1, 1))
    constant = jnp.max(advantages, where=mask, initial=-jnp.inf) <= jnp.min(advantages, where=mask, initial=jnp.inf)
    return jnp.where(constant, 0, centred / (std + eps))


class Advantage(Part, abc.ABC):
    """Base of the advantages: rewards in, one number an answer out, or one a token where there is a value function.

    needs_values: called with the critic's values as `Gae` is, otherwise with rewards as `GroupAdvantage` is.
    compares_groups: an answer is compared with the others of its group, so that a group needs at least two.
    reads_tokens: called with mask, old_logprobs, ref_logprobs [b t] and kl_coef too, with teacher_logprobs [b t] where
      there is a teacher, and may return [b t].
    greedy_last: the last answer of each group is greedy, and nothing is learnt from it.
    reads_squares: with `reads_tokens`, called with half_logprobs [b t] too, the old policy's at half the temperature.
    reads: the data that it judges: "rollouts", or "answers" that were given.
    kl_controller: what moves the coefficient of the KL inside the reward.
    """

    needs_values: ClassVar[bool] = False
    compares_groups: ClassVar[bool] = False
    reads_tokens: ClassVar[bool] = False
    greedy_last: ClassVar[bool] = False
    reads_squares: ClassVar[bool] = False
    reads: ClassVar[str] = "rollouts"
    kl_controller: ClassVar[KlController] = KlController(0.0)

    @abc.abstractmethod
    def __call__(self, rewards: PerAnswer, **arrays: Any) -> Any:
        """[b], one number an answer; `Gae` says what an advantage with `needs_values` is given and returns."""


@dataclasses.dataclass(frozen=True)
class GroupAdvantage(Advantage):
    """`group_advantages` as a choice."""

    std: str = hyperparameter("sample", "deviation that centred rewards are divided by", among=_STD)
    baseline: str = hyperparameter("mean", "what is subtracted from rewards", among=_BASELINE)
    std_eps: float = hyperparameter(1e-6, "added to the standard deviation", least=0, below=math.inf)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_convention(self.std, self.baseline)

    @property
    def compares_groups(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.baseline != "none"

    def __call__(self, rewards: PerAnswer, *, group_size: int, where: Bool[Array, "g"] | None = None) -> PerAnswer:
        return group_advantages(
            rewards, group_size=group_size, std=self.std, baseline=self.baseline, eps=self.std_eps, where=where
        )

    def formula(self) -> str:
        centred = {"mean": "R - mean R", "leave_one_out": "R - mean R of the others", "none": "R"}[self.baseline]
        if self.std == "none":
            return f"A = {centred}"
        return f"A = ({centred}) / std R" + (" of the batch" if self.std == "batch" else "")


class Imitation(Advantage):
    """A = 1 on every token of a given answer: supervised training is REINFORCE of answers that all earn 1."""

    reads: ClassVar[str] = "answers"
    equation: ClassVar[str] = "A = 1 on given answers"

    def check(self, objective: Any) -> None:
        if objective.correction is not None:
            raise ValueError(
                "correction weighs sampled answers by their sampler, and given ones have none; leave it out"
            )

    def __call__(self, rewards: PerAnswer, **arrays: Any) -> PerAnswer:
        return jnp.ones_like(rewards)


@dataclasses.dataclass(frozen=True)
class KlRewards(Advantage):
    """Base of the advantages of `token_rewards`, with beta = `reward_kl_coef`, steered by a `KlController` if there is
    a `kl_target`."""

    reward_kl_coef: float = hyperparameter(0.0, "weight of the KL to the start inside the reward")
    kl_target: float | None = hyperparameter(
        None, "KL to the start, in nats an answer, that reward_kl_coef is steered to; fixed unless set"
    )
    kl_gain: float = hyperparameter(0.1, "how fast reward_kl_coef follows, times a relative error of at most 0.2")

    @property
    def needs(self) -> frozenset[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return frozenset({"ref_logprobs", "old_logprobs"} if self.reward_kl_coef else ())

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.kl_controller  # checks the ranges of its three fields

    @property
    def kl_controller(self) -> KlController:  # pyright: ignore[reportIncompatibleVariableOverride]
        return KlController(self.reward_kl_coef, self.kl_target, self.kl_gain)

    def token_rewards(
        self,
        rewards: PerAnswer | PerToken,
        mask: Mask,
        old_logprobs: PerToken | None,
        ref_logprobs: PerToken | None,
        kl_coef: Float[Array, ""] | None,
    ) -> PerToken:
        """kl_coef: where the controller has moved `reward_kl_coef` to, if it moves."""
        beta = self.reward_kl_coef if kl_coef is None else kl_coef
        return token_rewards(rewards, mask, old_logprobs=old_logprobs, ref_logprobs=ref_logprobs, kl_coef=beta)

    @property
    def rewarded(self) -> str:
        """The reward in `formula`."""
        return f"R - {self.reward_kl_coef:g} KL(pi, pi_ref)" if self.reward_kl_coef else "R"


@dataclasses.dataclass(frozen=True)
class Gae(KlRewards):
    """`gae` of `token_rewards`."""

    gamma: float = hyperparameter(1.0, "discount per token", least=0, most=1.0)
    lam: float = hyperparameter(1.0, "GAE's lambda", least=0, most=1.0)
    needs_values: ClassVar[bool] = True

    def check(self, objective: Any) -> None:
        if objective.value is None:
            raise ValueError("Gae needs a value function; set value=ValueLoss()")

    def __call__(
        self,
        rewards: PerAnswer | PerToken,
        *,
        values: PerToken,
        mask: Mask,
        bootstrap: PerAnswer | None = None,
        old_logprobs: PerToken | None = None,
        ref_logprobs: PerToken | None = None,
        kl_coef: Float[Array, ""] | None = None,
    ) -> tuple[PerToken, PerToken]:
        """Rewards [b], or by token, -> (whitened advantages, returns), both [b t]; returns come before whitening."""
        shaped = self.token_rewards(rewards, mask, old_logprobs, ref_logprobs, kl_coef)
        advantages, returns = gae(shaped, values, mask, gamma=self.gamma, lam=self.lam, bootstrap=bootstrap)
        return whiten(advantages, mask), returns

    def formula(self) -> str:
        return f"A = GAE(gamma {self.gamma:g}, lambda {self.lam:g}) of {self.rewarded}"
