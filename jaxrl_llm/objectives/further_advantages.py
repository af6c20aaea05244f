"""Advantages that are imported when a recipe or `objective.advantage` names one: functions, then the choices."""

import dataclasses
import math
from typing import Any, ClassVar

import jax.numpy as jnp

from jaxrl_llm.ground.array_typing import Array, Bool, Float, Mask, PerAnswer, PerToken
from jaxrl_llm.ground.declared import declared_by
from jaxrl_llm.objectives.advantages import (
    Advantage,
    Gae,
    GroupAdvantage,
    KlRewards,
    gae,
    group_advantages,
    in_groups,
    whiten,
)
from jaxrl_llm.objectives.aggregation import name_of
from jaxrl_llm.objectives.parts import hyperparameter


def pass_at_k_advantages(right: PerAnswer, group_size: int, k: int) -> PerAnswer:
    """Advantages of single answers for the reward of a random set of k answers, 1 if any of them is right.

        A = q / s if right, (q - C(n - 1, k - 1) / C(G - 1, k - 1)) / s if wrong;   q = C(n, k) / C(G, k)

    n of the G answers are wrong, s = sqrt(q (1 - q)) is the deviation over sets. 0 where every set has the same reward.
    right: [b], 1 or 0. With k = 1 this is (R - mean) / (population std).

    Source: Pass@k training, arXiv 2508.10751 (its analytical form).
    """
    groups = in_groups(right, group_size)
    wrong = group_size - jnp.sum(groups, axis=1, keepdims=True)

    def none_right(wrong: Array, of: int, k: int) -> Array | int:
        """C(wrong, k) / C(of, k): the share of sets of k answers in which none is right."""
        return math.prod(jnp.maximum(wrong - i, 0) / (of - i) for i in range(k))

    failed = none_right(wrong, group_size, k)
    deviation = jnp.sqrt(failed * (1 - failed))
    share = none_right(wrong - 1, group_size - 1, k - 1)
    advantages = jnp.where(groups > 0, failed, failed - share) / jnp.where(deviation > 0, deviation, 1)
    return jnp.where(deviation > 0, advantages, 0).ravel()


def best_of_group_advantages(rewards: PerAnswer, group_size: int, eps: float = 1e-6) -> PerAnswer:
    """(max R - second max R) / (sample std + eps) for the best answer of a group, 0 for the others.

    Source: arXiv 2503.19595, as `grpo_passk` of verl.
    """
    groups = in_groups(rewards, group_size)
    first, second = jnp.sort(groups, axis=1)[:, -1:], jnp.sort(groups, axis=1)[:, -2:-1]
    lead = jnp.where(groups == first, first - second, 0)  # two equal best ones have no lead
    return (lead / (jnp.std(groups, axis=1, ddof=1, keepdims=True) + eps)).ravel()


def maximum_likelihood_advantages(rewards: PerAnswer, group_size: int) -> PerAnswer:
    """(R - mean) / mean in groups, 0 where the mean is not above 0: the gradient of log p(right), to order G.

    Source: MaxRL, arXiv 2602.02710, for rewards of 0 and 1, read in SkyRL's code.
    """
    groups = in_groups(rewards, group_size)
    mean = jnp.mean(groups, axis=1, keepdims=True)
    alike = jnp.max(groups, axis=1, keepdims=True) == jnp.min(groups, axis=1, keepdims=True)
    return jnp.where(alike | (mean <= 0), 0, (groups - mean) / jnp.where(mean > 0, mean, 1)).ravel()


def length_weighted_advantages(rewards: PerAnswer, lengths: PerAnswer, group_size: int) -> PerAnswer:
    """R - b, b = sum_i |y_i| R_i / sum_i |y_i| in a group: of least variance if the squared gradient grows with length.

    Source: OPO, arXiv 2505.23585, read in verl's code.
    """
    groups, weights = in_groups(rewards, group_size), lengths.reshape(-1, group_size)
    total = jnp.sum(weights, axis=1, keepdims=True)
    baseline = jnp.sum(weights * groups, axis=1, keepdims=True) / jnp.maximum(total, 1)
    alike = jnp.max(groups, axis=1, keepdims=True) == jnp.min(groups, axis=1, keepdims=True)
    return jnp.where(alike, 0, groups - baseline).ravel()


