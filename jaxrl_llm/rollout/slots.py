"""Decoding with fewer slots than answers: a slot whose answer has ended takes the next one of the queue.

A slot holds a copy of its answer's prompt, and prompts are prefilled in chunks, so that memory follows the slots and
not the prompts. All prompts have one width, that of the longest. Source: continuous batching, Orca (OSDI 2022).
"""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from jaxrl_llm.ground.array_typing import Array, Integer
from jaxrl_llm.models import Routing, kv_cache
from jaxrl_llm.rollout.decoder import Answers, Decoder, Prompts, Slots

__all__ = ["Refilled"]


class State(flax.struct.PyTreeNode):
    """The loop's carry: queue is the first answer that has not started; prompts are those that the next ones start
    from; routing is that of all prompts prefilled so far, [l p tp k]."""

    answers: Answers
    slots: Slots
    queue: Integer[Array, ""]
    prompts: Prompts
    routing: Routing | None


@dataclasses.dataclass(frozen=True)
class Refilled:
    """The loop over one rollout with `count` slots."""

    decoder: Decoder
    count: int

    @property
    def batch(self) -> int:
        """Slots refilled at once: a trade-off between the time that slots are free and the cost of a refill."""
        return self.count if self.count == len(self.decoder.limits) else max(1, self.count // 8)

    @property
    def chunk(self) -> int:
        """Prompts prefilled at once: as many as the answers in all slots start from."""
        return min(len(self.decoder.lengths), -(-self.count // self.decoder.group))

    def decode(self) -> tuple[Answers, Routing | None]:
        """Every answer to its end, and the routing of the prompts [l p tp k]."""

        def unfinished(state: State) -> Array:
            return jnp.any(self.decoder.active(state.slots)) | (state.queue < len(self.decoder.limits))

        def step(state: State) -> State:
            state = self._fill(state)
            answers, slots = self.decoder.step(state.answers, state.slots)
            return state.replace(answers=answers, slots=slots)

        state = jax.lax.while_loop(unfinished, step, self._start())
        return state.answers, state.routing

    def _start(self) -> State:
        """Every slot is free, and the first chunk of prompts is prefilled."""
        decoder = self.decoder
        zero = jnp.zeros(self.count, jnp.int32)
        prompts, routing = decoder.prefill(zero[0], self.chunk)
        rest = (0, len(decoder.lengths) - self.chunk)
        routing = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), rest, (0, 0), (0, 0))), routing)
        # The last token of an answer is never fed, so n - 1 columns behind the prompt hold the others.
        columns = decoder.prompts.shape[1] + decoder.max_new_tokens - 1
        cache = kv_cache.empty(decoder.model.config, self.count, columns)
        slots = decoder.pin(Slots(zero + len(decoder.limits), zero, zero, zero, cache))
        return State(decoder.no_answers(), slots, zero[0], prompts, routing)

    def _fill(self, state: State) -> State:
        """Refill while a batch of slots is free and answers wait; the first token of an answer may end it."""

        def wanted(state: State) -> Array:
            waiting = len(self.decoder.limits) - state.queue
            free = jnp.sum(~self.decoder.active(state.slots))
            return (waiting > 0) & (free >= jnp.minimum(self.batch, waiting))

        def refill(state: State) -> State:
            if self.chunk < len(self.decoder.lengths):
                state = jax.lax.cond(state.queue < self._ready(state), lambda s: s, self._prefill, state)
            return self._refill(state)

        return jax.lax.while_loop(wanted, refill, state)

    def _ready(self, state: State) -> Array:
        """One past the last answer whose prompt is prefilled."""
        return (state.prompts.first + self.chunk) * self.decoder.group

    def _prefill(self, state: State) -> State:
        """Prefill the prompts of the next answers; the last chunk overlaps the one before it, so that all have one
        size."""
        first = jnp.minimum(state.queue // self.decoder.group, len(self.decoder.lengths) - self.chunk)
        prompts, routing = self.decoder.prefill(first, self.chunk)

        def place(whole: Array, part: Array) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(whole, part, first, axis=1)

        return state.replace(prompts=prompts, routing=jax.tree.map(place, state.routing, routing))

    def _refill(self, state: State) -> State:
        """Start the next answers of the queue, up to a batch of them, in free slots."""
        decoder, slots, total = self.decoder, state.slots, len(self.decoder.limits)
        active = decoder.active(slots)
        slot = jnp.argsort(active)[: self.batch]  # free ones first
        answer = state.queue + jnp.arange(self.batch)
        valid = ~active[slot] & (answer < self._ready(state))
        slot, answer = jnp.where(valid, slot, self.count), jnp.where(valid, answer, total)
        prompt = jnp.minimum(answer, total - 1) // decoder.group
        row = jnp.clip(prompt - state.prompts.first, 0, self.chunk - 1)
        index = jnp.zeros_like(answer)
        answers, running, tokens = decoder.draw(state.answers, answer, index, state.prompts.hidden[row])

        def put(old: Array, new: Array) -> Array:
            return old.at[slot].set(new, mode="drop")

        slots = Slots(
            answer=put(slots.answer, running),
            tokens=put(slots.tokens, tokens),
            index=put(slots.index, index),
            position=put(slots.position, decoder.lengths[prompt]),
            cache=kv_cache.copy_rows(slots.cache, slot, state.prompts.cache, row, decoder.prompts.shape[1]),
        )
        return state.replace(answers=answers, queue=state.queue + jnp.sum(valid), slots=decoder.pin(slots))
