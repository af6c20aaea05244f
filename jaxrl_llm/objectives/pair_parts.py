"""The parts of an objective on pairs: what a token adds to an answer's score, and the loss of a score difference."""

import abc
import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxrl_llm.ground.array_typing import Array, Float, Mask, PerToken
from jaxrl_llm.objectives.aggregation import SequenceMeanTokenSum, name_of
from jaxrl_llm.objectives.batch import Batch, Ids, last_tokens
from jaxrl_llm.objectives.parts import Part, hyperparameter

PerPair = Float[Array, "p"]
PerSide = Float[Array, "p 2"]  # column 0 chosen, column 1 rejected


def last_token_scores(
    scores: PerToken, mask: Mask, sequence_ids: Ids = None, num_sequences: int | None = None
) -> PerToken:
    """The scalar head's output in the state after the last token of each answer, 0 at its other tokens.

    The sum over an answer is its reward r(x, y). `batch` says what the last three arguments are.

    Source: InstructGPT, arXiv 2203.02155 eq. 1.
    """
    return jnp.where(last_tokens(mask, sequence_ids, num_sequences), scores, 0)


def logistic_loss(
    difference: PerPair,
    beta: float,
    label_smoothing: float = 0.0,
    target_margin: float = 0.0,
    margins: PerPair | None = None,
) -> PerPair:
    """-(1 - eps) log sigma(z) - eps log sigma(-z) with z = beta D - target_margin - margin, eps = label_smoothing.

    D = score(chosen) - score(rejected) and margin are [p], one number a pair. eps is the share of labels that are
    believed to be swapped: the loss is least at sigma(z) = 1 - eps.

    Source: DPO, arXiv 2305.18290 eq. 7; label smoothing: Mitchell 2023, "A note on DPO with noisy preferences";
    target margin: SimPO, arXiv 2405.14734 eq. 6; a margin for each pair: Llama 2, arXiv 2307.09288 eq. 2.
    """
    z = beta * difference - target_margin
    z = z if margins is None else z - margins
    return -(1 - label_smoothing) * jax.nn.log_sigmoid(z) - label_smoothing * jax.nn.log_sigmoid(-z)


def square_loss(difference: PerPair, beta: float) -> PerPair:
    """(D - 1 / (2 beta))^2: the difference D of scores, [p], has a target beyond which it does not grow.

    Source: IPO, arXiv 2310.12036 eq. 17, whose tau is beta and whose D is of sums over the answers. The recipe `ipo`
    has TRL's means over them; aggregation="sequence_mean_token_sum" gives the equation.
    """
    return (difference - 1 / (2 * beta)) ** 2


class Score(Part, abc.ABC):
    """Base of the scores: s_t of every token; the aggregation's weights sum them to the score of an answer.

    center_rewards_coefficient: weight of a second loss, (r_chosen + r_rejected)^2 (arXiv 2312.09244): the loss of
      differences does not fix the zero of the rewards.
    nll_coef: weight of a second loss, -mean_t log pi of the chosen answer.
    """

    center_rewards_coefficient: ClassVar[float] = 0.0
    nll_coef: ClassVar[float] = 0.0

    @abc.abstractmethod
    def __call__(self, batch: Batch) -> PerToken:
        """s_t [b t], un-reduced; anything where masked."""


@dataclasses.dataclass(frozen=True)
class LogLikelihood(Score):
    """log pi: no reference model.  Source: SimPO, arXiv 2405.14734 eq. 4; nll_coef: RPO, arXiv 2404.19733."""

    nll_coef: float = hyperparameter(
        0.0, "weight of the mean negative log-likelihood of a chosen answer's tokens", least=0, below=math.inf
    )
    needs: ClassVar[frozenset[str]] = frozenset({"logprobs"})
    equation: ClassVar[str] = "log pi"

    def __call__(self, batch: Batch) -> PerToken:
        return batch.logprobs


class ReferenceRatio(LogLikelihood):
    """log pi - log pi_ref; pi is optimal for the reward beta times its sum.  Source: DPO, arXiv 2305.18290 eq. 5."""

    needs: ClassVar[frozenset[str]] = frozenset({"logprobs", "ref_logprobs"})
    equation: ClassVar[str] = "(log pi - log pi_ref)"

    def __call__(self, batch: Batch) -> PerToken:
        return super().__call__(batch) - batch.require("ref_logprobs")


@dataclasses.dataclass(frozen=True)
class RewardHead(Score):
    """`last_token_scores`: the reward of a scalar head."""

    center_rewards_coefficient: float = hyperparameter(
        0.0, "times (r_chosen + r_rejected)^2: keeps the rewards of a reward model around 0", least=0, below=math.inf
    )
    needs: ClassVar[frozenset[str]] = frozenset({"scores"})

    def check(self, objective: Any) -> None:
        if not isinstance(objective.aggregation, SequenceMeanTokenSum):
            raise ValueError(
                f"aggregation={name_of(objective.aggregation)!r} would divide a reward, which is read at one token, by "
                "the answer's length; use sequence_mean_token_sum"
            )

    def __call__(self, batch: Batch) -> PerToken:
        return last_token_scores(batch.require("scores"), *batch.sequences)

    def formula(self) -> str:
        centre = self.center_rewards_coefficient
        own = "[t is the last] head(t)"
        return f"{own}; - {centre:g} (s(chosen) + s(rejected))^2" if centre else own


@dataclasses.dataclass(frozen=True)
class PairLoss(Part, abc.ABC):
    """Base of the losses of a pair; beta times a score is a reward."""

    takes_margins: ClassVar[bool] = True  # of single pairs; others are refused
    beta: float = hyperparameter(0.1, "reward of an answer = beta times its score; tau of IPO", above=0)

    @abc.abstractmethod
    def __call__(self, scores: PerSide, margins: PerPair | None) -> PerPair:
        """The loss of every pair from the scores of its chosen and its rejected answer, to be minimised."""


@dataclasses.dataclass(frozen=True)
class Logistic(PairLoss):
    """`logistic_loss`, of the reward model and of DPO, cDPO and SimPO."""

    label_smoothing: float = hyperparameter(
        0.0, "share of labels taken as swapped; above 0 it is cDPO", least=0, most=0.5
    )
    target_margin: float = hyperparameter(
        0.0, "subtracted from beta D of every pair; gamma of SimPO", least=0, below=math.inf
    )

    def formula(self) -> str:
        beta = "" if self.beta == 1 else f"{self.beta:g} "
        margin = f" - {self.target_margin:g}" if self.target_margin else ""
        swapped = self.label_smoothing
        terms = f"{1 - swapped:g} log sigma(z) + {swapped:g} log sigma(-z)" if swapped else "log sigma(z)"
        return f"{terms}; z = {beta}D{margin}"

    def __call__(self, scores: PerSide, margins: PerPair | None) -> PerPair:
        return logistic_loss(scores[:, 0] - scores[:, 1], self.beta, self.label_smoothing, self.target_margin, margins)


class Square(PairLoss):
    """`square_loss`, of IPO."""

    takes_margins: ClassVar[bool] = False

    def formula(self) -> str:
        return f"-(D - {1 / (2 * self.beta):g})^2"

    def __call__(self, scores: PerSide, margins: PerPair | None) -> PerPair:
        return square_loss(scores[:, 0] - scores[:, 1], self.beta)
