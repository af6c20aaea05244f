"""Slots of episodes that are at different turns: an episode keeps its slot, and its cache, from turn to turn.

One step feeds every slot a token: one that is known, of an observation, or the one that was drawn last; and draws the
next one where none is known. A slot whose answer has ended waits for the host, which asks the environments once enough
of them wait. A long observation is prefilled instead, with all that was before it, as the prompt of a free slot is.

What is sampled depends neither on slots nor on their order: the randomness of a token is that of the number of its
episode, its turn and its place in the answer.
"""

import functools
from collections.abc import Mapping
from typing import Any, cast

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Key as Keys

from jaxrl_llm.ground import sharding
from jaxrl_llm.ground.array_typing import Array, Bool, Integer, Key, Params
from jaxrl_llm.ground.masking import bucket
from jaxrl_llm.models import KVCache, is_recorded, kv_cache
from jaxrl_llm.rollout.decoder import Decoder, is_end
from jaxrl_llm.rollout.engine import Engine, by_layer
from jaxrl_llm.rollout.placement import placed_shapes, spread_rows
from jaxrl_llm.rollout.rollout import Rollout, Routes
from jaxrl_llm.rollout.sampling import answer_keys
from jaxrl_llm.tasks import Prompts, Task

_LATER_TURNS = 2**32 - 1  # folded into the key in the place of a prompt's number, for the turns after the first
_AT_ONCE = 8  # the host is asked once one of so many running slots waits
_FED = 128  # tokens of an observation up to which they are fed one by one


class _Slots(flax.struct.PyTreeNode):
    position: Integer[Array, "slots"]  # of the token that is fed next
    known: Integer[Array, "slots"]  # tokens of the row
    waiting: Bool[Array, "slots"]  # its answer has ended
    cache: KVCache


_State = tuple[Rollout, _Slots]  # whole episodes by row, where a token's routes come once it is fed


