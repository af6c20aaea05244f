"""The decode loop: a fixed number of slots, each holding one answer, refilled from the queue while others go on.

One state pytree and three functions of it: `feed` runs the model on the token that every slot sampled last, `sample`
draws the next one, `refill` hands free slots to the next answers of the queue, whose prompts were prefilled before. An
answer's place among the slots and the time of its start do not enter its randomness.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Key as Keys

from jaxrl_llm import sharding
from jaxrl_llm.array_typing import Array, Float, Integer, Params
from jaxrl_llm.models import KVCache, Model, kv_cache
from jaxrl_llm.models.routing import routing_dtype
from jaxrl_llm.rollout.sampling import Sampling, draw

__all__ = ["Answers", "Decoder", "Prompts"]


class Prompts(flax.struct.PyTreeNode):
    """Prefilled prompts: every answer of a group starts from the same row."""

    cache: KVCache
    hidden: Float[Array, "p d"]  # of the last prompt token
    lengths: Integer[Array, "p"]


class Answers(flax.struct.PyTreeNode):
    """What was sampled, by answer: b in (prompt, sample) order, n the position in the answer."""

    tokens: Integer[Array, "b n"]
    logprobs: Float[Array, "b n"]
    experts: Integer[Array, "b n l k"] | None  # when the token was fed; None where routing is not recorded
    logits: Float[Array, "b n l e"] | None  # the router's, likewise
    count: Integer[Array, "b"]


class State(flax.struct.PyTreeNode):
    """answers: all of them; queue: the first that has not started. Of each slot: its answer (b = free), the token that
    it sampled last, that token's index in the answer and its position in the sequence; the cache's rows are slots."""

    answers: Answers
    queue: Integer[Array, ""]
    cache: KVCache
    answer: Integer[Array, "slots"]
    tokens: Integer[Array, "slots"]
    index: Integer[Array, "slots"]
    position: Integer[Array, "slots"]


@dataclasses.dataclass(frozen=True)
class Decoder:
    """The step functions over one rollout's constants."""

    model: Model
    params: Params  # unstacked, in the rollout dtype
    sampling: Sampling
    eos_id: int
    prompts: Prompts
    keys: Keys[Array, "b"]
    limits: Integer[Array, "b"]  # answer tokens at most
    max_new_tokens: int
    slots: int
    record_routing: bool
    record_router_logits: bool

    @property
    def batch(self) -> int:
        """Slots refilled at once: few enough that free slots wait little, many enough to share the cost."""
        return self.slots if self.slots == len(self.limits) else max(1, self.slots // 8)

    def run(self) -> Answers:
        """Decode every answer to its end."""
        state = self._fill(self._empty())
        step = self._step if self.slots == len(self.limits) else lambda s: self._fill(self._step(s))
        return jax.lax.while_loop(lambda s: jnp.any(self._active(s)), step, state).answers

    def _active(self, state: State) -> Array:
        return state.answer < len(self.limits)

    def _empty(self) -> State:
        b, n, config = len(self.limits), self.max_new_tokens, self.model.config
        experts = logits = None
        if self.record_routing and config.num_moe_layers:
            shape, dtype = (b, n, config.num_moe_layers), routing_dtype(config.num_experts)
            experts = jnp.full((*shape, config.num_experts_per_tok), jnp.iinfo(dtype).max, dtype)
            if self.record_router_logits:
                logits = jnp.zeros((*shape, config.num_experts), jnp.float32)
        zero = jnp.zeros(self.slots, jnp.int32)
        answers = Answers(
            jnp.zeros((b, n), jnp.int32), jnp.zeros((b, n), jnp.float32), experts, logits, jnp.zeros(b, jnp.int32)
        )
        # The last token of an answer is never fed, so n - 1 columns hold the others.
        cache = kv_cache.empty(config, self.slots, self.prompts.cache.length + n - 1)
        return self._pin(State(answers, jnp.zeros((), jnp.int32), cache, zero + b, zero, zero, zero))

    def _pin(self, state: State) -> State:
        """Slots, like all rows, live on the data axes of the mesh; the answers and the queue are everywhere."""
        names = ("cache", "answer", "tokens", "index", "position")
        return state.replace(**{n: sharding.constrain_rows(getattr(state, n), self.model.mesh) for n in names})

    def _step(self, state: State) -> State:
        state, hidden = self._feed(state)
        answers, answer, tokens = self._sample(state.answers, state.answer, state.index, hidden)
        return self._pin(state.replace(answers=answers, answer=answer, tokens=tokens))

    def _feed(self, state: State) -> tuple[State, Array]:
        """Run the model on each slot's last token; what follows it is at the next index."""
        # A free slot idles at column 0, which costs no attention and is overwritten when it is refilled.
        position = jnp.where(self._active(state), state.position, 0)
        answers, logits = state.answers, state.answers.logits is not None
        out = self.model.apply(
            self.params, state.tokens[:, None], positions=position[:, None], cache=state.cache, router_logits=logits
        )
        if answers.experts is not None and out.routing is not None:
            note: Callable[[Any, Any], Array] = lambda old, fed: old.at[state.answer, state.index].set(  # noqa: E731
                fed[:, :, 0].transpose(1, 0, 2), mode="drop"
            )
            answers = answers.replace(
                experts=note(answers.experts, out.routing.experts),
                logits=note(answers.logits, out.routing.logits) if logits else None,
            )
        state = state.replace(answers=answers, cache=out.cache, index=state.index + 1, position=state.position + 1)
        return state, out.hidden[:, 0]

    def _sample(self, answers: Answers, answer: Array, index: Array, hidden: Array) -> tuple[Answers, Array, Array]:
        """Draw token `index` of each answer and note it; an answer that ends leaves its slot free."""
        free = len(self.limits)
        one = jnp.minimum(answer, free - 1)
        tokens, logprobs = draw(self.model.logits(self.params, hidden), self.keys[one], index, self.sampling)
        answers = answers.replace(
            tokens=answers.tokens.at[answer, index].set(tokens, mode="drop"),
            logprobs=answers.logprobs.at[answer, index].set(logprobs, mode="drop"),
            count=answers.count.at[answer].set(index + 1, mode="drop"),
        )
        ended = (tokens == self.eos_id) | (index + 1 >= self.limits[one])
        return answers, jnp.where(ended, free, answer), tokens

    def _fill(self, state: State) -> State:
        """Refill while a batch of slots is free and answers wait; the first token of an answer may end it."""

        def wanted(state: State) -> Array:
            waiting = len(self.limits) - state.queue
            free = jnp.sum(~self._active(state))
            return (waiting > 0) & (free >= jnp.minimum(self.batch, waiting))

        return jax.lax.while_loop(wanted, self._refill, state)

    def _refill(self, state: State) -> State:
        total, active = len(self.limits), self._active(state)
        slot = jnp.argsort(active)[: self.batch]  # free ones first
        answer = state.queue + jnp.arange(self.batch)
        valid = ~active[slot] & (answer < total)
        slot, answer = jnp.where(valid, slot, self.slots), jnp.where(valid, answer, total)
        prompt = jnp.minimum(answer, total - 1) // (total // len(self.prompts.lengths))
        index = jnp.zeros_like(answer)
        answers, held, tokens = self._sample(state.answers, answer, index, self.prompts.hidden[prompt])
        put: Callable[[Array, Array], Array] = lambda old, new: old.at[slot].set(new, mode="drop")  # noqa: E731
        state = State(
            answers=answers,
            queue=state.queue + jnp.sum(valid),
            cache=kv_cache.copy_rows(state.cache, slot, self.prompts.cache, prompt, self.prompts.cache.length),
            answer=put(state.answer, held),
            tokens=put(state.tokens, tokens),
            index=put(state.index, index),
            position=put(state.position, self.prompts.lengths[prompt]),
        )
        return self._pin(state)
