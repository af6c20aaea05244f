"""Slots of episodes that are at different turns: an episode keeps its slot, and its cache, from turn to turn.

One step feeds every slot a token: one that is known, of an observation, or the one that was drawn last; and draws the
next one where none is known. A slot whose answer has ended waits for the host, which asks the environments once enough
of them wait. A long observation is prefilled instead, with all that was before it, as the prompt of a free slot is.

What is sampled depends neither on slots nor on their order: the randomness of a token is that of the number of its
episode, its turn and its place in the answer.
"""

import functools
from collections import deque
from collections.abc import Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Key as Keys

from jaxrl_llm.ground import sharding
from jaxrl_llm.ground.array_typing import Array, Bool, Float, Integer, Key, Params
from jaxrl_llm.ground.masking import bucket
from jaxrl_llm.models import KVCache, Routing, is_recorded, kv_cache
from jaxrl_llm.rollout.decoder import Decoder, is_end
from jaxrl_llm.rollout.engine import Engine, by_layer
from jaxrl_llm.rollout.placement import places, spread_rows
from jaxrl_llm.rollout.rollout import Rollout, Routes

_LATER_TURNS = 2**32 - 1  # folded into the key in the place of a prompt's number, for the turns after the first
_AT_ONCE = 8  # the host is asked once one of so many running slots waits
_FED = 128  # tokens of an observation up to which they are fed one by one


class _Record(flax.struct.PyTreeNode):
    """Whole episodes by row, as a `Rollout` has them."""

    tokens: Integer[Array, "b t"]
    sampled: Bool[Array, "b t"]
    logprobs: Float[Array, "b t"]
    kept: Integer[Array, "b t m"] | None
    routing: Routing | None  # [l b t x]; of a token once it is fed


class _Slots(flax.struct.PyTreeNode):
    row: Integer[Array, "slots"]  # b = free
    position: Integer[Array, "slots"]  # of the token that is fed next
    known: Integer[Array, "slots"]  # tokens of the row
    begun: Integer[Array, "slots"]  # of them, those before the answer
    turn: Integer[Array, "slots"]
    waiting: Bool[Array, "slots"]  # its answer has ended
    cache: KVCache


class _State(flax.struct.PyTreeNode):
    record: _Record
    slots: _Slots


