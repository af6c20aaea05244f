"""The decode loop: a fixed number of slots, each holding one answer, refilled from the queue while others go on.

One state pytree and its functions: `feed` runs the model on the token that every slot sampled last, `sample` draws the
next one, `refill` hands free slots to the next answers of the queue, `prefill` runs the next prompts of the queue. An
answer's place among the slots and the time of its start do not enter its randomness.

With a slot for every answer all start at once and none is refilled: a group shares its prompt's keys and values. With
fewer, a slot holds a copy of its answer's prompt, and the prompts are prefilled in chunks, so that memory follows the
slots and not the prompts.
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
from jaxrl_llm.models import KVCache, Model, Routing, kv_cache
from jaxrl_llm.models.kv_cache import Prefix
from jaxrl_llm.models.routing import routing_dtype
from jaxrl_llm.rollout.sampling import Sampling, draw

__all__ = ["Answers", "Decoder"]


class Prompts(flax.struct.PyTreeNode):
    """The prefilled prompts, `first` and those after it: every answer of a group starts from the same row."""

    cache: KVCache
    hidden: Float[Array, "c d"]  # of the last prompt token
    first: Integer[Array, ""]


class Answers(flax.struct.PyTreeNode):
    """What was sampled, by answer: b in (prompt, sample) order, n the position in the answer."""

    tokens: Integer[Array, "b n"]
    logprobs: Float[Array, "b n"]
    experts: Integer[Array, "b n l k"] | None  # when the token was fed; None where routing is not recorded
    logits: Float[Array, "b n l e"] | None  # the router's, likewise
    count: Integer[Array, "b"]
    prompts: Routing | None  # of the prompts, [l p tp k]


class State(flax.struct.PyTreeNode):
    """answers: all of them; queue: the first that has not started; prompts: those that the next ones start from.

    Of each slot: its answer (b = free), the token that it sampled last, that token's index in the answer and its
    position in the sequence; the cache's rows are slots.
    """

    answers: Answers
    queue: Integer[Array, ""]
    prompts: Prompts
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
    prompts: Integer[Array, "p tp"]
    lengths: Integer[Array, "p"]
    keys: Keys[Array, "b"]
    limits: Integer[Array, "b"]  # answer tokens at most
    max_new_tokens: int
    slots: int
    record_routing: bool
    record_router_logits: bool

    @property
    def together(self) -> bool:
        """Whether every answer has a slot of its own."""
        return self.slots == len(self.limits)

    @property
    def shared(self) -> bool:
        """Whether groups share their prompts; on a mesh only where a group and its prompt fall on the same devices."""
        prompts, shards = len(self.lengths), sharding.row_shards(self.model.mesh)
        return self.together and (prompts % shards == 0 or shards % prompts == 0)

    @property
    def group(self) -> int:
        return len(self.limits) // len(self.lengths)

    @property
    def batch(self) -> int:
        """Slots refilled at once: few enough that free slots wait little, many enough to share the cost."""
        return self.slots if self.together else max(1, self.slots // 8)

    @property
    def chunk(self) -> int:
        """Prompts prefilled at once: those of a full house."""
        return min(len(self.lengths), -(-self.slots // self.group))

    def run(self) -> Answers:
        """Decode every answer to its end."""
        state = self._empty()
        if self.together:
            state = self._refill(state)
        step = self._step if self.together else lambda s: self._step(self._fill(s))
        return jax.lax.while_loop(self._unfinished, step, state).answers

    def _unfinished(self, state: State) -> Array:
        return jnp.any(self._active(state)) | (state.queue < len(self.limits))

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
        ints, floats = jnp.zeros((b, n), jnp.int32), jnp.zeros((b, n), jnp.float32)
        prompts, routing = self._run_prompts(zero[0])
        room = (0, len(self.lengths) - self.chunk)
        routing = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), room, (0, 0), (0, 0))), routing)
        answers = Answers(ints, floats, experts, logits, jnp.zeros(b, jnp.int32), None if experts is None else routing)
        # The last token of an answer is never fed, so n - 1 columns hold the others.
        width = 0 if self.shared else self.prompts.shape[1]
        cache = kv_cache.empty(config, self.slots, width + n - 1)
        return self._pin(State(answers, zero[0], prompts, cache, zero + b, zero, zero, zero))

    def _run_prompts(self, first: Array) -> tuple[Prompts, Routing | None]:
        """Prefill a chunk of prompts."""
        cut = lambda x: jax.lax.dynamic_slice_in_dim(x, first, self.chunk)  # noqa: E731
        tokens, lengths = cut(self.prompts), cut(self.lengths)
        segment_ids = (jnp.arange(tokens.shape[1])[None] < lengths[:, None]).astype(jnp.int32)
        out = self.model.apply(
            self.params, tokens, segment_ids=segment_ids, prefill=True, router_logits=self.record_router_logits
        )
        assert out.cache is not None
        last = jnp.take_along_axis(out.hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
        return Prompts(out.cache, last, first), out.routing

    def _prefill(self, state: State) -> State:
        """Prefill the prompts of the next answers; the last chunk reaches back to be a whole one."""
        first = jnp.minimum(state.queue // self.group, len(self.lengths) - self.chunk)
        prompts, routing = self._run_prompts(first)
        note = lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new, first, axis=1)  # noqa: E731
        record = None if state.answers.prompts is None else jax.tree.map(note, state.answers.prompts, routing)
        return state.replace(prompts=prompts, answers=state.answers.replace(prompts=record))

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
        position = state.position if self.shared else jnp.where(self._active(state), state.position, 0)
        answers, logits, cache = state.answers, state.answers.logits is not None, state.cache
        if self.shared:
            cache = cache.replace(prefix=Prefix(state.prompts.cache.keys, state.prompts.cache.values, self.lengths))
        out = self.model.apply(
            self.params, state.tokens[:, None], positions=position[:, None], cache=cache, router_logits=logits
        )
        if answers.experts is not None and out.routing is not None:
            note: Callable[[Any, Any], Array] = lambda old, fed: old.at[state.answer, state.index].set(  # noqa: E731
                fed[:, :, 0].transpose(1, 0, 2), mode="drop"
            )
            answers = answers.replace(
                experts=note(answers.experts, out.routing.experts),
                logits=note(answers.logits, out.routing.logits) if logits else None,
            )
        assert out.cache is not None
        cache = out.cache.replace(prefix=None)
        state = state.replace(answers=answers, cache=cache, index=state.index + 1, position=state.position + 1)
        return state, out.hidden[:, 0]

    def _sample(self, answers: Answers, answer: Array, index: Array, hidden: Array) -> tuple[Answers, Array, Array]:
        """Draw token `index` of each answer and note it; an answer that ends leaves its slot free."""
        free = len(self.limits)
        one = jnp.minimum(answer, free - 1)
        greedy = (one + 1) % self.group == 0 if self.sampling.greedy_last else None
        tokens, logprobs = draw(self.model.logits(self.params, hidden), self.keys[one], index, self.sampling, greedy)
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

        def refill(state: State) -> State:
            if self.chunk < len(self.lengths):
                state = jax.lax.cond(state.queue < self._ready(state), lambda s: s, self._prefill, state)
            return self._refill(state)

        return jax.lax.while_loop(wanted, refill, state)

    def _ready(self, state: State) -> Array:
        """One past the last answer whose prompt is prefilled."""
        return (state.prompts.first + self.chunk) * self.group

    def _refill(self, state: State) -> State:
        total, active = len(self.limits), self._active(state)
        slot = jnp.argsort(active)[: self.batch]  # free ones first
        answer = state.queue + jnp.arange(self.batch)
        valid = ~active[slot] & (answer < self._ready(state))
        slot, answer = jnp.where(valid, slot, self.slots), jnp.where(valid, answer, total)
        prompt = jnp.minimum(answer, total - 1) // self.group
        row = jnp.clip(prompt - state.prompts.first, 0, self.chunk - 1)
        index = jnp.zeros_like(answer)
        answers, held, tokens = self._sample(state.answers, answer, index, state.prompts.hidden[row])
        put: Callable[[Array, Array], Array] = lambda old, new: old.at[slot].set(new, mode="drop")  # noqa: E731
        cache = state.cache
        if not self.shared:
            cache = kv_cache.copy_rows(cache, slot, state.prompts.cache, row, self.prompts.shape[1])
        state = state.replace(
            answers=answers,
            queue=state.queue + jnp.sum(valid),
            cache=cache,
            answer=put(state.answer, held),
            tokens=put(state.tokens, tokens),
            index=put(state.index, index),
            position=put(state.position, self.lengths[prompt]),
        )
        return self._pin(state)
