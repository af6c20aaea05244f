"""An objective: four choices (advantage, ratio, surrogate, aggregation) plus KL, entropy, correction and value."""

import abc
import dataclasses
import functools
import math
from typing import Any, ClassVar

import jax.numpy as jnp

from jaxrl_llm.ground.array_typing import Array, Float, Mask, PerToken
from jaxrl_llm.ground.metrics import Metric
from jaxrl_llm.ground.ranges import one_of
from jaxrl_llm.objectives.advantages import Advantage
from jaxrl_llm.objectives.aggregation import Aggregation
from jaxrl_llm.objectives.batch import Batch, Ids, occupied, token_log_ratio
from jaxrl_llm.objectives.corrections import Correction
from jaxrl_llm.objectives.diagnostics import diagnose
from jaxrl_llm.objectives.divergences import ESTIMATORS, kl_loss
from jaxrl_llm.objectives.parts import Part, check_fields, hyperparameter
from jaxrl_llm.objectives.ratios import Ratio
from jaxrl_llm.objectives.surrogates import Surrogate
from jaxrl_llm.objectives.value import ValueLoss

Counts = dict[str, Float[Array, ""]]
Terms = dict[str, tuple[Float[Array, ""], Float[Array, ""]]]


class TermsBase(abc.ABC):
    """Base of the objectives: a loss is the sum of total / count over its terms."""

    @abc.abstractmethod
    def evaluate(self, **arrays: Any) -> tuple[Terms, dict[str, Metric]]:
        """Terms of one batch, with sign and coefficient inside the total, and metrics that merge over micro-batches."""

    def terms(self, **arrays: Any) -> Terms:
        """{name: (total, count)}, without the metrics. Arguments as for `evaluate`."""
        return self.evaluate(**arrays)[0]

    def __call__(self, **arrays: Any) -> tuple[Float[Array, ""], dict[str, Metric]]:
        """(loss, metrics) of one batch; a term without a token, or without a complete pair, contributes 0."""
        terms, metrics = self.evaluate(**arrays)
        return sum((total / jnp.maximum(count, 1) for total, count in terms.values()), jnp.zeros(())), metrics


