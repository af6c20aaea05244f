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

from jaxrl_llm import metrics as M
from jaxrl_llm import scoring, sharding
from jaxrl_llm.array_typing import Array, Bool, Float, Mask, PerToken, Tokens
from jaxrl_llm.models.moe import load_balance_loss
from jaxrl_llm.models.routing import Routing, no_record
from jaxrl_llm.models.transformer import Model
from jaxrl_llm.objectives import Objective
from jaxrl_llm.training.layout import Layout, sequence_ids
from jaxrl_llm.training.routing_replay import blank, chosen, flips
from jaxrl_llm.training.state import TrainBatch, TrainState

__all__ = ["Learner", "Scored", "take"]


class Scored(flax.struct.PyTreeNode):
    """What a scoring pass leaves, [b t]; a field that is None on the way in is not computed.

    state_values speaks of the state AFTER each token (the others are aligned with their token): GAE needs the last one.
    routing holds the experts used, chosen those that the router would have used had none been replayed in its layer.
    """

    logprobs: PerToken | None = None
    state_values: PerToken | None = None
    routing: Routing | None = None
    chosen: Routing | None = None


def take(tree: Any, layout: Layout, micro: Any) -> Any:
    """The places of one micro-batch (or of all, micro = slice(None)) out of arrays [b t] and [l b t x]; padding is 0,
    False or "no record"."""
    index = layout.index[micro]

    def one(x: Array) -> Array:
        if x.ndim == 2:
            return jnp.where(index >= 0, x.ravel()[jnp.maximum(index, 0)], jnp.zeros((), x.dtype))
        flat = x.reshape(x.shape[0], -1, x.shape[-1])[:, jnp.maximum(index, 0)]
        empty = no_record(x) if jnp.issubdtype(x.dtype, jnp.integer) else 0
        return jnp.where((index >= 0)[None, ..., None], flat, jnp.asarray(empty, x.dtype))

    return jax.tree.map(one, tree)