def greedy_advantages(rewards: PerAnswer, group_size: int) -> PerAnswer:
    """R - R_greedy, with the reward of the group's last answer, which is the greedy one and gets 0.

    Source: ReMax, arXiv 2310.10505, algorithm 1.
    """
    groups = in_groups(rewards, group_size)
    return (groups - groups[:, -1:]).ravel()


def optimal_token_advantages(
    rewards: PerAnswer, old_logprobs: PerToken, squares: PerToken, mask: Mask, group_size: int
) -> PerToken:
    """R - b_t, the baseline of least variance at each place of a group's answers; 0 where masked.

        b_t = sum_i W_it R_i / sum_i W_it   over the answers with a token at t,   W_t = sum_(u <= t) 1 - 2 pi_u + s_u

    1 - 2 pi + s is the squared norm of the gradient of log pi by the logits.

    Args:
      squares: s, the sum of squared probabilities over the vocabulary at each token (`squared_probabilities`).

    Source: optimal token baseline, arXiv 2602.07078, read in verl's code.
    """
    groups = in_groups(rewards, group_size)[..., None]
    energy = jnp.where(mask, 1 - 2 * jnp.exp(old_logprobs) + squares, 0)
    weights = jnp.where(mask, jnp.cumsum(energy, axis=1), 0).reshape(-1, group_size, mask.shape[1])
    total = jnp.sum(weights, axis=1, keepdims=True)
    baseline = jnp.sum(weights * groups, axis=1, keepdims=True) / jnp.where(total > 0, total, 1)
    return jnp.where(mask, (groups - baseline).reshape(mask.shape), 0)


def squared_probabilities(logprobs: PerToken, half_logprobs: PerToken) -> PerToken:
    """sum_v p_v^2 over the vocabulary, from the log-prob of one token at temperature T and at T / 2.

    p_v^2 = exp(2 z_v / T) / Z(T)^2, whose sum is Z(T / 2) / Z(T)^2, and log Z(T) = z / T - log p for any one token.
    """
    return jnp.exp(2 * logprobs - half_logprobs)


@dataclasses.dataclass(frozen=True)
class ReturnToGo(KlRewards):
    """`whiten` of the discounted return to go of `token_rewards`: no group and no critic.

    Source: REINFORCE++, arXiv 2501.03262.
    """

    gamma: float = hyperparameter(1.0, "discount per token", least=0, most=1.0)
    reads_tokens: ClassVar[bool] = True

    def __call__(
        self,
        rewards: PerAnswer | PerToken,
        *,
        mask: Mask,
        old_logprobs: PerToken | None = None,
        ref_logprobs: PerToken | None = None,
        kl_coef: Float[Array, ""] | None = None,
        **groups: Any,
    ) -> PerToken:
        shaped = self.token_rewards(rewards, mask, old_logprobs, ref_logprobs, kl_coef)
        to_go, _ = gae(shaped, jnp.zeros_like(shaped), mask, gamma=self.gamma)
        return whiten(to_go, mask)

    def formula(self) -> str:
        discount = "" if self.gamma == 1 else f"{self.gamma:g}^(u - t) "
        return f"A = sum_(u >= t) {discount}({self.rewarded})_u, whitened over the batch"


@dataclasses.dataclass(frozen=True)
class GroupOfKlRewards(GroupAdvantage, KlRewards):
    """`group_advantages` of R_i - beta sum_t (log pi_old - log pi_ref)_t, with beta = `reward_kl_coef`.

    A group of equal rewards is not 0 here, because its answers differ in their KL.

    Source: RLOO, arXiv 2402.14740 section 2; `RLOOTrainer` of TRL (`beta`), `use_kl_in_reward` of verl and SkyRL.
    """

    reads_tokens: ClassVar[bool] = True

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        rewards: PerAnswer | PerToken,
        *,
        group_size: int,
        mask: Mask,
        where: Bool[Array, "g"] | None = None,
        old_logprobs: PerToken | None = None,
        ref_logprobs: PerToken | None = None,
        kl_coef: Float[Array, ""] | None = None,
        **arrays: Any,
    ) -> PerAnswer:
        earned = rewards if rewards.ndim == 1 else jnp.sum(rewards, axis=1, where=mask)
        costs = self.token_rewards(jnp.zeros_like(earned), mask, old_logprobs, ref_logprobs, kl_coef)
        return super().__call__(earned + jnp.sum(costs, axis=1), group_size=group_size, where=where)

    def formula(self) -> str:
        return f"{super().formula()}, R = {self.rewarded.replace('R', 'reward')}"


