"""One optimizer step, and the scoring pass before it: jitted, sharded, one trace per declared shape.

Both walk the micro-batches of a `Layout` in one compiled loop. Counts are taken over the whole minibatch first, so each
micro-batch contributes grad(total) / count and the sum does not depend on how the minibatch was cut.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from jaxrl_llm.ground import metrics as M
from jaxrl_llm.ground import sharding
from jaxrl_llm.ground.array_typing import Array, Bool, Float, Mask, PerToken, Tokens
from jaxrl_llm.models import Model, Routing, load_balance_loss, scoring, time_multiple
from jaxrl_llm.objectives import AnyObjective
from jaxrl_llm.training.gaps import old_against_current, sampler_against_old
from jaxrl_llm.training.layout import Layout, sequence_ids, widened
from jaxrl_llm.training.micro_batches import accumulate, cut, fill
from jaxrl_llm.training.routing_records import blank, by_router, router_logprobs
from jaxrl_llm.training.state import TrainBatch, TrainState, check_shapes, join

__all__ = ["Learner", "Scored"]


class Scored(flax.struct.PyTreeNode):
    """The results of a scoring pass, [b t]; a field that is None in the argument is not computed.

    state_values[t] is the value of the state AFTER token t, since GAE needs the last one; the others belong to token t.
    recorded holds the experts that the pass used, by_router those chosen by its router where the pass replayed others.
    """

    logprobs: PerToken | None = None
    state_values: PerToken | None = None
    recorded: Routing | None = None
    by_router: Routing | None = None


@dataclasses.dataclass(frozen=True)
class Learner:
    """The compiled functions of training; hashable, so that equal learners share their compilations.

    critic_optimizer is set for a separate critic, which has the policy's architecture. `packed` says that rows hold
    several answers, `shared_prompt` that these continue the prompt before them. `temperature` is the rollout's.
    `combine` makes whole parameters, of the policy and of a separate critic, from those that are trained and those that
    are frozen: a union of two parts, or weights and their adapters. `policy_frozen` lets the critic learn alone.
    """

    model: Model
    objective: AnyObjective
    optimizer: optax.GradientTransformation
    critic_optimizer: optax.GradientTransformation | None = None
    temperature: float = 1.0
    aux_coef: float = 0.0
    packed: bool = False
    shared_prompt: bool = False
    combine: Callable[[Any, Any], Any] = join
    policy_frozen: bool = False

    @property
    def critic_only(self) -> "Learner":
        """The same learner, whose updates leave the policy bit for bit as it is.

        Its optimizer counts those updates, and its moments stay 0: its first own updates are smaller than later ones.
        """
        return dataclasses.replace(self, policy_frozen=True)

    def policy(self, trained: Any, frozen: Any = None) -> Any:
        """Whole parameters; without frozen ones, those that are trained are all of them."""
        return trained if frozen is None else self.combine(trained, frozen)

    @functools.partial(jax.jit, static_argnums=0, donate_argnames=("into",))
    def score(
        self, params: Any, tokens: Tokens, routing: Routing | None, layout: Layout, into: Scored, frozen: Any = None
    ) -> Scored:
        """Scores of one minibatch's rows, written into the arrays of the whole rollout.

        `routing` is replayed where given; params and frozen are those of `policy`. The forward has the shape of the
        training forward: in float32 both give the same numbers.
        """
        params, layout = self.policy(params, frozen), self._split_evenly(layout)
        logits = into.recorded is not None and into.recorded.logits is not None
        micro_batch = cut((tokens, routing), layout, self.model.mesh)

        def of(i: Array) -> Scored:
            tokens, routing = micro_batch(i)
            out = scoring.score(
                self.model,
                params,
                tokens,
                layout.segment_ids[i],
                routing=routing,
                temperature=self.temperature,
                router_logits=logits or into.by_router is not None,
                shared_prompt=self.shared_prompt,
            )
            routed: Any = out.routing
            return Scored(
                logprobs=None if into.logprobs is None else out.logprobs,
                state_values=None if into.state_values is None else scoring.values(params["value_head"], out.hidden),
                recorded=None if into.recorded is None else routed if logits else Routing(routed.experts),
                by_router=None if into.by_router is None else by_router(routed),
            )

        return sharding.constrain_rollout(fill(into, of, layout, self.model.mesh), self.model.mesh)

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
          record: what to record of the routing: none, experts, or logits (of the router, too); nothing for a dense
            model.
          by_router: with a record, also the experts chosen by the router.
        """
        config = self.model.config
        rows, time = tokens.shape
        routed = record != "none" and config.num_moe_layers > 0
        scores = Scored(
            logprobs=jnp.zeros(tokens.shape, jnp.float32) if logprobs else None,
            state_values=jnp.zeros(tokens.shape, jnp.float32) if values else None,
            recorded=blank(config, rows, time, record == "logits") if routed else None,
            by_router=blank(config, rows, time, False) if routed and by_router else None,
        )
        return sharding.constrain_rollout(scores, self.model.mesh)

    @functools.partial(jax.jit, static_argnums=0, donate_argnames=("state",))
    def update(
        self,
        state: TrainState,
        batch: TrainBatch,
        layout: Layout,
        frozen: Any = None,
    ) -> tuple[TrainState, dict[str, M.Metric]]:
        """One optimizer step on one minibatch.

        A minibatch without an unmasked token, or with a loss or gradient that is not finite, leaves the state as it
        was; metrics say so (`update/skipped`, `update/not_finite`).

        Args:
          frozen: parameters that `combine` takes beside state.params, where these are not the whole policy.

        Raises:
          AssertionError: an array of the batch is not [b t] or a record not [l b t x], which would broadcast.
        """
        check_shapes(batch)
        layout = self._split_evenly(layout)
        rows, time = batch.tokens.shape
        micro_batch = cut(batch, layout, self.model.mesh)
        masks = cut(batch.loss_mask, layout, self.model.mesh)(slice(None))
        counts = self._counts(masks, layout, rows, time)
        occupied = jnp.max(jnp.stack([*counts.values()])) > 0

        def one(i: Array | int) -> Any:
            # In the rollout every answer is segment 1.
            micro = micro_batch(i).replace(segment_ids=layout.segment_ids[i])
            sequences = (sequence_ids(jnp.asarray(layout.index[i]), time), rows)

            def loss(trained: Any) -> Any:
                params, critic = trained
                critic = None if critic is None else self.policy(critic, frozen)
                return self._loss((self.policy(params, frozen), critic), micro, sequences, counts)

            return jax.value_and_grad(loss, has_aux=True)((state.params, state.critic))

        totals, metrics, gradients = accumulate(one, layout)
        metrics = metrics | {f"loss/{name}": M.Mean(total, counts[name]) for name, total in totals.items()}
        losses = [total / jnp.maximum(counts[name], 1) for name, total in totals.items()]
        return self._apply(state, gradients, sum(losses, jnp.zeros(())), occupied, metrics)

    def _split_evenly(self, layout: Layout) -> Layout:
        """Rows whose length the devices divide where they share a row; otherwise as they are."""
        multiple = time_multiple(self.model.config, self.model.mesh)
        return layout if multiple == 1 else widened(layout, multiple)

    def _counts(self, masks: Bool[Array, "m r t"], layout: Layout, rows: int, time: int) -> dict[str, Float[Array, ""]]:
        """What every total is divided by: over the whole minibatch, all micro-batches and all devices."""

        def of(mask: Mask, ids: Array) -> dict[str, Array]:
            counts = self.objective.counts(mask, ids, rows)
            if self.aux_coef:
                counts["aux"] = jnp.sum(jnp.zeros(rows, bool).at[ids.ravel()].max(mask.ravel())).astype(jnp.float32)
            return counts

        ids = sequence_ids(jnp.asarray(layout.index), time)
        return jax.tree.map(lambda x: jnp.sum(x, 0), jax.vmap(of)(masks, ids))

    def _loss(self, trained: Any, micro: TrainBatch, sequences: Any, counts: dict[str, Array]) -> Any:
        """(loss, ({term: total}, metrics)) of one micro-batch; loss = sum of total / count of the minibatch.

        trained: the parameters of the policy and of a separate critic.
        sequences: the id of every token's answer, and how many answers there are.
        """
        params, critic = trained
        out = scoring.score(
            self.model,
            params,
            micro.tokens,
            micro.segment_ids,
            routing=micro.routing.replayed,
            temperature=self.temperature,
            router_logits=self.model.config.num_moe_layers > 0,
            shared_prompt=self.shared_prompt,
        )
        terms, metrics = self.objective.evaluate(**self._arrays(params, critic, out, micro, sequences))
        totals = {name: total for name, (total, _) in terms.items()}
        if self.aux_coef and out.routing is not None:
            totals["aux"] = self.aux_coef * self._load_balance(out.routing, micro, *sequences)
        if micro.old_logprobs is None and micro.sampler_logprobs is not None:  # this forward is pi_old
            metrics |= sampler_against_old(micro, out.logprobs, out.routing)
        elif micro.old_logprobs is not None:
            metrics |= old_against_current(micro, out.logprobs, out.routing)
        loss = sum(total / jnp.maximum(counts[name], 1) for name, total in totals.items())
        return loss, (totals, jax.lax.stop_gradient(metrics))

    def _arrays(
        self, params: Any, critic: Any, out: scoring.Scores, micro: TrainBatch, sequences: Any
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
        if self.packed:
            arrays["sequence_ids"], arrays["num_sequences"] = sequences
        return {name: x for name, x in arrays.items() if x is not None}

    def _load_balance(self, routing: Routing, micro: TrainBatch, ids: Array, rows: int) -> Float[Array, ""]:
        """The load-balance loss of the experts chosen by the router, whatever is replayed."""
        logits: Any = routing.logits
        chosen = jax.lax.top_k(logits, self.model.config.num_experts_per_tok)[1]
        return load_balance_loss(logits, chosen, micro.loss_mask, ids, rows)[0]

    def _values(self, params: Any, critic: Any, out: scoring.Scores, micro: TrainBatch) -> PerToken:
        hidden, head = out.hidden, params.get("value_head")
        if critic is not None:
            hidden = self.model.apply(critic, micro.tokens, segment_ids=micro.segment_ids).hidden
            head = critic["value_head"]
        return scoring.align(scoring.values(head, hidden), micro.segment_ids)

    def _apply(
        self,
        state: TrainState,
        gradients: Any,
        loss: Array,
        occupied: Array,
        metrics: dict[str, M.Metric],
    ) -> tuple[TrainState, dict[str, M.Metric]]:
        policy_gradient, critic_gradient = gradients
        if self.policy_frozen:
            policy_gradient = _with_head(policy_gradient, jax.tree.map(jnp.zeros_like, policy_gradient))
        norm = optax.tree.norm(policy_gradient)
        finite = jnp.isfinite(loss) & jnp.isfinite(optax.tree.norm(gradients))
        changes, opt_state = self.optimizer.update(policy_gradient, state.opt_state, state.params)
        params = optax.apply_updates(state.params, changes)
        params = _with_head(params, state.params) if self.policy_frozen else params
        new = state.replace(params=params, opt_state=opt_state)
        if self.critic_optimizer is not None:
            changes, opt_state = self.critic_optimizer.update(critic_gradient, state.critic_opt_state, state.critic)
            new = new.replace(critic=optax.apply_updates(state.critic, changes), critic_opt_state=opt_state)
        new = new.replace(updates=state.updates + 1)
        state = jax.tree.map(lambda n, o: jnp.where(finite & occupied, n, o), new, state)
        one = jnp.ones((), jnp.float32)
        metrics = metrics | {
            "loss/total": M.Mean(loss, one),
            "grad/norm": M.Mean(norm, one),
            "update/skipped": M.Mean(one - occupied, one),
            "update/not_finite": M.Maximum(one - finite),
        }
        return state, metrics


def _with_head(params: Any, others: Any) -> Any:
    """Of two trees of a policy's parameters the value head of the first, if it has one, and all else of the second."""
    return {name: x if name == "value_head" else others[name] for name, x in params.items()}