@dataclasses.dataclass(frozen=True)
class Learner:
    """The compiled functions of training; hashable, so that equal learners share their compilations.

    critic_optimizer is set for a separate critic, which has the policy's architecture. `packed` says that rows hold
    several answers. `temperature` is the rollout's.
    """

    model: Model
    objective: Objective
    optimizer: optax.GradientTransformation
    critic_optimizer: optax.GradientTransformation | None = None
    temperature: float = 1.0
    aux_coef: float = 0.0
    packed: bool = False

    @functools.partial(jax.jit, static_argnums=0, donate_argnames=("into",))
    def score(self, params: Any, tokens: Tokens, routing: Routing | None, layout: Layout, into: Scored) -> Scored:
        """Scores of one minibatch's rows, written into the arrays of the whole rollout.

        `routing` is replayed where given. The forward has the shape of the training forward: in float32 both see the
        same numbers.
        """

        def body(i: Array, into: Scored) -> Scored:
            keep = into.routing is not None and into.routing.logits is not None
            out = scoring.score(
                self.model,
                params,
                sharding.constrain_rows(take(tokens, layout, i), self.model.mesh),
                layout.segment_ids[i],
                routing=take(routing, layout, i),
                temperature=self.temperature,
                router_logits=keep or into.chosen is not None,
            )
            used: Any = out.routing
            found = Scored(
                logprobs=None if into.logprobs is None else out.logprobs,
                state_values=None if into.state_values is None else scoring.values(params["value_head"], out.hidden),
                routing=None if into.routing is None else used if keep else Routing(used.experts),
                chosen=None if into.chosen is None else chosen(used),
            )
            return jax.tree.map(lambda old, new: _put(old, new, layout.index[i]), into, found)

        found = jax.lax.fori_loop(0, layout.used, body, into)
        return jax.tree.map(lambda x: sharding.constrain(x, [None] * x.ndim, self.model.mesh), found)

    def room(
        self,
        tokens: Tokens,
        *,
        logprobs: bool = True,
        values: bool = False,
        routing: str = "none",
        choices: bool = False,
    ) -> Scored:
        """Empty arrays for the scores of a rollout, whole on every device; routing: none, experts or logits."""
        rows, time = tokens.shape
        if not self.model.config.num_moe_layers:
            routing = "none"
        scores = Scored(
            logprobs=jnp.zeros(tokens.shape, jnp.float32) if logprobs else None,
            state_values=jnp.zeros(tokens.shape, jnp.float32) if values else None,
            routing=None if routing == "none" else blank(self.model.config, rows, time, routing == "logits"),
            chosen=blank(self.model.config, rows, time, False) if choices and routing != "none" else None,
        )
        mesh = self.model.mesh
        return scores if mesh is None else jax.device_put(scores, sharding.replicated(mesh))

    @functools.partial(jax.jit, static_argnums=0, donate_argnames=("state",))
    def update(self, state: TrainState, batch: TrainBatch, layout: Layout) -> tuple[TrainState, dict[str, M.Metric]]:
        """One optimizer step on one minibatch.

        A minibatch without an unmasked token, or with a loss or gradient that is not finite, leaves the state as it
        was; metrics say so (`update/skipped`, `update/not_finite`).
        """
        learnt = (state.params, state.critic)
        masks = take(batch.loss_mask, layout, slice(None))
        counts = self._counts(masks, layout)

        def one(i: Array | int) -> Any:
            micro = sharding.constrain_rows(take(batch.replace(**_NO_ROUTING), layout, i), self.model.mesh)
            routes = {name: take(getattr(batch, name), layout, i) for name in _NO_ROUTING}
            micro = micro.replace(
                segment_ids=layout.segment_ids[i], **routes
            )  # the rollout's would join packed answers
            return jax.value_and_grad(self._loss, has_aux=True)(learnt, micro, counts)

        totals, metrics, gradients = _accumulate(one, layout)
        metrics = metrics | {f"loss/{name}": M.Mean(total, counts[name]) for name, total in totals.items()}
        loss = sum((total / jnp.maximum(counts[name], 1) for name, total in totals.items()), jnp.zeros(()))
        return self._apply(state, gradients, loss, counts["policy"] > 0, metrics)

    def _counts(self, masks: Bool[Array, "m r t"], layout: Layout) -> dict[str, Float[Array, ""]]:
        """What every total is divided by: over the whole minibatch, all micro-batches and all devices."""

        def of(mask: Mask, segments: Array) -> dict[str, Array]:
            ids = sequence_ids(segments)
            counts = self.objective.counts(mask, ids, mask.size)
            if self.aux_coef:
                counts["aux"] = jnp.sum(jnp.zeros(mask.size, bool).at[ids.ravel()].max(mask.ravel())).astype(
                    jnp.float32
                )
            return counts

        return jax.tree.map(lambda x: jnp.sum(x, 0), jax.vmap(of)(masks, jnp.asarray(layout.segment_ids)))

    def _loss(self, learnt: Any, micro: TrainBatch, counts: dict[str, Array]) -> Any:
        """(loss, ({term: total}, metrics)) of one micro-batch; loss = sum of total / count of the minibatch."""
        params, critic = learnt
        moe = self.model.config.num_moe_layers > 0
        out = scoring.score(
            self.model,
            params,
            micro.tokens,
            micro.segment_ids,
            routing=micro.routing,
            temperature=self.temperature,
            router_logits=moe,
        )
        routing: Any = out.routing  # there is one in every MoE, with the router's logits
        arrays: dict[str, Any] = {
            "logprobs": out.logprobs,
            "old_logprobs": jax.lax.stop_gradient(out.logprobs) if micro.old_logprobs is None else micro.old_logprobs,
            "mask": micro.loss_mask,
            "advantages": micro.advantages,
            "sampler_logprobs": micro.sampler_logprobs,
            "ref_logprobs": micro.ref_logprobs,
            "entropy": out.entropy,
        }
        if micro.returns is not None:
            arrays |= {"returns": micro.returns, "old_values": micro.old_values}
            arrays["values"] = self._values(params, critic, out, micro)
        if "router_logprobs" in self.objective.needs:
            recorded: Any = micro.recorded
            arrays["router_logprobs"] = router_logprobs(routing.logits, recorded)
            arrays["old_router_logprobs"] = router_logprobs(recorded.logits, recorded)
        if self.packed:
            arrays |= {"sequence_ids": sequence_ids(micro.segment_ids), "num_sequences": micro.tokens.size}
        terms, metrics = self.objective.evaluate(**{name: x for name, x in arrays.items() if x is not None})
        totals = {name: total for name, (total, _) in terms.items()}
        if self.aux_coef and moe:
            ids = sequence_ids(micro.segment_ids)
            fresh = jax.lax.top_k(routing.logits, self.model.config.num_experts_per_tok)[1]
            total, _ = load_balance_loss(routing.logits, fresh, micro.loss_mask, ids, micro.tokens.size)
            totals["aux"] = self.aux_coef * total
        if micro.old_logprobs is not None:
            metrics |= _agreement("check/current_old", out.logprobs - micro.old_logprobs, micro.loss_mask)
        else:  # this forward is pi_old
            metrics |= _agreement("check/old_sampler", out.logprobs - micro.sampler_logprobs, micro.loss_mask)
        if micro.sampled is not None and moe:
            metrics |= flips("routing/flips_sampler_old", micro.sampled, routing, micro.segment_ids)
        if micro.recorded is not None and moe:
            metrics |= flips("routing/flips_old_current", micro.recorded, routing, micro.segment_ids)
        loss = sum(total / jnp.maximum(counts[name], 1) for name, total in totals.items())
        return loss, (totals, jax.lax.stop_gradient(metrics))

    def _values(self, params: Any, critic: Any, out: scoring.Scores, micro: TrainBatch) -> PerToken:
        hidden, head = out.hidden, params.get("value_head")
        if critic is not None:
            hidden = self.model.apply(critic, micro.tokens, segment_ids=micro.segment_ids).hidden
            head = critic["value_head"]
        return scoring.align(scoring.values(head, hidden), micro.segment_ids)

    def _apply(
        self, state: TrainState, gradients: Any, loss: Array, occupied: Array, metrics: dict[str, M.Metric]
    ) -> tuple[TrainState, dict[str, M.Metric]]:
        policy_gradient, critic_gradient = gradients
        norm = optax.tree.norm(policy_gradient)
        finite = jnp.isfinite(loss) & jnp.isfinite(optax.tree.norm(gradients))
        changes, opt_state = self.optimizer.update(policy_gradient, state.opt_state, state.params)
        new = state.replace(params=optax.apply_updates(state.params, changes), opt_state=opt_state)
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