@dataclasses.dataclass(frozen=True)
class GroupWhitened(Advantage):
    """R less the mean of its group, then `whiten` over the tokens of the batch.

    A group of equal rewards is not 0 here: its tokens get the batch's mean with the other sign.

    Source: REINFORCE++-baseline, arXiv 2501.03262; with another `std` GRPO's advantage comes first, as under
    `normalize_advantages` of slime and `adv_norm` of AReaL.
    """

    std: str = declared_by(GroupAdvantage, "std", default="none")
    std_eps: float = declared_by(GroupAdvantage, "std_eps")
    compares_groups: ClassVar[bool] = True
    reads_tokens: ClassVar[bool] = True

    def __call__(self, rewards: PerAnswer, *, group_size: int, mask: Mask, **arrays: Any) -> PerToken:
        centred = group_advantages(rewards, group_size=group_size, std=self.std, eps=self.std_eps)
        return whiten(jnp.broadcast_to(centred[:, None], mask.shape), mask)

    def formula(self) -> str:
        return f"{GroupAdvantage(std=self.std).formula()}, whitened over the batch"


@dataclasses.dataclass(frozen=True)
class PassAtK(Advantage):
    """`pass_at_k_advantages`; an answer is right from `pass_reward` on."""

    pass_k: int = hyperparameter(4, "k of the pass@k advantage, at most the group size", least=1)
    pass_reward: float = hyperparameter(1.0, "least reward of a right answer for the pass@k advantage")
    compares_groups: ClassVar[bool] = True
    equation: ClassVar[str] = "A = that of pass@{pass_k} (R >= {pass_reward:g} is right)"

    def __call__(self, rewards: PerAnswer, *, group_size: int, **arrays: Any) -> PerAnswer:
        if self.pass_k > group_size:
            raise ValueError(f"pass_k={self.pass_k} is above rollout.group_size={group_size}; lower objective.pass_k")
        right = jnp.where(jnp.asarray(rewards) >= self.pass_reward, 1.0, 0.0)
        return pass_at_k_advantages(right, group_size, self.pass_k)


@dataclasses.dataclass(frozen=True)
class BestOfGroup(Advantage):
    """`best_of_group_advantages`."""

    std_eps: float = declared_by(GroupAdvantage, "std_eps")
    compares_groups: ClassVar[bool] = True
    equation: ClassVar[str] = "A = (max R - second max R) / std R for the best of its group, 0 for the others"

    def __call__(self, rewards: PerAnswer, *, group_size: int, **arrays: Any) -> PerAnswer:
        return best_of_group_advantages(rewards, group_size, self.std_eps)


class MaxRL(Advantage):
    """`maximum_likelihood_advantages`."""

    compares_groups: ClassVar[bool] = True
    equation: ClassVar[str] = "A = (R - mean R) / mean R"

    def __call__(self, rewards: PerAnswer, *, group_size: int, **arrays: Any) -> PerAnswer:
        return maximum_likelihood_advantages(rewards, group_size)


class LengthWeighted(Advantage):
    """`length_weighted_advantages`."""

    compares_groups: ClassVar[bool] = True
    reads_tokens: ClassVar[bool] = True
    equation: ClassVar[str] = "A = R - sum |y| R / sum |y| of its group"

    def __call__(self, rewards: PerAnswer, *, group_size: int, mask: Mask, **arrays: Any) -> PerAnswer:
        lengths = jnp.sum(mask, axis=1, dtype=jnp.asarray(rewards).dtype)
        return length_weighted_advantages(rewards, lengths, group_size)


