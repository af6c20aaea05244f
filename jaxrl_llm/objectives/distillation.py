"""Distillation from a teacher: its log-probs as advantages by token, and divergences over the vocabulary."""

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxrl_llm.ground.array_typing import Array, Float, Mask, PerAnswer, PerToken
from jaxrl_llm.objectives.advantages import Advantage, GroupAdvantage, gae
from jaxrl_llm.objectives.parts import hyperparameter

_OUT = -1e30  # the log of no probability; inf - inf would be NaN


def teacher_advantages(teacher_logprobs: PerToken, old_logprobs: PerToken, mask: Mask, gamma: float = 0.0) -> PerToken:
    """A_t = sum_(u >= t) gamma^(u - t) (log pi_T - log pi_old)_u, a constant; 0 where masked.

    On the policy E[A_t grad log pi_t] is, with gamma = 0, minus the gradient of the sum over tokens of KL(pi, pi_T) at
    the sampled prefixes, and with gamma = 1 minus the gradient of the KL of whole answers.

    Source: Thinking Machines, "On-policy distillation", 2025 (gamma 0); MiniLLM, arXiv 2306.08543 (gamma 1).
    """
    gap = jax.lax.stop_gradient(jnp.where(mask, teacher_logprobs - old_logprobs, 0))
    return gae(gap, jnp.zeros_like(gap), mask, gamma=gamma)[0]


def unlikely_tokens(teacher_logprobs: PerToken, mask: Mask, below: float) -> PerToken:
    """-1 on tokens to which the teacher gives less probability than `below`, 0 elsewhere: one bit of the teacher.

    Source: the claim of arXiv 2608.31046, not read in its text.
    """
    return -jnp.where(mask & (teacher_logprobs < math.log(below)), 1.0, 0.0)


def generalized_jsd(
    logprobs: Float[Array, "*any v"], teacher_logprobs: Float[Array, "*any v"], beta: float
) -> Float[Array, "*any"]:
    """D of two distributions over the last axis, from their log-probs.

        m = beta pi_T + (1 - beta) pi,   D = beta KL(pi_T, m) + (1 - beta) KL(pi, m)

    beta = 0 is the forward KL(pi_T, pi) and beta = 1 the reverse KL(pi, pi_T), the limits of D / (beta (1 - beta)).

    Source: GKD, arXiv 2306.13649 eq. 1.
    """

    def kl(log_p: Array, log_q: Array) -> Array:
        return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)

    if beta in (0, 1):
        return kl(logprobs, teacher_logprobs) if beta else kl(teacher_logprobs, logprobs)
    mixture = jnp.logaddexp(logprobs + math.log1p(-beta), teacher_logprobs + math.log(beta))
    return beta * kl(teacher_logprobs, mixture) + (1 - beta) * kl(logprobs, mixture)


def top_and_rest(
    logprobs: Float[Array, "n v"], teacher_logprobs: Float[Array, "n v"], k: int, add_tail: bool = True
) -> tuple[Float[Array, "n k1"], Float[Array, "n k1"]]:
    """Both distributions on k + 1 entries: the k tokens that the teacher finds likeliest, and all others as one.

    A divergence of these is at most that of the whole distributions (data processing), and its gradient moves the
    probability of the others only together: how the teacher ranks them is lost. Without `add_tail` the k entries stand
    alone, and their forward KL is least at the teacher's distribution over these k.

    Source: TRL's server distillation with `loss_add_tail`; without a tail `forward_kl_topk` of verl.
    """
    top = jax.lax.top_k(teacher_logprobs, k)[1]
    inside = jnp.zeros(logprobs.shape, bool).at[jnp.arange(len(top))[:, None], top].set(True)

    def merged(x: Array) -> Array:
        rest = jax.nn.logsumexp(jnp.where(inside, _OUT, x), axis=-1, keepdims=True)
        return jnp.concatenate([jnp.take_along_axis(x, top, axis=-1), rest], axis=-1)[:, : k + add_tail]

    return merged(logprobs), merged(teacher_logprobs)


@dataclasses.dataclass(frozen=True)
class TeacherAdvantage(GroupAdvantage):
    """`teacher_advantages`, or `unlikely_tokens`, alone or beside the `group_advantages` of the rewards."""

    teacher_weight: float = hyperparameter(1.0, "weight of log pi_T - log pi_old in the advantage", least=0)
    reward_weight: float = hyperparameter(0.0, "weight of the rewards' group advantage beside the teacher's", least=0)
    teacher_gamma: float = hyperparameter(
        0.0, "discount of the teacher's coming tokens: 0 is the KL by token, 1 that of whole answers", least=0, most=1
    )
    teacher_below: float | None = hyperparameter(
        None, "-1 on tokens less likely than this under the teacher, 0 on others, in place of the gap", above=0, most=1
    )
    reads_tokens: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"teacher_logprobs", "old_logprobs"})

    @property
    def compares_groups(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.reward_weight > 0 and self.baseline != "none"

    def __call__(
        self,
        rewards: PerAnswer,
        *,
        group_size: int,
        mask: Mask,
        old_logprobs: PerToken,
        teacher_logprobs: PerToken,
        where: Any = None,
        **arrays: Any,
    ) -> PerToken:
        if self.teacher_below is None:
            taught = teacher_advantages(teacher_logprobs, old_logprobs, mask, self.teacher_gamma)
        else:
            taught = unlikely_tokens(teacher_logprobs, mask, self.teacher_below)
        taught = self.teacher_weight * taught
        if not self.reward_weight:
            return taught
        judged = super().__call__(rewards, group_size=group_size, where=where)
        return taught + self.reward_weight * judged[:, None]

    def formula(self) -> str:
        to_go = f"sum_(u >= t) {self.teacher_gamma:g}^(u - t) " if self.teacher_gamma else ""
        taught = f"{self.teacher_weight:g} {to_go}log(pi_T/pi_old)"
        if self.teacher_below is not None:
            taught = f"-{self.teacher_weight:g} where pi_T < {self.teacher_below:g}"
        if not self.reward_weight:
            return f"A = {taught}"
        return f"A = {taught} + {self.reward_weight:g} A_R; A_R{super().formula()[1:]}"


class NoAdvantage(Advantage):
    """A = 0: answers are sampled and a loss term beside the policy's is all that is learnt from."""

    equation: ClassVar[str] = "A = 0"

    def __call__(self, rewards: PerAnswer, **arrays: Any) -> PerAnswer:
        return jnp.zeros_like(rewards)
