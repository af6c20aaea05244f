"""The parts of an objective on pairs: what a token adds to an answer's score, and the loss of a difference of scores.

Answers are numbered in pairs: sequence 2 i is chosen over sequence 2 i + 1.
"""

import abc
import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxrl_llm.ground.array_typing import Array, Bool, Float, Integer, Mask, PerToken
from jaxrl_llm.ground.masking import segment_sum
from jaxrl_llm.ground.ranges import at_least_zero, positive
from jaxrl_llm.objectives.aggregation import SequenceMeanTokenSum, name_of
from jaxrl_llm.objectives.batch import Batch
from jaxrl_llm.objectives.parts import Part, hyperparameter

__all__ = [
    "LogLikelihood",
    "Logistic",
    "PairLoss",
    "ReferenceRatio",
    "RewardHead",
    "Score",
    "Square",
    "last_tokens",
    "occupied",
    "sides",
]

PerPair = Float[Array, "p"]


def sides(x: Array) -> Array:
    """The two answers of every pair, [2 p] -> [p 2]: column 0 chosen, column 1 rejected.

    Raises:
      ValueError: an odd number of sequences.
    """
    if x.shape[0] % 2:
        raise ValueError(f"num_sequences={x.shape[0]} is odd; give pairs: sequence 2i chosen, 2i + 1 rejected")
    return x.reshape(-1, 2)


def occupied(
    mask: Mask, sequence_ids: Integer[Array, "b t"] | None = None, num_sequences: int | None = None
) -> Bool[Array, "p 2"]:
    """Which answers of every pair have an unmasked token.

    Raises:
      ValueError: sequence_ids without num_sequences, or an odd number of sequences.
    """
    if sequence_ids is None:
        return sides(jnp.any(mask, axis=1))
    if num_sequences is None:
        raise ValueError("sequence_ids without num_sequences; give num_sequences, twice the number of pairs")
    return sides(segment_sum(mask.astype(jnp.int32), mask, sequence_ids, num_sequences) > 0)


def last_tokens(batch: Batch) -> Mask:
    """True at the last unmasked token of each sequence, [b t]."""
    place = jnp.arange(batch.mask.size).reshape(batch.mask.shape)
    marked = jnp.where(batch.mask, place, -1)
    if batch.sequence_ids is None:
        return batch.mask & (place == jnp.max(marked, axis=1, keepdims=True))
    ids = jnp.clip(batch.sequence_ids, 0, batch.num_sequences - 1)
    last = jax.ops.segment_max(marked.ravel(), ids.ravel(), batch.num_sequences)
    return batch.mask & (place == last[ids])


@dataclasses.dataclass(frozen=True)
class Score(Part, abc.ABC):
    """Base of the scores: s_t of every token; the aggregation's weights sum them to the score of an answer."""

    @abc.abstractmethod
    def __call__(self, batch: Batch) -> PerToken:
        """s_t [b t], un-reduced; anything where masked."""

    @property
    def centred(self) -> bool:
        """Whether `centring` adds a loss."""
        return False

    def centring(self, scores: Float[Array, "p 2"]) -> PerPair:
        """A loss of every pair that fixes the zero of the rewards, which the loss of differences leaves free."""
        return jnp.zeros(scores.shape[0], scores.dtype)