class EpisodeSlots:
    """The slots of one rollout, on the host.

    Args:
      uids, key: of `Engine.generate`.
      width, length: most tokens of a prompt, and of a whole episode.
      observed: most tokens of an observation.
    """

    def __init__(
        self,
        engine: Engine,
        weights: Params,
        uids: Integer[np.ndarray, "p"],
        key: Key,
        *,
        width: int,
        length: int,
        observed: int,
    ):
        self.engine, self.width, self.length = engine, width, length
        self.rows = len(uids) * engine.group_size
        self.count = min(engine.slots, self.rows) or self.rows
        self.fed = _fed(observed)
        self._chance = jnp.repeat(jnp.asarray(uids), engine.group_size), key
        self._weights = _cut(engine, weights)
        self._state = _empty(engine, self._weights, b=self.rows, count=self.count, length=length)
        self._episode = np.full(self.count, self.rows)  # of each slot; the number of episodes: free
        self._queue, self._turns = deque[tuple[int, list[int]]](), np.zeros(self.rows, np.int32)
        self._heard: dict[int, int] = {}  # the tokens of each episode whose answer was returned

    def answered(self, wanted: Mapping[int, list[int]]) -> dict[int, tuple[list[int], bool]]:
        """Return some of the answers that are wanted, as soon as there are some, with whether each has ended by itself.

        An episode that is not wanted again after its answer is over. {}: all are.

        Args:
          wanted: the context of each episode that is to answer next, which begins with what it was before.
        """
        more = np.zeros((self.count, self.fed), np.int32)
        counts = np.full(self.count, -1, np.int32)
        for slot, episode in enumerate(self._episode.tolist()):
            if episode not in self._heard:
                continue
            new = wanted[episode][self._heard[episode] :] if episode in wanted else None
            if new is None or len(new) > self.fed:
                self._episode[slot] = self.rows
            else:
                more[slot, : len(new)], counts[slot] = new, len(new)
                self._turns[episode] += 1
        held = {*self._episode.tolist()}
        for episode, context in wanted.items():
            if episode not in held:
                self._turns[episode] += episode in self._heard
                self._queue.append((episode, context))
        self._heard.clear()
        self._fill()
        running = int((self._episode < self.rows).sum())
        if not running:
            return {}
        enough = np.int32(max(1, running // _AT_ONCE))
        asked = jnp.asarray(self._episode), jnp.asarray(more), jnp.asarray(counts), enough
        self._state, said = _advance(self.engine, self._weights, self._state, *self._chance, *asked)
        tokens, begun, known, waiting = jax.device_get(said)
        answers = {}
        for slot in np.flatnonzero(waiting).tolist():
            episode, ids = int(self._episode[slot]), tokens[slot, : known[slot] - begun[slot]].tolist()
            self._heard[episode] = int(known[slot])
            answers[episode] = ids, ids[-1] in self.engine.end_ids
        return answers

    def _fill(self) -> None:
        """Prefill contexts of the queue in free slots, once there are enough of both."""
        group, batch = self.engine.group_size, max(1, self.count // _AT_ONCE)
        while self._queue:
            free = np.flatnonzero(self._episode == self.rows)
            if not len(free) or (len(free) < min(batch, len(self._queue)) and len(free) < self.count):
                return
            first = len(free) == self.count and not self._turns.any() and self._queue[0][0] == 0
            most = self.count if first else batch
            taken = [self._queue.popleft() for _ in range(min(most, len(free), len(self._queue)))]
            each = group if first else 1  # at first a group shares the prefill of its prompt
            given = taken[::each]
            longest = max(len(context) for _, context in given)
            width = self.width if longest <= self.width else self.length
            width = bucket(longest, width, self.engine.prompt_buckets)
            contexts = np.zeros((-(-most // each), width), np.int32)
            lengths = np.ones(len(contexts), np.int32)
            for k, (_, context) in enumerate(given):
                contexts[k, : len(context)], lengths[k] = context, len(context)
            place, row, turn = np.full(most, self.count), np.full(most, self.rows), np.zeros(most, np.int32)
            for k, (episode, _) in enumerate(taken):
                place[k], row[k], turn[k] = free[k], episode, self._turns[episode]
                self._episode[free[k]] = episode
            arrays = map(jnp.asarray, (contexts, lengths, place, np.arange(most) // each, row, turn))
            self._state = _prefilled(self.engine, self._weights, self._state, *self._chance, *arrays)

    def rollout(self, lengths: Integer[np.ndarray, "b"], cut: Bool[np.ndarray, "b"]) -> Rollout:
        """Return the episodes. lengths: all tokens of each; cut: ended by a bound."""
        engine = self.engine
        out = _finished(engine, self._state.record, jnp.asarray(lengths), jnp.asarray(cut))
        return out if engine.rows_on in (None, engine.model.mesh) else spread_rows(engine.rows_on, out)


def slot_traces(
    engine: Engine, params: Params, prompts: tuple[int, int], length: int, observed: int
) -> list[jax.stages.Traced]:
    """The programs of `EpisodeSlots` for abstract parameters: the first prefill, the loop and the end."""
    b = prompts[0] * engine.group_size
    count, shape = min(engine.slots, b) or b, jax.ShapeDtypeStruct
    shapes = jax.eval_shape(functools.partial(_cut, engine), engine.prepared_shapes(params))
    if engine.model.mesh is not None:
        shapes = jax.tree.map(lambda x, to: shape(x.shape, x.dtype, sharding=to), shapes, places(engine.model, shapes))
    state = jax.eval_shape(functools.partial(_empty, engine, b=b, count=count, length=length), shapes)
    chance = shape((b,), jnp.uint32), shape((), jax.random.key(0).dtype)
    first, ints = -(-count // engine.group_size), functools.partial(shape, dtype=jnp.int32)
    contexts = ints((first, prompts[1])), ints((first,)), *[ints((count,))] * 4
    more = ints((count,)), ints((count, _fed(observed))), ints((count,)), ints(())
    return [
        _prefilled.trace(engine, shapes, state, *chance, *contexts),
        _advance.trace(engine, shapes, state, *chance, *more),
        _finished.trace(engine, state.record, ints((b,)), shape((b,), bool)),
    ]


def _fed(observed: int) -> int:
    return max(1, min(observed, _FED))


@functools.partial(jax.jit, static_argnums=0)
def _cut(engine: Engine, params: Params) -> Params:
    return by_layer(engine, params)[1]


@functools.partial(jax.jit, static_argnums=0, static_argnames=("b", "count", "length"))
def _empty(engine: Engine, params: Params, b: int, count: int, length: int) -> _State:
    """No episode, and free slots."""
    zero, ints = jnp.zeros(count, jnp.int32), jnp.zeros((b, length), jnp.int32)
    decoder, routing, kept = _decoder(engine, params, ints, ints[:, 0]), None, None
    model = decoder.model
    if engine.record_routing and model.config.num_moe_layers:
        shape = model.config.num_moe_layers, b, length
        routing = model.config.gate.blank(*shape, logits=engine.record_router_logits)
    if engine.record_kept:
        kept = jnp.full((b, length, min(engine.sampling.top_k, model.config.vocab_size)), -1, jnp.int32)
    record = _Record(ints, ints.astype(bool), ints.astype(jnp.float32), kept, routing)
    slots = _Slots(zero + b, zero, zero, zero, zero, zero.astype(bool), model.empty_cache(count, length))
    return _pinned(decoder, _State(record, slots))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _prefilled(
    engine: Engine,
    params: Params,
    state: _State,
    uids: Array,
    key: Key,
    contexts: Integer[Array, "p w"],
    lengths: Integer[Array, "p"],
    place: Integer[Array, "n"],
    of: Integer[Array, "n"],
    row: Integer[Array, "n"],
    turn: Integer[Array, "n"],
) -> _State:
    """Begin or go on with the episodes `row`, with the contexts `of`, in the slots `place`.

    What was recorded of earlier tokens stays. The last token of the turn before was never fed: its experts come with
    this prefill, and so do those of the observation.
    """
    decoder, slots, record = _decoder(engine, params, contexts, lengths), state.slots, state.record
    out, routing = decoder.prefill(jnp.zeros((), jnp.int32), len(contexts))
    width = contexts.shape[1]
    held = (jnp.arange(width)[None] < lengths[:, None])[of]
    at = jnp.minimum(row, len(record.tokens) - 1)
    tokens = jnp.where(held, contexts[of], record.tokens[at, :width])
    record = record.replace(tokens=record.tokens.at[row, :width].set(tokens, mode="drop"))
    if record.routing is not None and routing is not None:
        known = is_recorded(record.routing.experts[:, at, :width])[..., None]

        def fill(old: Array, new: Array) -> Array:
            return old.at[:, row, :width].set(jnp.where(known, old[:, at, :width], new[:, of]), mode="drop")

        record = record.replace(routing=jax.tree.map(fill, record.routing, routing))
    begun = lengths[of]

    def put(old: Array, new: Any) -> Array:
        return old.at[place].set(new, mode="drop")

    slots = slots.replace(
        row=put(slots.row, row),
        position=put(slots.position, begun - 1),
        known=put(slots.known, begun),
        begun=put(slots.begun, begun),
        turn=put(slots.turn, turn),
        waiting=put(slots.waiting, False),
        cache=kv_cache.copy_rows(slots.cache, place, out.cache, of, width, decoder.model.cache_layout),
    )
    keys = _keys(engine, uids, key, row, turn)
    drawn = decoder.drawn(out.hidden[of], keys, jnp.zeros_like(row))
    record, ended = _written(engine, record, row, begun, begun, drawn)
    slots = slots.replace(
        position=put(slots.position, begun), known=put(slots.known, begun + 1), waiting=put(slots.waiting, ended)
    )
    return _pinned(decoder, _State(record, slots))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _advance(
    engine: Engine,
    params: Params,
    state: _State,
    uids: Array,
    key: Key,
    row: Integer[Array, "slots"],
    more: Integer[Array, "slots m"],
    counts: Integer[Array, "slots"],
    enough: Integer[Array, ""],
) -> tuple[_State, Any]:
    """Go on until so many slots wait, or none runs; returns the state, and what the host reads.

    Args:
      row: the episode of each slot now.
      more: known tokens that follow its last answer, of which it has so many `counts`; -1 where it goes on as it is.
    """
    slots, record, b = state.slots, state.record, len(state.record.tokens)
    on, after = counts >= 0, jnp.arange(more.shape[1])[None]
    place = jnp.where(after < counts[:, None], slots.known[:, None] + after, record.tokens.shape[1])
    record = record.replace(tokens=record.tokens.at[row[:, None], place].set(more, mode="drop"))
    known = slots.known + jnp.maximum(counts, 0)
    slots = slots.replace(
        row=row,
        known=known,
        begun=jnp.where(on, known, slots.begun),
        turn=slots.turn + on,
        waiting=slots.waiting & ~on & (row < b),
    )
    keys, decoder = _keys(engine, uids, key, row, slots.turn), _decoder(engine, params, record.tokens, uids)
    where = jnp.minimum(row, b - 1)

    def goes_on(state: _State) -> Array:
        slots = state.slots
        return jnp.any((slots.row < b) & ~slots.waiting) & (jnp.sum(slots.waiting) < enough)

    def step(state: _State) -> _State:
        record, slots = state.record, state.slots
        active = (row < b) & ~slots.waiting
        # A slot that waits feeds its last token again, to the same column, as padding, which leaves states as they are;
        # a free one idles at column 0.
        position = jnp.where(row < b, slots.position, 0)
        fed = record.tokens[where, position]
        out = decoder.model.apply(
            decoder.params,
            fed[:, None],
            segment_ids=active[:, None].astype(jnp.int32),
            positions=position[:, None],
            cache=slots.cache,
            router_logits=engine.record_router_logits,
        )
        runs = jnp.where(active, row, b)
        if record.routing is not None and out.routing is not None:

            def put(old: Array, new: Array) -> Array:
                return old.at[:, runs, position].set(new[:, :, 0], mode="drop")

            record = record.replace(routing=jax.tree.map(put, record.routing, out.routing))
        draws, position = active & (position + 1 == slots.known), position + 1
        drawn = decoder.drawn(out.hidden[:, 0], keys, position - slots.begun)
        record, ended = _written(engine, record, jnp.where(draws, row, b), position, slots.begun, drawn)
        slots = slots.replace(
            position=jnp.where(active, position, slots.position),
            known=slots.known + draws,
            waiting=slots.waiting | (draws & ended),
            cache=out.cache,
        )
        return _pinned(decoder, _State(record, slots))

    state = jax.lax.while_loop(goes_on, step, _pinned(decoder, _State(record, slots)))
    record, slots = state.record, state.slots
    answer = jnp.minimum(slots.begun[:, None] + jnp.arange(engine.max_new_tokens)[None], record.tokens.shape[1] - 1)
    return state, (record.tokens[where[:, None], answer], slots.begun, slots.known, slots.waiting)


@functools.partial(jax.jit, static_argnums=0)
def _finished(engine: Engine, record: _Record, lengths: Integer[Array, "b"], cut: Bool[Array, "b"]) -> Rollout:
    out = Rollout(
        tokens=record.tokens,
        segment_ids=(jnp.arange(record.tokens.shape[1])[None] < lengths[:, None]).astype(jnp.int32),
        loss_mask=record.sampled,
        sampler_logprobs=record.logprobs,
        truncated=cut,
        kept=record.kept,
        routes=Routes(sampled=record.routing),
    )
    return sharding.constrain_rollout(out, engine.model.mesh)


def _decoder(engine: Engine, params: Params, prompts: Array, lengths: Array) -> Decoder:
    keys = jnp.broadcast_to(jax.random.key(0), lengths.shape)  # not used: `drawn` is given others
    return engine.decoder(params, prompts, lengths, keys, lengths)


def _written(
    engine: Engine, record: _Record, row: Array, position: Array, begun: Array, drawn: Any
) -> tuple[_Record, Bool[Array, "n"]]:
    """The record with tokens that were drawn, b in `row`: none; and whether the answer ends with it."""
    tokens, logprobs, kept = drawn

    def put(old: Array, new: Any) -> Array:
        return old.at[row, position].set(new, mode="drop")

    record = record.replace(
        tokens=put(record.tokens, tokens), sampled=put(record.sampled, True), logprobs=put(record.logprobs, logprobs)
    )
    if record.kept is not None and kept is not None:
        record = record.replace(kept=put(record.kept, kept))
    return record, is_end(tokens, engine.end_ids) | (position + 1 - begun >= engine.max_new_tokens)


def _keys(engine: Engine, uids: Array, key: Key, row: Array, turn: Array) -> Keys[Array, "n"]:
    """Return the key of each answer: of its prompt and its place in the group, later of its episode and its turn."""
    place = jnp.minimum(row, len(uids) - 1)
    later = jax.random.fold_in(key, np.uint32(_LATER_TURNS))

    def of(uid: Array, sample: Array, turn: Array) -> Array:
        first = jax.random.fold_in(jax.random.fold_in(key, uid), sample)
        number = uid * np.uint32(engine.group_size) + sample.astype(jnp.uint32)
        return jnp.where(
            turn == 0, first, jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(later, turn), number), 0)
        )

    return jax.vmap(of)(uids[place], place % engine.group_size, turn)


def _pinned(decoder: Decoder, state: _State) -> _State:
    """The record is replicated, and slots are sharded by rows, their caches also by heads."""
    record = jax.tree.map(lambda x: sharding.constrain(x, [None] * x.ndim, decoder.model.mesh), state.record)
    return _State(record, decoder.pin(state.slots))
