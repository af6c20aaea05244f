"""The loop over `Decoder.step` with fewer slots than answers: one whose answer has ended takes the next of the queue.

Continuous batching: Orca, OSDI 2022. A slot holds a copy of its answer's prompt, and prompts are prefilled in chunks,
so that memory follows the slots and not the prompts.
"""

import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp

from jaxrl_llm.ground.array_typing import Array, Integer
from jaxrl_llm.models import KVCache, Routing, kv_cache
from jaxrl_llm.rollout.decoder import Answers, Decoder, Prefilled, Slots


class _State(flax.struct.PyTreeNode):
    """The carry of the loop that refills."""

    answers: Answers
    slots: Slots
    queue: Integer[Array, ""]  # the first answer that has not started
    prompts: Prefilled  # from which the next answers start
    routing: Routing | None  # of all prompts prefilled so far, [l p tp k]


@dataclasses.dataclass(frozen=True)
class Refilled:
    """The loop over one rollout with `count` slots, fewer than answers unless groups cannot share their prompts."""

    decoder: Decoder
    count: int

    @property
    def batch(self) -> int:
        """How many slots are refilled at once: slots that wait are idle, but a refill has a cost."""
        return self.count if self.count == len(self.decoder.limits) else max(1, self.count // 8)

    @property
    def chunk(self) -> int:
        """How many prompts are prefilled at once: as many as the answers in all slots start from."""
        return min(len(self.decoder.lengths), -(-self.count // self.decoder.group))

    def decode(self) -> tuple[Answers, Routing | None]:
        def unfinished(state: _State) -> Array:
            return jnp.any(self.decoder.active(state.slots)) | (state.queue < len(self.decoder.limits))

        def step(state: _State) -> _State:
            state = self._fill(state)
            answers, slots = self.decoder.step(state.answers, state.slots)
            return state.replace(answers=answers, slots=slots)

        state = jax.lax.while_loop(unfinished, step, self._start())
        return state.answers, state.routing

    def _start(self) -> _State:
        """All slots free, and the first chunk of prompts prefilled."""
        decoder = self.decoder
        zero = jnp.zeros(self.count, jnp.int32)
        prompts, routing = decoder.prefill(zero[0], self.chunk)
        rest = (0, len(decoder.lengths) - self.chunk)
        routing = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), rest, (0, 0), (0, 0))), routing)
        # The last token of an answer is never fed, so n - 1 columns behind the prompt hold the others.
        columns = decoder.prompts.shape[1] + decoder.max_new_tokens - 1
        cache = decoder.model.empty_cache(self.count, columns)
        slots = decoder.pin(Slots(zero + len(decoder.limits), zero, zero, zero, cache))
        return _State(decoder.no_answers(), slots, zero[0], prompts, routing)

    def _fill(self, state: _State) -> _State:
        """Refill while a batch of slots is free and answers wait; an answer may end with its first token."""

        def wanted(state: _State) -> Array:
            waiting = len(self.decoder.limits) - state.queue
            free = jnp.sum(~self.decoder.active(state.slots))
            return (waiting > 0) & (free >= jnp.minimum(self.batch, waiting))

        def refill(state: _State) -> _State:
            if self.chunk < len(self.decoder.lengths):
                state = jax.lax.cond(state.queue < self._ready(state), lambda s: s, self._prefill, state)
            return self._refill(state)

        return jax.lax.while_loop(wanted, refill, state)

    def _ready(self, state: _State) -> Array:
        """One past the last answer whose prompt is prefilled."""
        return (state.prompts.first + self.chunk) * self.decoder.group

    def _prefill(self, state: _State) -> _State:
        """Prefill the prompts of the next answers. All chunks have one size: the last overlaps the one before it."""
        first = jnp.minimum(state.queue // self.decoder.group, len(self.decoder.lengths) - self.chunk)
        prompts, routing = self.decoder.prefill(first, self.chunk)
        place = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=first, axis=1)
        return state.replace(prompts=prompts, routing=jax.tree.map(place, state.routing, routing))

    def _refill(self, state: _State) -> _State:
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
            cache=self._with_prompts(slots.cache, slot, state.prompts.cache, row),
        )
        return state.replace(answers=answers, queue=state.queue + jnp.sum(valid), slots=decoder.pin(slots))

    def _with_prompts(self, cache: KVCache, into: Array, prompts: KVCache, rows: Array) -> KVCache:
        width, layout = self.decoder.prompts.shape[1], self.decoder.model.cache_layout
        return kv_cache.copy_rows(cache, into, prompts, rows, width, layout)
