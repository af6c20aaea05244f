"""Losses of pairs that are imported when a config names a recipe with one: functions of rewards, then the choices.

Rewards r are beta times scores, [p 2], of the chosen and the rejected answer of each pair; scores are log pi - log
pi_ref, but for `odds_ratio_loss`.
"""

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp

from jaxrl_llm.objectives.pair_parts import PairLoss, PerPair, PerSide
from jaxrl_llm.objectives.parts import hyperparameter


def odds_ratio_loss(log_probs: PerSide) -> PerPair:
    """-log sigma(log odds(chosen) - log odds(rejected)), odds(p) = p / (1 - p), p the geometric mean of an answer's
    probabilities; log p is [p 2], taken as at most -1e-7.

    Source: ORPO, arXiv 2403.07691 eqs 4 and 7.
    """
    log_p = jnp.minimum(log_probs, -1e-7)
    small = log_p < -math.log(2)  # each form is exact where the other loses digits
    rest = jnp.where(small, jnp.log1p(-jnp.exp(log_p)), jnp.log(-jnp.expm1(jnp.where(small, -1.0, log_p))))
    odds = log_p - rest
    return -jax.nn.log_sigmoid(odds[:, 0] - odds[:, 1])


def reverse_kl_loss(rewards: PerSide, label_smoothing: float) -> PerPair:
    """KL(q, p) of q = (sigma(z), sigma(-z)), z = r(chosen) - r(rejected), and p = (1 - eps, eps), eps label_smoothing.

    Source: EXO, arXiv 2402.00856 eq. 16.
    """
    z = rewards[:, 0] - rewards[:, 1]
    won, lost = jax.nn.sigmoid(z), jax.nn.sigmoid(-z)
    chosen = won * (jax.nn.log_sigmoid(z) - math.log1p(-label_smoothing))
    return chosen + lost * (jax.nn.log_sigmoid(-z) - math.log(label_smoothing))


def noise_contrastive_loss(rewards: PerSide) -> PerPair:
    """-log sigma(r_c) - (log sigma(-r_c) + log sigma(-r_r)) / 2: rewards have a zero, so r_c does not fall.

    Source: NCA, arXiv 2402.05369, for pairs.
    """
    chosen, rejected = rewards[:, 0], rewards[:, 1]
    absolute = jax.nn.log_sigmoid(-chosen) + jax.nn.log_sigmoid(-rejected)
    return -jax.nn.log_sigmoid(chosen) - absolute / 2


def anchored_up_loss(rewards: PerSide) -> PerPair:
    """1 - sigma(r_c) + sigma(r_r): chosen answers get likelier, rejected ones less likely.

    Source: APO-zero, arXiv 2408.06266 eq. 7.
    """
    return jax.nn.sigmoid(-rewards[:, 0]) + jax.nn.sigmoid(rewards[:, 1])


def anchored_down_loss(rewards: PerSide) -> PerPair:
    """sigma(r_c) + 1 - sigma(r_c - r_r): both get less likely, rejected ones more so.

    Source: APO-down, arXiv 2408.06266 eq. 8.
    """
    return jax.nn.sigmoid(rewards[:, 0]) + jax.nn.sigmoid(rewards[:, 1] - rewards[:, 0])


def prospect_loss(rewards: PerSide, reference: float, chosen_weight: float, rejected_weight: float) -> PerPair:
    """(w_c (1 - sigma(r_c - z)) + w_r (1 - sigma(z - r_r))) / 2: a gain or a loss against the reference point z.

    Source: KTO, arXiv 2402.01306, read in TRL; for answers of pairs. There z is beta KL(pi, pi_ref), here a number.
    """
    gain, loss = jax.nn.sigmoid(reference - rewards[:, 0]), jax.nn.sigmoid(rewards[:, 1] - reference)
    return (chosen_weight * gain + rejected_weight * loss) / 2


class OfRewards(PairLoss):
    """Base of the losses that are no function of D alone, and take no margins."""

    takes_margins: ClassVar[bool] = False


class OddsRatio(OfRewards):
    """beta times `odds_ratio_loss`."""

    equation: ClassVar[str] = "{beta:g} log sigma(o(chosen) - o(rejected)); o = s - log(1 - e^s)"

    def __call__(self, scores: PerSide, margins: PerPair | None) -> PerPair:
        return self.beta * odds_ratio_loss(scores)


@dataclasses.dataclass(frozen=True)
class ReverseKl(OfRewards):
    """`reverse_kl_loss`; a smoothing of 0 would have no finite loss."""

    label_smoothing: float = hyperparameter(1e-3, "share of labels taken as swapped", above=0, most=0.5)
    equation: ClassVar[str] = (
        "-KL(p, q); p = (sigma(z), sigma(-z)); z = {beta:g} D; q = (1 - {label_smoothing:g}, {label_smoothing:g})"
    )

    def __call__(self, scores: PerSide, margins: PerPair | None) -> PerPair:
        return reverse_kl_loss(self.beta * scores, self.label_smoothing)


class NoiseContrastive(OfRewards):
    """`noise_contrastive_loss`."""

    equation: ClassVar[str] = (
        "l(r+) + (l(-r+) + l(-r-)) / 2; l = log sigma; r+, r- = {beta:g} s(chosen), {beta:g} s(rejected)"
    )

    def __call__(self, scores: PerSide, margins: PerPair | None) -> PerPair:
        return noise_contrastive_loss(self.beta * scores)


class AnchoredUp(OfRewards):
    """`anchored_up_loss`."""

    equation: ClassVar[str] = "sigma(r(chosen)) - sigma(r(rejected)); r = {beta:g} s"

    def __call__(self, scores: PerSide, margins: PerPair | None) -> PerPair:
        return anchored_up_loss(self.beta * scores)


class AnchoredDown(OfRewards):
    """`anchored_down_loss`."""

    equation: ClassVar[str] = "sigma({beta:g} D) - sigma(r(chosen)); r = {beta:g} s"

    def __call__(self, scores: PerSide, margins: PerPair | None) -> PerPair:
        return anchored_down_loss(self.beta * scores)


@dataclasses.dataclass(frozen=True)
class Prospect(OfRewards):
    """`prospect_loss`.

    The paper estimates the KL from answers to other prompts, which pairs do not hold; it is a constant here.
    """

    reference_kl: float = hyperparameter(0.0, "KTO: KL to the start that a reward is compared with, in nats", least=0)
    chosen_weight: float = hyperparameter(1.0, "KTO: weight of chosen answers", least=0, below=math.inf)
    rejected_weight: float = hyperparameter(1.0, "KTO: weight of rejected answers", least=0, below=math.inf)
    equation: ClassVar[str] = (
        "(C + D) / 2; C = {chosen_weight:g} sigma(r(chosen) - z); D = {rejected_weight:g} sigma(z - r(rejected)); "
        "r = {beta:g} s; z = {beta:g} * {reference_kl:g}"
    )

    def __call__(self, scores: PerSide, margins: PerPair | None) -> PerPair:
        reference = self.beta * self.reference_kl
        return prospect_loss(self.beta * scores, reference, self.chosen_weight, self.rejected_weight)