@dataclasses.dataclass(frozen=True)
class Objective(TermsBase):
    """loss = - agg(w S(r, A)) + kl_coef agg(KL) + teacher_coef agg(D) - entropy_coef agg(H) + value loss, minimised.

    `w` is the sampler correction (1 without one), S the surrogate, r the ratio, A the advantage, D the
    divergence from a teacher, agg the aggregation.
    A value: hashable, compares by content, usable as a static argument of jit.

    Raises:
      ValueError: a coefficient is out of range, or two choices do not make sense together.
    """

    advantage: Advantage
    ratio: Ratio
    surrogate: Surrogate
    aggregation: Aggregation
    kl_coef: float = hyperparameter(0.0, "weight of the KL to the start, as a loss term", least=0, below=math.inf)
    kl_estimator: str = hyperparameter("k3", "k2 | k3 | k3_unbiased | low_var_kl | abs: estimator of that KL")
    entropy_coef: float = hyperparameter(0.0, "weight of the entropy bonus", least=0, below=math.inf)
    teacher_coef: float = hyperparameter(
        0.0, "weight of the divergence from the teacher, as a loss term", least=0, below=math.inf
    )
    correction: Correction | None = None
    value: ValueLoss | None = None
    learns_rewards: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.kl_estimator == "k1":
            raise ValueError(
                'kl_estimator="k1" has zero expected gradient as a loss term (a score function averages to 0); use k2, '
                "k3 or k3_unbiased, or put k1 inside the rewards (reward_kl_coef of ppo)"
            )
        one_of("kl_estimator", self.kl_estimator, ESTIMATORS)
        for part in self.parts:
            part.check(self)

    @property
    def parts(self) -> list[Part]:
        """The parts it is made of; correction and value only where there are any."""
        parts = (self.advantage, self.ratio, self.surrogate, self.aggregation, self.correction, self.value)
        return [part for part in parts if part is not None]

    @functools.cached_property
    def needs(self) -> frozenset[str]:
        """Arrays beyond logprobs, old_logprobs, advantages and mask that `terms` must be given."""
        coefficients = {
            "ref_logprobs": self.kl_coef,
            "teacher_divergence": self.teacher_coef,
            "entropy": self.entropy_coef,
        }
        own = frozenset(name for name, coefficient in coefficients.items() if coefficient)
        return own.union(*(part.needs for part in self.parts))

    @property
    def reads(self) -> str:
        """The data that it learns from: "rollouts", or "answers" that were given."""
        return self.advantage.reads

    @property
    def needs_values(self) -> bool:
        """True if there must be a critic."""
        return self.advantage.needs_values

    @property
    def compares_groups(self) -> bool:
        """True if an answer is compared with the others to its prompt."""
        return self.advantage.compares_groups

    @property
    def whole_minibatch(self) -> bool:
        """True if a part computes something over all tokens of a minibatch, so that micro-batches would change it."""
        return any(part.whole_minibatch for part in self.parts)

    def policy(self, batch: Batch) -> PerToken:
        """w S(r, A) of every token, [b t]: un-reduced, to be maximised."""
        log_ratio = per_token(self.ratio, self.ratio(batch), batch)
        surrogate = per_token(self.surrogate, self.surrogate(log_ratio, batch), batch)
        return surrogate if self.correction is None else self.correction(batch) * surrogate

    def counts(self, mask: Mask, sequence_ids: Ids = None, num_sequences: int | None = None) -> Counts:
        """Return the divisor of each term's total; it depends on masks only, and adds up over micro-batches."""
        tokens = jnp.sum(mask, dtype=jnp.float32)
        sequences = jnp.sum(occupied(mask, sequence_ids, num_sequences), dtype=jnp.float32)
        count = self.aggregation.count(tokens, sequences)
        used = {"policy": True, "kl": self.kl_coef, "teacher": self.teacher_coef, "entropy": self.entropy_coef}
        value = {} if self.value is None else {"value": self.value.aggregation.count(tokens, sequences)}
        return {name: count for name, one in used.items() if one} | value

    def evaluate(self, **arrays: Any) -> tuple[Terms, dict[str, Metric]]:
        """Terms and metrics of one batch; `batch` explains mask, sequence_ids and num_sequences.

        Args:
          logprobs, old_logprobs, mask: [b t].
          advantages: [b], one number an answer, or [b t].
          ref_logprobs, sampler_logprobs, teacher_logprobs, teacher_divergence, age, values, old_values, returns,
            entropy: [b t]; required if in `needs`, otherwise optional (metrics use them when given).
          router_logprobs, old_router_logprobs: [l b t k], log-probabilities of the full router softmax at the experts
            that pi_old used.

        Raises:
          ValueError: an array is unknown, missing or misshapen.
        """
        batch = Batch.of(self.needs, **arrays)
        terms = self._terms(batch)
        return terms, diagnose(self.policy, self.ratio, self.surrogate, self.correction, batch, terms)

    def terms(self, **arrays: Any) -> Terms:
        return self._terms(Batch.of(self.needs, **arrays))

    def _terms(self, batch: Batch) -> Terms:
        totals = {"policy": -self.aggregation.total(self.policy(batch), batch)}
        if self.kl_coef:
            log_q = token_log_ratio(batch.require("ref_logprobs"), batch.logprobs, batch.mask)
            kl = kl_loss(log_q, batch.log_ratio, self.kl_estimator)
            totals["kl"] = self.kl_coef * self.aggregation.total(kl, batch)
        if self.teacher_coef:
            totals["teacher"] = self.teacher_coef * self.aggregation.total(batch.require("teacher_divergence"), batch)
        if self.entropy_coef:
            totals["entropy"] = -self.entropy_coef * self.aggregation.total(batch.require("entropy"), batch)
        if self.value is not None:
            totals["value"] = self.value.aggregation.total(self.value(batch), batch)
        counts = self.counts(*batch.sequences)
        return {name: (total, counts[name]) for name, total in totals.items()}

    def formula(self) -> tuple[list[str], list[str]]:
        """Return the maximised terms and their letters: (["mean_yt M r A", "- 0.1 KL(pi, pi_ref)"], ["M = ..."]).

        y is an answer, t a token of it, R its reward, sg the stopped gradient. Every part writes its own piece.
        """
        aggregation, *definitions = pieces(self.aggregation)
        surrogate, *letters = pieces(self.surrogate)
        letters += [*pieces(self.ratio, "r = "), *pieces(self.advantage, "A = ")]
        if self.correction is not None:
            letters += pieces(self.correction, "w = ")
        terms = [f"{aggregation} {'w ' if self.correction else ''}{surrogate}"]
        if self.kl_coef:
            terms.append(f"- {self.kl_coef:g} KL(pi, pi_ref)")
        if self.teacher_coef:
            terms.append(f"- {self.teacher_coef:g} D(pi, pi_T)")
        if self.entropy_coef:
            terms.append(f"+ {self.entropy_coef:g} H(pi)")
        if self.value is not None:
            terms.append(f"- {self.value.value_coef:g} value loss")
        return terms, [definition for definition in (*letters, *definitions) if definition]


def per_token(part: Part, values: Array, batch: Batch) -> PerToken:
    """Return `values` if they are [b t]; another shape would be broadcast without notice, so it is a ValueError."""
    if values.shape != batch.mask.shape:
        raise ValueError(
            f"{type(part).__name__} returned shape {values.shape}, the mask has {batch.mask.shape}; "
            "return one number a token, [b t]"
        )
    return values


def pieces(part: Part, letter: str = "") -> list[str]:
    """A part's formula, cut at its definitions; name and fields of a class that inherits one and computes another."""
    own = vars(type(part))
    if "formula" in own:
        return part.formula().split("; ")
    return Part.formula(part).split("; ") if "equation" in own else [letter + Part.formula(part)]
