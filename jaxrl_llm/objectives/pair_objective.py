"""Objectives on pairs of answers, one chosen over the other: the reward model's loss and the DPO family."""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxrl_llm.ground.array_typing import Array, Bool, Float, Mask
from jaxrl_llm.ground.metrics import Mean, Metric
from jaxrl_llm.ground.ranges import one_of
from jaxrl_llm.objectives.aggregation import Aggregation, name_of
from jaxrl_llm.objectives.batch import Batch, Ids, occupied, sequence_mean, sequence_sum
from jaxrl_llm.objectives.objective import Counts, Terms, TermsBase, pieces
from jaxrl_llm.objectives.pair_parts import PairLoss, Score

# The score of an answer is a sum or a mean over its tokens; other aggregations have no score of one answer.
_AGGREGATIONS = ("sequence_mean_token_sum", "sequence_mean_token_mean")


@dataclasses.dataclass(frozen=True)
class PairObjective(TermsBase):
    """loss = mean over pairs of f(score(chosen), score(rejected)), minimised; score(y) = sum_t w_t s_t.

    The four choices of an objective, on pairs: a label (+1 chosen, -1 rejected) in place of the advantage, s in place
    of the ratio, f of the surrogate; the aggregation's weights w are 1 or 1 / |y|. A value, as `Objective` is.

    Pairs are the sequences 2 i (chosen) and 2 i + 1 (rejected). Both must be in the same batch or micro-batch; a pair
    of which one answer has no unmasked token is left out of total and count, and counted in `pairs/incomplete`.

    Raises ValueError if the aggregation does not define the score of one answer, or two parts do not go together.
    """

    score: Score
    loss: PairLoss
    aggregation: Aggregation
    reads: ClassVar[str] = "pairs"
    needs_values: ClassVar[bool] = False
    compares_groups: ClassVar[bool] = False
    whole_minibatch: ClassVar[bool] = False

    def __post_init__(self) -> None:
        one_of("aggregation", name_of(self.aggregation) or type(self.aggregation).__name__, _AGGREGATIONS)
        for part in (self.score, self.loss, self.aggregation):
            part.check(self)

    @functools.cached_property
    def needs(self) -> frozenset[str]:
        """Arrays beyond mask that `terms` must be given."""
        return self.score.needs

    @property
    def learns_rewards(self) -> bool:
        """True if it trains a reward model and not a policy."""
        return "scores" in self.needs

    def counts(self, mask: Mask, sequence_ids: Ids = None, num_sequences: int | None = None) -> Counts:
        """Return the divisor of each term's total, the pairs with both answers; it adds up over micro-batches."""
        if sequence_ids is not None and num_sequences is None:
            raise ValueError("sequence_ids without num_sequences; give num_sequences, twice the number of pairs")
        here = _sides(occupied(mask, sequence_ids, num_sequences))
        pairs = jnp.sum(jnp.all(here, axis=1), dtype=jnp.float32)
        used = {"pairs": True, "centring": self.score.center_rewards_coefficient, "nll": self.score.nll_coef}
        return {name: pairs for name, one in used.items() if one}

    def evaluate(self, **arrays: Any) -> tuple[Terms, dict[str, Metric]]:
        """Terms and metrics of one batch; `batch` explains mask, sequence_ids and num_sequences (two a pair).

        Args:
          mask, logprobs, ref_logprobs: [b t], as `needs` says.
          scores: [b t], the scalar head's output in the state after each token; read at an answer's last token.
          margins: [b t], optional: how far apart the rewards of a pair should be, on every token of its chosen answer.
          entropy: [b t], optional, for a metric.
          Other arrays that a training step has for every objective are checked and not read.
        """
        batch = self._batch(arrays)
        here, complete, scores = self._scores(batch)
        margins = None if batch.margins is None else _sides(sequence_mean(batch.margins, *batch.sequences))[:, 0]
        if margins is not None and not self.loss.takes_margins:
            raise ValueError(f"margins do not apply to {type(self.loss).__name__}; leave them out")
        losses = {"pairs": self.loss(scores, margins)}
        if self.score.center_rewards_coefficient:
            losses["centring"] = self.score.center_rewards_coefficient * jnp.sum(scores, axis=1) ** 2
        if self.score.nll_coef:
            chosen = _sides(sequence_mean(batch.logprobs, *batch.sequences))[:, 0]
            losses["nll"] = -self.score.nll_coef * chosen
        counts = self.counts(*batch.sequences)
        terms = {name: (jnp.sum(x, where=complete), counts[name]) for name, x in losses.items()}

        rewards = self.loss.beta * scores
        margin = rewards[:, 0] - rewards[:, 1]
        metrics: dict[str, Metric] = {f"loss/{name}": Mean(*term) for name, term in terms.items()}
        metrics |= {
            "pairs/accuracy": Mean.of(jnp.where(margin == 0, 0.5, (margin > 0) * 1.0), complete),
            "pairs/margin": Mean.of(margin, complete),
            "pairs/reward_chosen": Mean.of(rewards[:, 0], complete),
            "pairs/reward_rejected": Mean.of(rewards[:, 1], complete),
            "pairs/incomplete": Mean.of(~complete * 1.0, jnp.any(here, axis=1)),
        }
        if "logprobs" in self.needs:
            logprobs = _sides(sequence_sum(batch.logprobs, *batch.sequences))
            metrics["pairs/logprob_chosen"] = Mean.of(logprobs[:, 0], complete)
            metrics["pairs/logprob_rejected"] = Mean.of(logprobs[:, 1], complete)
            if batch.entropy is not None:
                metrics["entropy"] = Mean.of(batch.entropy, batch.mask)
        return terms, jax.lax.stop_gradient(metrics)

    def rewards(self, **arrays: Any) -> Float[Array, "p 2"]:
        """beta times the score of both answers of every pair, chosen first; arguments as for `evaluate`.

        sigma(r_chosen - r_rejected) is the probability that the chosen answer is the better one. 0 for half a pair.
        """
        return self.loss.beta * self._scores(self._batch(arrays))[2]

    def _scores(self, batch: Batch) -> tuple[Bool[Array, "p 2"], Bool[Array, "p"], Float[Array, "p 2"]]:
        """Which answers are there, which pairs are complete, and the score of every answer."""
        here = _sides(occupied(*batch.sequences))
        complete = jnp.all(here, axis=1)
        scores = _sides(sequence_sum(self.aggregation.weights(batch) * self.score(batch), *batch.sequences))
        return here, complete, jnp.where(complete[:, None], scores, 0)

    def _batch(self, arrays: dict[str, Any]) -> Batch:
        given: dict[str, Any] = {name: x for name, x in arrays.items() if x is not None}
        missing = sorted((self.needs | {"mask"}) - set(given))
        if missing:
            raise ValueError(f"this objective needs {', '.join(missing)}; pass mask and what objective.needs lists")
        unread = jnp.zeros(jnp.shape(given["mask"]))
        return Batch.of(**{**dict.fromkeys(("logprobs", "old_logprobs", "advantages"), unread), **given})

    def formula(self) -> tuple[list[str], list[str]]:
        """Return what `Objective.formula` does; D is the difference of the scores s of a pair's answers."""
        score, *centring = pieces(self.score)
        sum_of_tokens = pieces(self.aggregation)[0].removeprefix("mean_y ")
        loss, *letters = pieces(self.loss)
        letters += ["D = s(chosen) - s(rejected)", f"s = {sum_of_tokens} {score}"]
        nll = [f"+ {self.score.nll_coef:g} mean_t log pi(chosen)"] if self.score.nll_coef else []
        return [f"mean over pairs {loss}", *nll, *centring], letters


def _sides(x: Array) -> Array:
    """The two answers of every pair, [2 p] -> [p 2]: column 0 chosen, column 1 rejected."""
    if x.shape[0] % 2:
        raise ValueError(f"num_sequences={x.shape[0]} is odd; give pairs: sequence 2i chosen, 2i + 1 rejected")
    return x.reshape(-1, 2)