@dataclasses.dataclass(frozen=True)
class PromptMean(GroupAdvantage):
    """`group_advantages` times G / sum_i |y_i| of the group, for the aggregation sequence_mean_token_sum.

    The loss is then the mean over prompts of the mean over all tokens of a prompt's answers. An aggregation cannot say
    it, because a micro-batch may hold a part of a group.

    Source: DAPO, arXiv 2503.14476 eq. 8; `prompt_mean` of SkyRL, which puts it into the advantages too.
    """

    reads_tokens: ClassVar[bool] = True

    def check(self, objective: Any) -> None:
        aggregation = name_of(objective.aggregation)
        if aggregation != "sequence_mean_token_sum":
            raise ValueError(
                f"advantage=prompt_mean divides by a prompt's tokens, so aggregation={aggregation!r} would divide "
                "again; use sequence_mean_token_sum"
            )

    def __call__(
        self,
        rewards: PerAnswer,
        *,
        group_size: int,
        mask: Mask,
        where: Bool[Array, "g"] | None = None,
        **arrays: Any,
    ) -> PerAnswer:
        advantages = super().__call__(rewards, group_size=group_size, where=where).reshape(-1, group_size)
        tokens = jnp.sum(mask, axis=1, dtype=advantages.dtype).reshape(-1, group_size).sum(1, keepdims=True)
        return (advantages * group_size / jnp.maximum(tokens, 1)).ravel()

    def formula(self) -> str:
        return f"{super().formula()}, times G / sum |y| of its group"


@dataclasses.dataclass(frozen=True)
class LengthAdaptiveGae(Gae):
    """`gae` whose lambda grows with the answer, 1 - 1 / (alpha |y|), at least 0; returns keep `lam`.

    Source: VAPO, arXiv 2504.05118; two lambdas: VC-PPO, arXiv 2503.01491; neither read in its text.
    """

    length_alpha: float = hyperparameter(0.05, "VAPO: lambda = 1 - 1 / (alpha times the answer's length)", above=0)

    def __call__(
        self, rewards: PerAnswer | PerToken, *, values: PerToken, mask: Mask, **arrays: Any
    ) -> tuple[PerToken, PerToken]:
        _, returns = super().__call__(rewards, values=values, mask=mask, **arrays)
        bootstrap = arrays.pop("bootstrap", None)
        given = {"old_logprobs": None, "ref_logprobs": None, "kl_coef": None} | arrays
        shaped = self.token_rewards(rewards, mask, **given)
        lam = jnp.maximum(1 - 1 / (self.length_alpha * jnp.maximum(jnp.sum(mask, axis=1), 1)), 0)
        advantages, _ = gae(shaped, values, mask, gamma=self.gamma, lam=lam, bootstrap=bootstrap)
        return whiten(advantages, mask), returns

    def formula(self) -> str:
        lam = f"1 - 1 / ({self.length_alpha:g} |y|)"
        return f"A = GAE(gamma {self.gamma:g}, lambda {lam}) of {self.rewarded}"


class GreedyBaseline(Advantage):
    """`greedy_advantages` as a choice."""

    compares_groups: ClassVar[bool] = True
    greedy_last: ClassVar[bool] = True
    equation: ClassVar[str] = "A = R - R of the greedy answer"

    def __call__(self, rewards: PerAnswer, *, group_size: int, **arrays: Any) -> PerAnswer:
        return greedy_advantages(rewards, group_size)


class OptimalToken(Advantage):
    """`optimal_token_advantages` as a choice; a second pass of the old policy at half the temperature gives s."""

    compares_groups: ClassVar[bool] = True
    reads_tokens: ClassVar[bool] = True
    reads_squares: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"old_logprobs"})
    equation: ClassVar[str] = "A = R - sum W_t R / sum W_t of its group, W_t = sum_(u <= t) 1 - 2 pi_u + sum_v pi_v^2"

    def __call__(
        self,
        rewards: PerAnswer,
        *,
        group_size: int,
        mask: Mask,
        old_logprobs: PerToken,
        half_logprobs: PerToken,
        **arrays: Any,
    ) -> PerToken:
        squares = squared_probabilities(old_logprobs, half_logprobs)
        return optimal_token_advantages(rewards, old_logprobs, squares, mask, group_size)
