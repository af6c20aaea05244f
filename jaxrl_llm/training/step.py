"""One optimizer step, and the scoring pass before it: jitted, sharded, one trace per declared shape.

Both walk the micro-batches of a `Layout` in one compiled loop. Counts are taken over the whole minibatch first, so each
micro-batch contributes grad(total) / count and the sum does not depend on how the minibatch was cut.
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import chex
import flax.struct
import jax
import jax.numpy as jnp
import optax

from jaxrl_llm.ground import metrics as M
from jaxrl_llm.ground import sharding
from jaxrl_llm.ground.array_typing import Array, Bool, Float, Integer, Mask, PerToken, SegmentIds, Tokens
from jaxrl_llm.models import (
    Model,
    Routing,
    Rows,
    blank_record,
    experts_of,
    load_balance_loss,
    scoring,
    time_multiple,
)
from jaxrl_llm.objectives import AnyObjective
from jaxrl_llm.training.gaps import old_against_current, sampler_against_old
from jaxrl_llm.training.layout import Layout, sequence_ids
from jaxrl_llm.training.micro_batches import MicroBatches
from jaxrl_llm.training.policy import Policy
from jaxrl_llm.training.replay import by_router, router_logprobs
from jaxrl_llm.training.state import TrainBatch, Trained, TrainState


class Scored(flax.struct.PyTreeNode):
    """The results of a scoring pass; a field that is None in the argument is not computed."""

    logprobs: PerToken | None = None
    state_values: PerToken | None = None  # of the state AFTER token t, since GAE needs the last one
    recorded: Routing | None = None  # the experts that the pass used
    by_router: Routing | None = None  # those chosen by its router, where the pass replayed others


@dataclasses.dataclass(frozen=True)
class Learner:
    """The compiled functions of training; hashable, so that equal learners share their compilations.

    policy_frozen: the critic learns alone, and the policy stays bit for bit as it is. Adam's step count advances while
      the policy's moments stay 0, so the policy's first real updates are smaller.
    """

    model: Model
    objective: AnyObjective
    optimizer: optax.GradientTransformation  # of a `Trained`
    temperature: float = 1.0  # of the rollout
    aux_coef: float = 0.0
    rows: Rows = "packed"  # what a row of a layout holds, as in `Model.apply`
    answer_tokens: int = 0  # in a row at most, where the log-probs of prompts are not read; 0: all of them are
    policy_frozen: bool = False

    def score(
        self,
        policy: Policy,
        tokens: Tokens,
        layouts: Iterable[Layout],
        into: Scored,
        routing: Routing | None = None,
        read: scoring.Read = scoring.EVERY,
    ) -> Scored:
        """Scores of the rows of some minibatches, written into the arrays of the whole rollout.

        Args:
          layouts: of the minibatches. The forward has the shape of the training forward: in float32 both give the same
            numbers.
          into: of `blank_scores`; its arrays are gone afterwards.
          routing: is replayed.
          read: of the log-probs; at most `answer_tokens` in a row.
        """
        for layout in layouts:
            into = self._score(policy, tokens, routing, read, layout, into)
        return into

    @functools.partial(jax.jit, static_argnums=0, donate_argnames=("into",))
    def _score(
        self, policy: Policy, tokens: Tokens, routing: Routing | None, read: scoring.Read, layout: Layout, into: Scored
    ) -> Scored:
        params = policy.whole()
        logits = into.recorded is not None and into.recorded.logits is not None
        chosen = logits or into.by_router is not None
        micro_batches = self._cut((tokens, routing, read), layout)

        def of(i: Array) -> Scored:
            tokens, routing, read = micro_batches[i]
            out = self._forward(params, tokens, micro_batches.layout.segment_ids[i], routing, read, chosen)
            routed: Any = out.routing
            return Scored(
                logprobs=None if into.logprobs is None else out.logprobs,
                state_values=None if into.state_values is None else scoring.values(params["value_head"], out.hidden),
                recorded=None if into.recorded is None else routed if logits else Routing(routed.experts),
                by_router=None if into.by_router is None else by_router(routed),
            )

        return sharding.constrain_rollout(micro_batches.fill(into, of), self.model.mesh)

    def _cut(self, arrays: Any, layout: Layout) -> MicroBatches:
        """Micro-batches whose rows have a length that the devices divide where they share a row."""
        return MicroBatches(arrays, layout, self.model.mesh, time_multiple(self.model.config, self.model.mesh))

    def _forward(
        self,
        params: Any,
        tokens: Tokens,
        segment_ids: SegmentIds,
        routing: Routing | None,
        read: scoring.Read,
        router_logits: bool,
    ) -> scoring.Scores:
        return scoring.score(
            self.model,
            params,
            tokens,
            segment_ids,
            routing=routing,
            temperature=self.temperature,
            router_logits=router_logits,
            rows=self.rows,
            read=read,
            most=self.answer_tokens,
        )

    @functools.partial(jax.jit, static_argnums=0, static_argnames=("logprobs", "values", "record", "by_router"))
    def blank_scores(
        self,
        tokens: Tokens,
        *,
        logprobs: bool = True,
        values: bool = False,
        record: str = "none",
        by_router: bool = False,
    ) -> Scored:
        """Empty arrays for the scores of a rollout, sharded by rows.

        Args:
          record: of the routing, none, experts, or logits (of the router, too); nothing for a dense model.
          by_router: with a record, also the experts chosen by the router.
        """
        config = self.model.config
        routed = record != "none" and config.num_moe_layers > 0
        scores = Scored(
            logprobs=jnp.zeros(tokens.shape, jnp.float32) if logprobs else None,
            state_values=jnp.zeros(tokens.shape, jnp.float32) if values else None,
            recorded=blank_record(config, *tokens.shape, logits=record == "logits") if routed else None,
            by_router=blank_record(config, *tokens.shape, logits=False) if routed and by_router else None,
        )
        return sharding.constrain_rollout(scores, self.model.mesh)

    def update(self, state: TrainState, batch: TrainBatch, layout: Layout) -> tuple[TrainState, dict[str, M.Metric]]:
        """One optimizer step on one minibatch; the arrays of `state` but for its base are gone afterwards.

        A minibatch without an unmasked token, or with a loss or gradient that is not finite, leaves the state as it
        was; metrics say so (`update/skipped`, `update/not_finite`).

        Raises:
          AssertionError: an array of the batch is not [b t] or a record not [l b t x], which would broadcast.
        """
        new, metrics = self._update(state.replace(base=None), state.base, batch, layout)
        return new.replace(base=state.base), metrics

    def lower_score(
        self, policy: Policy, tokens: Tokens, layout: Layout, into: Scored, routing: Routing | None, read: scoring.Read
    ) -> jax.stages.Lowered:
        """The program of `score` for one minibatch, from abstract arrays."""
        return Learner._score.lower(self, policy, tokens, routing, read, layout, into)

    def lower_update(self, state: TrainState, batch: TrainBatch, layout: Layout) -> jax.stages.Lowered:
        """The program of `update`, from abstract arrays."""
        return Learner._update.lower(self, state.replace(base=None), state.base, batch, layout)

    @functools.partial(jax.jit, static_argnums=0, donate_argnames=("state",))
    def _update(
        self, state: TrainState, base: Any, batch: TrainBatch, layout: Layout
    ) -> tuple[TrainState, dict[str, M.Metric]]:
        check_shapes(batch)
        rows, time = batch.tokens.shape
        micro_batches = self._cut(batch, layout)
        layout = micro_batches.layout
        ids = sequence_ids(jnp.asarray(layout.index), time)
        counts = self._counts(micro_batches.all_of(batch.loss_mask), ids, rows)
        occupied = jnp.max(jnp.stack([*counts.values()])) > 0

        def one(i: Array | int) -> Any:
            # In the rollout every answer is segment 1.
            micro = micro_batches[i].replace(segment_ids=layout.segment_ids[i])

            def loss(trained: Trained) -> Any:
                whole = TrainState(trained, None, None, base, state.scale)
                return self._loss(whole.policy, whole.critic, micro, (ids[i], rows), counts)

            return jax.value_and_grad(loss, has_aux=True)(state.trained)

        totals, metrics, gradients = micro_batches.accumulate(one)
        metrics = metrics | {f"loss/{name}": M.Mean(total, counts[name]) for name, total in totals.items()}
        losses = [total / jnp.maximum(counts[name], 1) for name, total in totals.items()]
        return self._apply(state, gradients, sum(losses, jnp.zeros(())), occupied, metrics)

    def _counts(
        self, masks: Bool[Array, "m r t"], ids: Integer[Array, "m r t"], rows: int
    ) -> dict[str, Float[Array, ""]]:
        """What every total is divided by: over the whole minibatch, all micro-batches and all devices."""

        def of(mask: Mask, ids: Array) -> dict[str, Array]:
            counts = self.objective.counts(mask, ids, rows)
            if self.aux_coef:
                counts["aux"] = jnp.sum(jnp.zeros(rows, bool).at[ids.ravel()].max(mask.ravel())).astype(jnp.float32)
            return counts

        return jax.tree.map(lambda x: jnp.sum(x, 0), jax.vmap(of)(masks, ids))

    def _loss(
        self, policy: Policy, critic: Policy | None, micro: TrainBatch, sequences: Any, counts: dict[str, Array]
    ) -> Any:
        """(loss, ({term: total}, metrics)) of one micro-batch; loss = sum of total / count of the minibatch.

        sequences: the id of every token's answer, and how many answers there are.
        """
        params, replayed = policy.whole(), micro.routing.replayed
        has_router = self.model.config.num_moe_layers > 0
        out = self._forward(params, micro.tokens, micro.segment_ids, replayed, micro.read, has_router)
        terms, metrics = self.objective.evaluate(**self._arrays(params, critic, out, micro, sequences))
        totals = {name: total for name, (total, _) in terms.items()}
        if self.aux_coef and out.routing is not None:
            logits: Any = out.routing.logits  # whatever is replayed, the experts chosen by the router are balanced
            chosen = experts_of(logits, self.model.config.num_experts_per_tok)
            totals["aux"] = self.aux_coef * load_balance_loss(logits, chosen, micro.loss_mask, *sequences)[0]
        if micro.old_logprobs is None and micro.sampler_logprobs is not None:  # this forward is pi_old
            metrics |= sampler_against_old(micro, out.logprobs, out.routing)
        elif micro.old_logprobs is not None:
            metrics |= old_against_current(micro, out.logprobs, out.routing)
        loss = sum(total / jnp.maximum(counts[name], 1) for name, total in totals.items())
        return loss, (totals, jax.lax.stop_gradient(metrics))

    def _arrays(
        self, params: Any, critic: Policy | None, out: scoring.Scores, micro: TrainBatch, sequences: Any
    ) -> dict[str, Any]:
        """What the objective reads of one micro-batch, by its names."""
        arrays: dict[str, Any] = {
            "logprobs": out.logprobs,
            "old_logprobs": jax.lax.stop_gradient(out.logprobs) if micro.old_logprobs is None else micro.old_logprobs,
            "mask": micro.loss_mask,
            "advantages": micro.advantages,
            "sampler_logprobs": micro.sampler_logprobs,
            "ref_logprobs": micro.ref_logprobs,
            "margins": micro.margins,
            "entropy": out.entropy,
        }
        if "age" in self.objective.needs:
            arrays["age"] = jnp.zeros_like(micro.advantages) if micro.age is None else micro.age
        if "scores" in self.objective.needs:
            arrays["scores"] = scoring.values(params["value_head"], out.hidden)
        if micro.returns is not None:
            arrays |= {"returns": micro.returns, "old_values": micro.old_values}
            arrays["values"] = self._values(params, critic, out, micro)
        if "router_logprobs" in self.objective.needs:
            scored: Any = micro.routing.scored  # with the old router's logits
            current: Any = out.routing
            arrays["router_logprobs"] = router_logprobs(current.logits, scored)
            arrays["old_router_logprobs"] = router_logprobs(scored.logits, scored)
        if self.rows != "padded":
            arrays["sequence_ids"], arrays["num_sequences"] = sequences
        return {name: x for name, x in arrays.items() if x is not None}

    def _values(self, params: Any, critic: Policy | None, out: scoring.Scores, micro: TrainBatch) -> PerToken:
        hidden, head = out.hidden, params.get("value_head")
        if critic is not None:
            hidden = self.model.apply(
                critic.whole(), micro.tokens, segment_ids=micro.segment_ids, rows=self.rows
            ).hidden
            head = critic.value_head
        return scoring.align(scoring.values(head, hidden), micro.segment_ids)

    def _apply(
        self, state: TrainState, gradients: Any, loss: Array, occupied: Array, metrics: dict[str, M.Metric]
    ) -> tuple[TrainState, dict[str, M.Metric]]:
        if self.policy_frozen:
            gradients = _of_critic(gradients, jax.tree.map(jnp.zeros_like, gradients))
        norm = optax.tree.norm(gradients.policy)
        finite = jnp.isfinite(loss) & jnp.isfinite(optax.tree.norm(gradients))
        held: Any = state.trained
        changes, opt_state = self.optimizer.update(gradients, state.opt_state, held)
        trained: Any = optax.apply_updates(held, changes)
        if self.policy_frozen:
            trained = _of_critic(trained, held)
        new = state.replace(trained=trained, opt_state=opt_state, updates=state.updates + 1)
        state = jax.tree.map(lambda n, o: jnp.where(finite & occupied, n, o), new, state)
        one = jnp.ones((), jnp.float32)
        return state, metrics | {
            "loss/total": M.Mean(loss, one),
            "grad/norm": M.Mean(norm, one),
            "update/skipped": M.Mean(one - occupied, one),
            "update/not_finite": M.Maximum(one - finite),
        }


def _of_critic(trained: Trained, others: Trained) -> Trained:
    """The critic of the first, separate or a value head on the policy, and all else of the second."""
    policy = {name: x if name == "value_head" else others.policy[name] for name, x in trained.policy.items()}
    return trained.replace(policy=policy)


def check_shapes(batch: TrainBatch) -> None:
    """Every array is [b t], every record [l b t x] and what was kept [b t m]; checked at trace time, so it costs a step
    nothing."""
    others = ("routing", "kept")
    chex.assert_equal_shape([x for name, x in vars(batch).items() if name not in others and x is not None])
    if batch.kept is not None:
        chex.assert_rank(batch.kept, 3)
        chex.assert_equal(batch.kept.shape[:2], batch.tokens.shape)
    records = jax.tree.leaves(batch.routing)
    chex.assert_rank(records, 4)
    for record in records:
        chex.assert_equal(record.shape[1:3], batch.tokens.shape)