def _accumulate(one: Callable[[Any], Any], layout: Layout) -> Any:
    """Totals, metrics and gradients summed over the micro-batches in use; a single one is not added to zeros."""
    if len(layout.index) == 1:
        (_, (totals, metrics)), gradients = one(0)
        return totals, metrics, gradients
    (_, found), gradients = jax.eval_shape(one, 0)
    zeros = functools.partial(jax.tree.map, lambda x: jnp.zeros(x.shape, x.dtype))
    add = functools.partial(jax.tree.map, jnp.add)

    def body(i: Array, carry: Any) -> Any:
        (_, (totals, metrics)), gradient = one(i)
        return add(carry[0], totals), M.combine(carry[1], metrics), add(carry[2], gradient)

    return jax.lax.fori_loop(0, layout.used, body, (zeros(found[0]), M.identity(found[1]), zeros(gradients)))


_NO_ROUTING = {"routing": None, "recorded": None, "sampled": None}


def router_logprobs(logits: Float[Array, "l b t e"], recorded: Routing) -> Float[Array, "l b t k"]:
    """log of the full router softmax at the experts that were recorded (0 where there is no record)."""
    known = recorded.experts != no_record(recorded.experts)
    picked = jnp.take_along_axis(
        jax.nn.log_softmax(logits, axis=-1), jnp.where(known, recorded.experts, 0).astype(jnp.int32), axis=-1
    )
    return jnp.where(known, picked, 0)


def _agreement(name: str, difference: PerToken, mask: Mask) -> dict[str, M.Metric]:
    """Mean |delta log p| and the share of tokens above 1e-2: what the run-time checks read."""
    size = jnp.abs(difference)
    return {f"{name}_mean": M.Mean.of(size, mask), f"{name}_share": M.Mean.of((size > 1e-2) * 1.0, mask)}


def _put(old: Array, new: Array, index: Array) -> Array:
    """Write the places of a micro-batch back into an array [b t] or [l b t x] of the rollout."""
    size = old.shape[0] * old.shape[1] if old.ndim == 2 else old.shape[1] * old.shape[2]
    place = jnp.where(index >= 0, index, size).ravel()
    if old.ndim == 2:
        return old.ravel().at[place].set(new.ravel().astype(old.dtype), mode="drop").reshape(old.shape)
    flat = old.reshape(old.shape[0], size, old.shape[-1])
    new = new.reshape(new.shape[0], -1, new.shape[-1]).astype(old.dtype)
    return flat.at[:, place].set(new, mode="drop").reshape(old.shape)