class EpisodeSlots:
    """The slots of one rollout, on the host. Arguments as of `episodes.play`."""

    def __init__(self, engine: Engine, weights: Params, task: Task, prompts: Prompts, key: Key):
        self.engine, self.width = engine, prompts["tokens"].shape[1]
        self.length, self.fed = task.row_length(engine.max_new_tokens), _fed(task)
        self.rows = len(prompts["draw"]) * engine.group_size
        self._keys = _keys(prompts["draw"].astype(np.uint32), key, engine.group_size, task.turns)
        self._weights, self._state = _begun(engine, weights, self.rows, self.length)
        self.count = len(self._state[1].known)
        self._queue, self._turns = dict[int, list[int]](), np.full(self.rows, -1, np.int32)
        # Of each slot the episode (the number of episodes: free) and the tokens before its answer.
        self._episode, self._begun = np.full(self.count, self.rows), np.zeros(self.count, np.int32)
        self._heard: dict[int, int] = {}  # the tokens in each slot whose answer was returned

    def answered(self, wanted: Mapping[int, list[int]]) -> dict[int, list[int]]:
        """Return some of the answers that are wanted, as soon as there are some.

        An episode that is not wanted again after its answer is over. {}: all are.

        Args:
          wanted: the context of each episode that is to answer next, which begins with what it was before.
        """
        more = np.zeros((self.count, self.fed), np.int32)
        self._queue |= wanted
        self._turns[list(wanted)] += 1
        for slot, known in self._heard.items():
            episode = int(self._episode[slot])
            context = wanted.get(episode)
            if context is None or len(context) - known > self.fed:
                self._episode[slot] = self.rows
            else:
                more[slot, : len(context) - known] = context[known:]
                self._begun[slot] = len(self._queue.pop(episode))
        self._fill()
        running = int((self._episode < self.rows).sum())
        if not running:
            return {}
        asked = map(jnp.asarray, (self._episode, self._turns, self._begun, more))
        enough = np.int32(max(1, running // _AT_ONCE))
        self._state, said = _advance(self.engine, self._weights, self._state, self._keys, *asked, enough)
        tokens, known, waiting = jax.device_get(said)
        self._heard, answers = {}, {}
        for slot in np.flatnonzero(waiting).tolist():
            self._heard[slot] = int(known[slot])
            answers[int(self._episode[slot])] = tokens[slot, : known[slot] - self._begun[slot]].tolist()
        return answers

    def _fill(self) -> None:
        """Prefill contexts of the queue in free slots, once there are enough of both."""
        batch = max(1, self.count // _AT_ONCE)
        while self._queue:
            free = np.flatnonzero(self._episode == self.rows)
            if len(free) < min(batch, len(self._queue)):
                return
            first = 0 in self._queue and not self._turns[0]  # the first episode's first turn: all slots are free
            most, each = (self.count, self.engine.group_size) if first else (batch, 1)  # a group shares its prompt
            taken = list(self._queue.items())[: min(most, len(free))]
            longest = max(len(context) for _, context in taken)
            width = bucket(longest, self.width if longest <= self.width else self.length, self.engine.prompt_buckets)
            contexts = np.zeros((-(-most // each), width), np.int32)
            lengths = np.ones(len(contexts), np.int32)
            place, row = np.full(most, self.count), np.full(most, self.rows)
            for k, (episode, context) in enumerate(taken):
                del self._queue[episode]
                place[k], row[k] = free[k], episode
                self._episode[free[k]], self._begun[free[k]] = episode, len(context)
                contexts[k // each, : len(context)], lengths[k // each] = context, len(context)
            arrays = map(jnp.asarray, (row, self._turns, place, contexts, lengths, np.arange(most) // each))
            self._state = _prefilled(self.engine, self._weights, self._state, self._keys, *arrays)

    def rollout(self, lengths: Integer[np.ndarray, "b"], cut: Bool[np.ndarray, "b"]) -> Rollout:
        """Return the episodes. lengths: all tokens of each; cut: ended by a bound."""
        held = np.arange(self.length)[None] < lengths[:, None]
        record = self._state[0].replace(segment_ids=jnp.asarray(held, jnp.int32), truncated=jnp.asarray(cut))
        return spread_rows(self.engine.rows_on or self.engine.model.mesh, record)


def traces(engine: Any, params: Params, task: Task, prompts: int, width: int) -> list[jax.stages.Traced]:
    """The programs of so many prompts of so many tokens, for abstract parameters; the last returns the rollout."""
    if task.turns == 1:
        return [engine.trace(params, prompts, width)]
    b, shape = prompts * engine.group_size, jax.ShapeDtypeStruct
    begin = functools.partial(_begun, engine, b=b, length=task.row_length(engine.max_new_tokens))
    shapes, state = jax.eval_shape(begin, engine.prepared_shapes(params))
    known = engine, placed_shapes(engine.model, shapes), state, shape((task.turns, b), jax.random.key(0).dtype)
    count, ints = len(state[1].known), functools.partial(shape, dtype=jnp.int32)
    first = -(-count // engine.group_size)
    each, turns = ints((count,)), ints((b,))
    return [
        _prefilled.trace(*known, each, turns, each, ints((first, width)), ints((first,)), each),
        _advance.trace(*known, each, turns, each, ints((count, _fed(task))), ints(())),
        spread_rows.trace(engine.rows_on or engine.model.mesh, state[0].replace(truncated=shape((b,), bool))),
    ]


def _fed(task: Task) -> int:
    return max(1, min(task.observation_length, _FED))


@functools.partial(jax.jit, static_argnums=(2, 3))
def _keys(uids: Integer[Array, "p"], key: Key, group: int, turns: int) -> Keys[Array, "turns b"]:
    """The key of each answer: of its prompt and its place in the group, later of its episode and its turn."""
    numbers = (uids[:, None] * np.uint32(group) + jnp.arange(group, dtype=jnp.uint32)[None]).ravel()
    later = jax.random.fold_in(key, np.uint32(_LATER_TURNS))
    of_turns = jax.vmap(lambda turn: answer_keys(jax.random.fold_in(later, turn), numbers, 1))
    return jnp.concatenate([answer_keys(key, uids, group)[None], of_turns(jnp.arange(1, turns))])


@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def _begun(engine: Engine, params: Params, b: int, length: int) -> tuple[Params, _State]:
    """The weights that sample, and no episode in free slots."""
    params, count = by_layer(engine, params)[1], min(engine.slots, b) or b
    zero, ints = jnp.zeros(count, jnp.int32), jnp.zeros((b, length), jnp.int32)
    prompts, routing, kept = ints[:: engine.group_size], None, None
    decoder = _decoder(engine, params, prompts, prompts[:, 0])
    config = decoder.model.config
    if engine.record_routing and config.num_moe_layers:
        routing = config.gate.blank(config.num_moe_layers, b, length, logits=engine.record_router_logits)
    if engine.record_kept:
        kept = jnp.full((b, length, min(engine.sampling.top_k, config.vocab_size)), -1, jnp.int32)
    mask, zeros = ints.astype(bool), ints.astype(jnp.float32)
    record = Rollout(ints, ints, mask, sampler_logprobs=zeros, kept=kept, routes=Routes(sampled=routing))
    slots = _Slots(zero, zero, zero.astype(bool), decoder.model.empty_cache(count, length))
    return params, _pinned(decoder, record, slots)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _prefilled(
    engine: Engine,
    params: Params,
    state: _State,
    keys: Keys[Array, "turns b"],
    row: Integer[Array, "n"],
    turns: Integer[Array, "b"],
    place: Integer[Array, "n"],
    contexts: Integer[Array, "p w"],
    lengths: Integer[Array, "p"],
    of: Integer[Array, "n"],
) -> _State:
    """Begin or go on with the episodes `row`, with the contexts `of`, in the slots `place`.

    What was recorded of earlier tokens stays. The last token of the turn before was never fed: its experts come with
    this prefill, and so do those of the observation.
    """
    (record, slots), decoder = state, _decoder(engine, params, contexts, lengths)
    out, routing = decoder.prefill(jnp.zeros((), jnp.int32), len(contexts))
    width, at, recorded = contexts.shape[1], jnp.minimum(row, keys.shape[1] - 1), cast(Any, record.routes.sampled)

    def fill(old: Array, new: Array) -> Array:
        known = is_recorded(recorded.experts[:, at, :width])[..., None]
        return old.at[:, row, :width].set(jnp.where(known, old[:, at, :width], new[:, of]), mode="drop")

    def put(old: Array, new: Any) -> Array:
        return old.at[place].set(new, mode="drop")

    record = record.replace(
        tokens=record.tokens.at[row, :width].set(contexts[of], mode="drop"),
        routes=Routes(sampled=jax.tree.map(fill, recorded, routing)),
    )
    begun = lengths[of]
    record, ended = _drawn(decoder, record, out.hidden[of], keys[turns[at], at], row, begun, begun)
    slots = slots.replace(
        position=put(slots.position, begun),
        known=put(slots.known, begun + 1),
        waiting=put(slots.waiting, ended),
        cache=kv_cache.copy_rows(slots.cache, place, out.cache, of, width, decoder.model.cache_layout),
    )
    return _pinned(decoder, record, slots)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _advance(
    engine: Engine,
    params: Params,
    state: _State,
    keys: Keys[Array, "turns b"],
    row: Integer[Array, "slots"],
    turns: Integer[Array, "b"],
    begun: Integer[Array, "slots"],
    more: Integer[Array, "slots m"],
    enough: Integer[Array, ""],
) -> tuple[_State, Any]:
    """Go on until so many slots wait, or none runs; returns the state, and what the host reads.

    Args:
      row: the episode of each slot now.
      begun: tokens before its answer; those that are new are the first of `more`.
    """
    (record, slots), (b, length) = state, state[0].tokens.shape
    on, place = (row < b) & (begun >= slots.known), slots.known[:, None] + jnp.arange(more.shape[1])[None]
    place = jnp.where(on[:, None] & (place < begun[:, None]), place, length)
    record = record.replace(tokens=record.tokens.at[row[:, None], place].set(more, mode="drop"))
    slots = slots.replace(known=jnp.where(on, begun, slots.known), waiting=slots.waiting & ~on & (row < b))
    where = jnp.minimum(row, b - 1)
    prompts = record.tokens[:: engine.group_size]
    own, decoder = keys[turns[where], where], _decoder(engine, params, prompts, prompts[:, 0])

    def goes_on(state: _State) -> Array:
        waiting = state[1].waiting
        return jnp.any((row < b) & ~waiting) & (jnp.sum(waiting) < enough)

    def step(state: _State) -> _State:
        record, slots = state
        active = (row < b) & ~slots.waiting
        # A slot that waits feeds its last token again, to the same column, as padding, which leaves states as they are;
        # a free one idles at column 0.
        position = jnp.where(row < b, slots.position, 0)
        out = decoder.model.apply(
            decoder.params,
            record.tokens[where, position][:, None],
            segment_ids=active[:, None].astype(jnp.int32),
            positions=position[:, None],
            cache=slots.cache,
            router_logits=engine.record_router_logits,
        )
        runs = jnp.where(active, row, b)

        def put(old: Array, new: Array) -> Array:
            return old.at[:, runs, position].set(new[:, :, 0], mode="drop")

        routing = jax.tree.map(put, record.routes.sampled, out.routing if engine.record_routing else None)
        draws, position = active & (position + 1 == slots.known), position + 1
        record, drawn = record.replace(routes=Routes(sampled=routing)), jnp.where(draws, row, b)
        record, ended = _drawn(decoder, record, out.hidden[:, 0], own, drawn, position, begun)
        slots = slots.replace(
            position=jnp.where(active, position, slots.position),
            known=slots.known + draws,
            waiting=slots.waiting | (draws & ended),
            cache=out.cache,
        )
        return _pinned(decoder, record, slots)

    record, slots = jax.lax.while_loop(goes_on, step, _pinned(decoder, record, slots))
    answer = jnp.minimum(begun[:, None] + jnp.arange(engine.max_new_tokens)[None], length - 1)
    return (record, slots), (record.tokens[where[:, None], answer], slots.known, slots.waiting)


def _decoder(engine: Engine, params: Params, prompts: Array, lengths: Array) -> Decoder:
    limits = jnp.repeat(lengths, engine.group_size)  # neither these nor the keys are used: `drawn` is given others
    return engine.decoder(params, prompts, lengths, jnp.broadcast_to(jax.random.key(0), limits.shape), limits)


def _drawn(
    decoder: Decoder, record: Rollout, hidden: Array, keys: Array, row: Array, position: Array, begun: Array
) -> tuple[Rollout, Bool[Array, "n"]]:
    """The record with a token drawn for each of these rows, b: none; and whether its answer ends with it."""
    tokens, logprobs, kept = decoder.drawn(hidden, row, keys, position - begun)

    def put(old: Any, new: Any) -> Array:
        return old.at[row, position].set(new, mode="drop")

    record = record.replace(
        tokens=put(record.tokens, tokens),
        loss_mask=put(record.loss_mask, True),
        sampler_logprobs=put(record.sampler_logprobs, logprobs),
    )
    if record.kept is not None and kept is not None:
        record = record.replace(kept=put(record.kept, kept))
    return record, is_end(tokens, decoder.end_ids) | (position + 1 - begun >= decoder.max_new_tokens)


def _pinned(decoder: Decoder, record: Rollout, slots: _Slots) -> _State:
    """The record is replicated, and slots are sharded by rows, their caches also by heads."""
    record = jax.tree.map(lambda x: sharding.constrain(x, [None] * x.ndim, decoder.model.mesh), record)
    return record, decoder.pin(slots)