@dataclasses.dataclass(frozen=True)
class ReferenceRatio(Score):
    """log pi - log pi_ref: beta times its sum is the reward that the policy is optimal for.

    Source: DPO, arXiv 2305.18290 eq. 5.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"logprobs", "ref_logprobs"})

    def __call__(self, batch: Batch) -> PerToken:
        return batch.logprobs - batch.require("ref_logprobs")

    def formula(self) -> str:
        return "(log pi - log pi_ref)"


@dataclasses.dataclass(frozen=True)
class LogLikelihood(Score):
    """log pi: no reference model.  Source: SimPO, arXiv 2405.14734 eq. 4."""

    needs: ClassVar[frozenset[str]] = frozenset({"logprobs"})

    def __call__(self, batch: Batch) -> PerToken:
        return batch.logprobs

    def formula(self) -> str:
        return "log pi"


@dataclasses.dataclass(frozen=True)
class RewardHead(Score):
    """The scalar head's output in the state after the last token of the answer: the reward r(x, y).

    The Bradley-Terry loss sees differences alone; center_rewards_coefficient (r_chosen + r_rejected)^2 keeps rewards
    around 0.

    Source: InstructGPT, arXiv 2203.02155 eq. 1; centring: arXiv 2312.09244.
    """

    center_rewards_coefficient: float = hyperparameter(
        0.0, "times (r_chosen + r_rejected)^2: keeps the rewards of a reward model around 0"
    )
    needs: ClassVar[frozenset[str]] = frozenset({"scores"})

    def __post_init__(self) -> None:
        at_least_zero("center_rewards_coefficient", self.center_rewards_coefficient)

    def check(self, objective: Any) -> None:
        if not isinstance(objective.aggregation, SequenceMeanTokenSum):
            raise ValueError(
                f"aggregation={name_of(objective.aggregation)!r} would divide a reward, which is read at one token, by "
                "the answer's length; use sequence_mean_token_sum"
            )

    def __call__(self, batch: Batch) -> PerToken:
        return jnp.where(last_tokens(batch), batch.require("scores"), 0)

    def formula(self) -> str:
        centre = self.center_rewards_coefficient
        own = "[t is the last] head(t)"
        return f"{own}; - {centre:g} (s(chosen) + s(rejected))^2" if centre else own

    @property
    def centred(self) -> bool:
        return self.center_rewards_coefficient > 0

    def centring(self, scores: Float[Array, "p 2"]) -> PerPair:
        return self.center_rewards_coefficient * jnp.sum(scores, axis=1) ** 2


@dataclasses.dataclass(frozen=True)
class PairLoss(Part, abc.ABC):
    """Base of the losses of a pair; beta times a score is a reward."""

    takes_margins: ClassVar[bool] = True  # of single pairs
    beta: float = hyperparameter(0.1, "reward of an answer = beta times its score; tau of IPO")

    def __post_init__(self) -> None:
        positive("beta", self.beta)

    @abc.abstractmethod
    def __call__(self, difference: PerPair, margins: PerPair | None) -> PerPair:
        """The loss of every pair from score(chosen) - score(rejected), to be minimised."""


@dataclasses.dataclass(frozen=True)
class Logistic(PairLoss):
    """-(1 - eps) log sigma(z) - eps log sigma(-z) with z = beta D - target_margin - margin, eps = label_smoothing.

    D is the difference of scores, margin the pair's own (0 without `margins`). eps is the share of labels that are
    believed to be swapped: the loss is least at sigma(z) = 1 - eps.

    Source: DPO, arXiv 2305.18290 eq. 7; label smoothing: Mitchell 2023, "A note on DPO with noisy preferences";
    target margin: SimPO, arXiv 2405.14734 eq. 6; a margin for each pair: Llama 2, arXiv 2307.09288 eq. 2.
    """

    label_smoothing: float = hyperparameter(0.0, "share of labels taken as swapped; above 0 it is cDPO")
    target_margin: float = hyperparameter(0.0, "subtracted from beta D of every pair; gamma of SimPO")

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_zero("label_smoothing", self.label_smoothing, at_most=0.5)
        at_least_zero("target_margin", self.target_margin)

    def formula(self) -> str:
        z = f"z = {'' if self.beta == 1 else f'{self.beta:g} '}D" + (
            f" - {self.target_margin:g}" if self.target_margin else ""
        )
        swapped = self.label_smoothing
        terms = f"{1 - swapped:g} log sigma(z) + {swapped:g} log sigma(-z)" if swapped else "log sigma(z)"
        return f"{terms}; {z}"

    def __call__(self, difference: PerPair, margins: PerPair | None) -> PerPair:
        z = self.beta * difference - self.target_margin
        z = z if margins is None else z - margins
        swapped = self.label_smoothing
        return -(1 - swapped) * jax.nn.log_sigmoid(z) - swapped * jax.nn.log_sigmoid(-z)


@dataclasses.dataclass(frozen=True)
class Square(PairLoss):
    """(D - 1 / (2 beta))^2: the difference of scores has a target beyond which it does not grow.

    Source: IPO, arXiv 2310.12036 eq. 17, whose tau is beta.
    """

    takes_margins: ClassVar[bool] = False

    def formula(self) -> str:
        return f"-(D - {1 / (2 * self.beta):g})^2"

    def __call__(self, difference: PerPair, margins: PerPair | None) -> PerPair:
        if margins is not None:
            raise ValueError("margins do not apply to a squared loss, whose target is 1 / (2 beta); leave them out")
        return (difference - 1 / (2 * self.beta)) ** 2
