"""One optimizer step, and the scoring pass before it: jitted, sharded, one trace per declared shape.

Both walk the micro-batches of a `Layout` in one compiled loop. Counts are taken over the whole minibatch first, so each
micro-batch contributes grad(total) / count and the sum does not depend on how the minibatch was cut.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Set
from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax

from jaxrl_llm.ground import metrics as M
from jaxrl_llm.ground import sharding
from jaxrl_llm.ground.array_typing import Array, Bool, Float, Integer, Mask, PerToken, Tokens
from jaxrl_llm.models import (
    Model,
    Routing,
    Rows,
    scoring,
    time_multiple,
)
from jaxrl_llm.objectives import AnyObjective
from jaxrl_llm.rollout.rollout import Rollout
from jaxrl_llm.training.expert_load import evened, load, tokens_sent
from jaxrl_llm.training.gaps import old_against_current, sampler_against_old
from jaxrl_llm.training.layout import Layout, sequence_ids
from jaxrl_llm.training.micro_batches import accumulate, cut, fill, padded
from jaxrl_llm.training.policy import Policy
from jaxrl_llm.training.state import Trained, TrainState

_SENT = "tokens sent to each expert"  # summed with the metrics of micro-batches, of which it is none


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
    router_bias_rate: float = 0.0  # of `evened`, where supervised training moves the bias of a gate's choice
    rows: Rows = "packed"  # what a row of a layout holds, as in `Model.apply`
    answer_tokens: int = 0  # in a row at most, where the log-probs of prompts are not read; 0: all of them are
    policy_frozen: bool = False
    divergence: Any = None  # `TeacherDivergence`, where the objective reads it

    def score(
        self,
        policy: Policy,
        rollout: Rollout,
        layouts: Iterable[Layout],
        wanted: Set[str],
        routing: Routing | None = None,
    ) -> dict[str, Any]:
        """Scores of the rows of some minibatches, by their names in `wanted`, in arrays of the whole rollout.

        Args:
          layouts: of the minibatches. The forward has the shape of the training forward: in float32 both give the same
            numbers.
          wanted: "logprobs" (those that the rollout reads, at most `answer_tokens` in a row) and "state_values", [b t];
            "routing", the record of the experts that the pass used, in it "router_logits" and, where the pass replays
            others, those "chosen" by the router. A dense model has no record.
          routing: is replayed.
        """
        into = self._blank(rollout.tokens, frozenset(wanted))
        for layout in layouts:
            into = self._score(policy, (rollout.tokens, rollout.loss_mask, rollout.kept, routing), layout, into)
        return into

    def trace_score(
        self, policy: Policy, rollout: Rollout, layout: Layout, wanted: Set[str], routing: Routing | None
    ) -> jax.stages.Traced:
        """The program of `score` for one minibatch, from abstract arrays."""
        mesh: Any = self.model.mesh
        into = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding.rollout_sharding(x, mesh)),
            jax.eval_shape(lambda tokens: self._blank(tokens, frozenset(wanted)), rollout.tokens),
        )
        given = (rollout.tokens, rollout.loss_mask, rollout.kept, routing)
        return Learner._score.trace(self, policy, given, layout, into)

    @functools.partial(jax.jit, static_argnums=(0, 2))
    def _blank(self, tokens: Tokens, wanted: frozenset[str]) -> dict[str, Any]:
        """Empty arrays for the scores of a rollout, sharded by rows."""
        scores: dict[str, Any] = {
            name: jnp.zeros(tokens.shape, jnp.float32) for name in wanted & {"logprobs", "state_values"}
        }
        layers = self.model.config.num_moe_layers
        if layers and "routing" in wanted:
            also = {"logits": "router_logits" in wanted, "chosen": "chosen" in wanted}
            scores["routing"] = self.model.config.gate.blank(layers, *tokens.shape, **also)
        return sharding.constrain_rollout(scores, self.model.mesh)

    @functools.partial(jax.jit, static_argnums=0, donate_argnames=("into",))
    def _score(self, policy: Policy, given: Any, layout: Layout, into: dict[str, Any]) -> dict[str, Any]:
        """given: tokens, the mask of those that are read, what was kept and what is replayed."""
        params, layout = policy.whole(), self._padded(layout)
        logits = "routing" in into and into["routing"].logits is not None
        micro_batch = cut(given, layout, self.model.mesh)

        def of(i: Array) -> dict[str, Any]:
            tokens, mask, kept, routing = micro_batch(i)
            out = self._forward(
                params,
                tokens,
                layout.segment_ids[i],
                routing=routing,
                router_logits=logits,
                mask=mask,
                kept=kept,
            )
            found: dict[str, Any] = {"logprobs": out.logprobs}
            if "state_values" in into:
                found["state_values"] = scoring.values(params["value_head"], out.hidden)
            if "routing" in into:
                used: Any = out.routing
                found["routing"] = used.limited_to(into["routing"])
            return {name: found[name] for name in into}

        return sharding.constrain_rollout(fill(into, of, layout, self.model.mesh), self.model.mesh)

    def _padded(self, layout: Layout) -> Layout:
        """Rows of a length that the devices divide where they share a row."""
        multiple = time_multiple(self.model.config, self.model.mesh)
        return layout if multiple == 1 else padded(layout, multiple)

    @property
    def _forward(self) -> Callable[..., scoring.Scores]:
        return functools.partial(
            scoring.score, self.model, temperature=self.temperature, rows=self.rows, most=self.answer_tokens
        )

    def update(
        self, state: TrainState, rollout: Rollout, layout: Layout, teacher: Any = None
    ) -> tuple[TrainState, dict[str, M.Metric]]:
        """One optimizer step on one minibatch; the arrays of `state` but for its base are gone afterwards.

        A minibatch without an unmasked token, or with a loss or gradient that is not finite, leaves the state as it
        was; metrics say so (`update/skipped`, `update/not_finite`).

        Args:
          rollout: [b t], as `Scorer.experience` leaves it.
          layout: the places of the minibatch's tokens in the rollout, [micro-batches rows time].
          teacher: parameters that `divergence` reads.

        Returns:
          The next state, and the metrics of the objective, of gradients and of the run-time checks.

        Raises:
          AssertionError: an array of the rollout is not [b t] or a record not [l b t x], which would broadcast.
        """
        new, metrics = self._update(state.replace(base=None), state.base, rollout.by_token, layout, teacher)
        return new.replace(base=state.base), metrics

    def trace_update(
        self, state: TrainState, rollout: Rollout, layout: Layout, teacher: Any = None
    ) -> jax.stages.Traced:
        """The program of `update`, from abstract arrays."""
        return Learner._update.trace(self, state.replace(base=None), state.base, rollout.by_token, layout, teacher)

    @functools.partial(jax.jit, static_argnums=0, donate_argnames=("state",))
    def _update(
        self, state: TrainState, base: Any, rollout: Rollout, layout: Layout, teacher: Any = None
    ) -> tuple[TrainState, dict[str, M.Metric]]:
        check_shapes(rollout)
        rows, time = rollout.tokens.shape
        layout, mesh = self._padded(layout), self.model.mesh
        micro_batch = cut(rollout, layout, mesh)
        ids = sequence_ids(jnp.asarray(layout.index), time)
        counts = self._counts(cut(rollout.loss_mask, layout, mesh)(slice(None)), ids, rows)
        occupied = jnp.max(jnp.stack([*counts.values()])) > 0

        def one(i: Array | int) -> Any:
            # In the rollout every answer is segment 1.
            micro = micro_batch(i).replace(segment_ids=layout.segment_ids[i])

            def loss(trained: Trained) -> Any:
                whole = TrainState(trained, None, None, base, state.scale)
                return self._loss(whole.policy, whole.critic, micro, (ids[i], rows), counts, teacher)

            return jax.value_and_grad(loss, has_aux=True)(state.trained)

        totals, metrics, gradients = accumulate(one, layout)
        metrics = metrics | {f"loss/{name}": M.Mean(total, counts[name]) for name, total in totals.items()}
        losses = [total / jnp.maximum(counts[name], 1) for name, total in totals.items()]
        return self._apply(state, gradients, sum(losses, jnp.zeros(())), occupied, metrics)

    def _counts(
        self, masks: Bool[Array, "m r t"], ids: Integer[Array, "m r t"], rows: int
    ) -> dict[str, Float[Array, ""]]:
        """Return the divisor of every total: over the whole minibatch, all micro-batches and all devices."""

        def of(mask: Mask, ids: Array) -> dict[str, Array]:
            counts = self.objective.counts(mask, ids, rows)
            if self.aux_coef:
                counts["aux"] = jnp.sum(jnp.zeros(rows, bool).at[ids.ravel()].max(mask.ravel())).astype(jnp.float32)
            return counts

        return jax.tree.map(lambda x: jnp.sum(x, 0), jax.vmap(of)(masks, ids))

    def _loss(
        self,
        policy: Policy,
        critic: Policy | None,
        micro: Rollout,
        sequences: Any,
        counts: dict[str, Array],
        teacher: Any = None,
    ) -> Any:
        """(loss, ({term: total}, metrics)) of one micro-batch; loss = sum of total / count of the minibatch.

        sequences: the id of every token's answer, and how many answers there are.
        """
        params = policy.whole()
        out = self._forward(
            params,
            micro.tokens,
            micro.segment_ids,
            routing=micro.routes.replayed,
            router_logits=bool(self.aux_coef) or "router_logprobs" in self.objective.needs,
            mask=micro.loss_mask,
            kept=micro.kept,
        )
        arrays = self._arrays(params, critic, out, micro, sequences)
        if self.divergence is not None:
            how: Any = {"temperature": self.temperature, "rows": self.rows, "most": self.answer_tokens}
            arrays["teacher_divergence"] = self.divergence(teacher, self.model, params, out.hidden, micro, **how)
        terms, metrics = self.objective.evaluate(**arrays)
        totals = {name: total for name, (total, _) in terms.items()}
        if self.aux_coef and out.routing is not None:
            logits: Any = out.routing.logits  # whatever is replayed, the experts chosen by the router are balanced
            balance = self.model.config.gate.balance(logits, out.routing.choice, micro.loss_mask, *sequences)
            totals["aux"] = self.aux_coef * balance[0]
        if self.router_bias_rate and out.routing is not None:
            sent = tokens_sent(out.routing.choice, self.model.config.num_experts, micro.segment_ids != 0)
            metrics |= {_SENT: M.Mean(sent, jnp.ones_like(sent))}
        if micro.old_logprobs is None and micro.sampler_logprobs is not None:  # this forward is pi_old
            metrics |= sampler_against_old(micro, out.logprobs, out.routing)
        elif micro.old_logprobs is not None:
            metrics |= old_against_current(micro, out.logprobs, out.routing)
        loss = sum(total / jnp.maximum(counts[name], 1) for name, total in totals.items())
        return loss, (totals, jax.lax.stop_gradient(metrics))

    def _arrays(
        self, params: Any, critic: Policy | None, out: scoring.Scores, micro: Rollout, sequences: Any
    ) -> dict[str, Any]:
        """Return what the objective reads of one micro-batch, by its names."""
        arrays: dict[str, Any] = {
            "logprobs": out.logprobs,
            "old_logprobs": jax.lax.stop_gradient(out.logprobs) if micro.old_logprobs is None else micro.old_logprobs,
            "mask": micro.loss_mask,
            "advantages": micro.advantages,
            "sampler_logprobs": micro.sampler_logprobs,
            "ref_logprobs": micro.ref_logprobs,
            "teacher_logprobs": micro.teacher_logprobs,
            "margins": micro.margins,
            "entropy": out.entropy,
        }
        if "age" in self.objective.needs:
            arrays["age"] = jnp.zeros(micro.tokens.shape) if micro.age is None else micro.age
        if "scores" in self.objective.needs:
            arrays["scores"] = scoring.values(params["value_head"], out.hidden)
        if micro.returns is not None:
            arrays |= {"returns": micro.returns, "old_values": micro.old_values}
            arrays["values"] = self._values(params, critic, out, micro)
        if "router_logprobs" in self.objective.needs:
            scored: Any = micro.routes.scored  # with the old router's logits
            current: Any = out.routing
            gate = self.model.config.gate
            arrays["router_logprobs"] = gate.logprob(current.logits, scored.experts)
            arrays["old_router_logprobs"] = gate.logprob(scored.logits, scored.experts)
        if self.rows != "padded":
            arrays["sequence_ids"], arrays["num_sequences"] = sequences
        return {name: x for name, x in arrays.items() if x is not None}

    def _values(self, params: Any, critic: Policy | None, out: scoring.Scores, micro: Rollout) -> PerToken:
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
        updated: Any = self.optimizer.update(gradients, state.opt_state, held)
        changes, opt_state = updated
        trained: Any = optax.apply_updates(held, changes)
        if _SENT in metrics:
            sent: Any = metrics[_SENT]
            trained = trained.replace(policy=evened(trained.policy, sent.total, self.router_bias_rate))
            metrics = {name: x for name, x in metrics.items() if name != _SENT} | load(sent.total)
        if self.policy_frozen:
            trained = _of_critic(trained, held)
            changes = _of_critic(changes, jax.tree.map(jnp.zeros_like, changes))
        new = state.replace(trained=trained, opt_state=opt_state, updates=state.updates + 1)
        taken = finite & occupied
        state = jax.tree.map(lambda n, o: jnp.where(taken, n, o), new, state)
        one = jnp.ones((), jnp.float32)
        return state, metrics | {
            "loss/total": M.Mean(loss, one),
            "grad/norm": M.Mean(norm, one),
            "update/skipped": M.Mean(one - occupied, one),
            "update/not_finite": M.Maximum(one - finite),
            "update/moved": _moved(held.policy, trained.policy, changes.policy, taken),
        }


def _moved(held: Any, trained: Any, changes: Any, taken: Array) -> M.Mean:
    """The share of the entries with a change other than 0 whose bits it changes; of none if no update is taken.

    A change below the rounding of its entry is lost.
    """

    def bits(x: Array) -> Array:  # a comparison of numbers may be compiled to one before they are rounded
        return jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")

    def counts(old: Array, new: Array, change: Array) -> Array:
        """[2]: the entries that are moved and those that are asked to. One pass makes both; of two, the second would
        read changes that are kept for it. Exact for up to 2^32 entries a layer, where a sum of ones in float32 ends at
        2^24."""
        asked = (change != 0) & taken
        each = tuple(x.astype(jnp.uint32) for x in (asked & (bits(old) != bits(new)), asked))
        sums = jax.lax.reduce(each, (jnp.uint32(0),) * 2, _add_each, tuple(range(1, old.ndim)))
        return jnp.stack([jnp.sum(x, dtype=jnp.float32) for x in sums])

    found = jax.tree.leaves(jax.tree.map(counts, held, trained, changes))
    return M.Mean(*sum(found, jnp.zeros(2)))


def _add_each(sums: tuple[Array, ...], others: tuple[Array, ...]) -> tuple[Array, ...]:
    return tuple(map(jnp.add, sums, others))


def _of_critic(trained: Trained, others: Trained) -> Trained:
    """The critic of the first, separate or a value head on the policy, and all else of the second."""
    policy = {name: x if name == "value_head" else others.policy[name] for name, x in trained.policy.items()}
    return trained.replace(policy=policy)


def check_shapes(rollout: Rollout) -> None:
    """Every array is [b t], every record [l b t x] and what was kept [b t m]; checked at trace time, so it costs a step
    nothing."""
    others = ("routes", "kept")
    chex.assert_equal_shape([x for name, x in vars(rollout).items() if name not in others and x is not None])
    if rollout.kept is not None:
        chex.assert_rank(rollout.kept, 3)
        chex.assert_equal(rollout.kept.shape[:2], rollout.tokens.shape)
    records = jax.tree.leaves(rollout.routes)
    chex.assert_rank(records, 4)
    for record in records:
        chex.assert_equal(record.shape[1:3], rollout.tokens.shape)
