"""Objectives on pairs of answers, one chosen over the other: the reward model's loss and the DPO family."""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxrl_llm.ground.array_typing import Array, Bool, Float, Integer, Mask
from jaxrl_llm.ground.metrics import Mean, Metric
from jaxrl_llm.ground.ranges import one_of
from jaxrl_llm.objectives.aggregation import Aggregation, name_of
from jaxrl_llm.objectives.batch import Batch
from jaxrl_llm.objectives.objective import Terms
from jaxrl_llm.objectives.pair_parts import PairLoss, Score, occupied, sides

__all__ = ["PairObjective"]


# The score of an answer is a sum or a mean over its tokens; other aggregations have no score of one answer.
_AGGREGATIONS = ("sequence_mean_token_sum", "sequence_mean_token_mean")


@dataclasses.dataclass(frozen=True)
class PairObjective:
    """loss = mean over pairs of f(score(chosen) - score(rejected)), minimised; score(y) = sum_t w_t s_t.

    The four choices of an objective, on pairs: the label takes the place of the advantage (+1 chosen, -1 rejected), s
    that of the ratio, f that of the surrogate, and the aggregation's weights w (1, or 1 / |y|) make a score of tokens.
    A value: hashable, compares by content, usable as a static argument of jit.

    Pairs are the sequences 2 i (chosen) and 2 i + 1 (rejected). Both must be in the same batch or micro-batch; a pair
    of which one answer has no unmasked token is left out of total and count, and counted in `pairs/incomplete`.

    Raises:
      ValueError: an aggregation that does not define the score of one answer, or two parts do not go together.
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
        """Whether it trains a reward model and not a policy."""
        return "scores" in self.needs

    def counts(
        self, mask: Mask, sequence_ids: Integer[Array, "b t"] | None = None, num_sequences: int | None = None
    ) -> dict[str, Float[Array, ""]]:
        """What each term's total is divided by: pairs with both answers. Adds up over micro-batches."""
        return self._counts(jnp.all(occupied(mask, sequence_ids, num_sequences), axis=1))

    def _counts(self, complete: Bool[Array, "p"]) -> dict[str, Float[Array, ""]]:
        pairs = jnp.sum(complete, dtype=jnp.float32)
        return {"pairs": pairs} | ({"centring": pairs} if self.score.centred else {})

    def evaluate(self, **arrays: Any) -> tuple[Terms, dict[str, Metric]]:
        """Terms and metrics of one batch.

        Args:
          mask: [b t], boolean, True on answer tokens (EOS included).
          logprobs, ref_logprobs: [b t], as `needs` says.
          scores: [b t], the scalar head's output in the state after each token; read at an answer's last token.
          margins: [b t], optional: how far apart the rewards of a pair should be, the same on every token of its
            chosen answer.
          entropy: [b t], optional, for a metric.
          sequence_ids: integers [b t] for packed rows (default: the row is the sequence); num_sequences, a static
            int, is then twice the number of pairs.
          Other arrays that a training step has for every objective are checked and not read.

        Returns:
          {name: (total, count)} and metrics that merge over micro-batches.

        Raises:
          ValueError: an array is unknown, missing or misshapen.
        """
        batch = self._batch(arrays)
        here, complete, scores = self._scores(batch)
        margins = None if batch.margins is None else sides(batch.sequence_mean(batch.margins))[:, 0]
        losses = {"pairs": self.loss(scores[:, 0] - scores[:, 1], margins)}
        if self.score.centred:
            losses["centring"] = self.score.centring(scores)
        counts = self._counts(complete)
        terms = {name: (jnp.sum(x, where=complete), counts[name]) for name, x in losses.items()}
        return terms, jax.lax.stop_gradient(self._metrics(terms, scores, here, batch))

    def rewards(self, **arrays: Any) -> Float[Array, "p 2"]:
        """beta times the score of both answers of every pair, chosen first; arguments as for `evaluate`.

        sigma(r_chosen - r_rejected) is the probability that the chosen answer is the better one. 0 for half a pair.
        """
        return self.loss.beta * self._scores(self._batch(arrays))[2]

    def _scores(self, batch: Batch) -> tuple[Bool[Array, "p 2"], Bool[Array, "p"], Float[Array, "p 2"]]:
        """Which answers are there, which pairs are complete, and the score of every answer."""
        here = occupied(batch.mask, batch.sequence_ids, batch.num_sequences)
        complete = jnp.all(here, axis=1)
        scores = sides(batch.per_sequence(self.aggregation.weights(batch) * self.score(batch)))
        return here, complete, jnp.where(complete[:, None], scores, 0)

    def _batch(self, arrays: dict[str, Any]) -> Batch:
        given: dict[str, Any] = {name: x for name, x in arrays.items() if x is not None}
        missing = sorted((self.needs | {"mask"}) - set(given))
        if missing:
            raise ValueError(f"this objective needs {', '.join(missing)}; pass mask and what objective.needs lists")
        unread = jnp.zeros(jnp.shape(given["mask"]))
        return Batch.of(**{**dict.fromkeys(("logprobs", "old_logprobs", "advantages"), unread), **given})

    def _metrics(
        self, terms: Terms, scores: Float[Array, "p 2"], here: Bool[Array, "p 2"], batch: Batch
    ) -> dict[str, Metric]:
        complete = jnp.all(here, axis=1)
        rewards = self.loss.beta * scores
        margin = rewards[:, 0] - rewards[:, 1]
        metrics: dict[str, Metric] = {f"loss/{name}": Mean(total, count) for name, (total, count) in terms.items()}
        metrics |= {
            "pairs/accuracy": Mean.of(jnp.where(margin == 0, 0.5, (margin > 0) * 1.0), complete),
            "pairs/margin": Mean.of(margin, complete),
            "pairs/reward_chosen": Mean.of(rewards[:, 0], complete),
            "pairs/reward_rejected": Mean.of(rewards[:, 1], complete),
            "pairs/incomplete": Mean.of(~complete * 1.0, jnp.any(here, axis=1)),
        }
        if "logprobs" in self.needs:
            logprobs = sides(batch.per_sequence(batch.logprobs))
            metrics["pairs/logprob_chosen"] = Mean.of(logprobs[:, 0], complete)
            metrics["pairs/logprob_rejected"] = Mean.of(logprobs[:, 1], complete)
        if "logprobs" in self.needs and batch.entropy is not None:
            metrics["entropy"] = Mean.of(batch.entropy, batch.mask)
        return metrics

    def terms(self, **arrays: Any) -> Terms:
        """{name: (total, count)}: what a training step accumulates. Arguments as for `evaluate`."""
        return self.evaluate(**arrays)[0]

    def __call__(self, **arrays: Any) -> tuple[Float[Array, ""], dict[str, Metric]]:
        """(loss, metrics) of one batch: loss = sum of total / count, 0 without a complete pair."""
        terms, metrics = self.evaluate(**arrays)
        return sum((total / jnp.maximum(count, 1) for total, count in terms.values()), jnp.zeros(())), metrics
