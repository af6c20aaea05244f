"""One step of decoding: run the model on the token that every slot sampled last, draw the next one, record both.

A slot holds one answer at a time; the loops over this step are in `loops.py`. The randomness of an answer depends
neither on its slot nor on when it starts.
"""

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Key as Keys

from jaxrl_llm.ground import sharding
from jaxrl_llm.ground.array_typing import Array, Bool, Float, Integer, Params
from jaxrl_llm.ground.by_name import ByName
from jaxrl_llm.models import KVCache, Model, Prefix, Routing
from jaxrl_llm.rollout.sampling import Sampling, draw

_KERNELS = ByName({"draw_exactly": "jaxrl_llm.rollout.exact_draw"})
_static: Any = functools.partial(flax.struct.field, pytree_node=False)


class Prefilled(flax.struct.PyTreeNode):
    """Prefilled prompts, from number `first` on: every answer of a group starts from the same row."""

    cache: KVCache
    hidden: Float[Array, "c d"]  # of the last prompt token
    first: Integer[Array, ""]


class Answers(flax.struct.PyTreeNode):
    """Sampled answers: b in (prompt, sample) order, n positions in an answer."""

    tokens: Integer[Array, "b n"]
    logprobs: Float[Array, "b n"]
    experts: Integer[Array, "b n l k"] | None  # when the token was fed; None if routing is not recorded
    logits: Float[Array, "b n l e"] | None  # of the router, likewise
    kept: Integer[Array, "b n m"] | None  # that could have been drawn, as `draw` gives it; None if it is not recorded
    count: Integer[Array, "b"]


class Slots(flax.struct.PyTreeNode):
    answer: Integer[Array, "slots"]  # b = free
    tokens: Integer[Array, "slots"]  # sampled last
    index: Integer[Array, "slots"]  # of that token in the answer
    position: Integer[Array, "slots"]  # of that token in the sequence
    cache: KVCache  # a row for each slot


class Decoder(flax.struct.PyTreeNode):
    """The constants of one rollout, and what both loops do with them."""

    params: Params  # unstacked, in the rollout dtype
    prompts: Integer[Array, "p tp"]
    lengths: Integer[Array, "p"]
    keys: Keys[Array, "b"]
    limits: Integer[Array, "b"]  # the most tokens of each answer
    model: Model = _static()
    sampling: Sampling = _static()
    end_ids: tuple[int, ...] = _static()
    max_new_tokens: int = _static()
    record_routing: bool = _static()
    record_router_logits: bool = _static()
    record_kept: bool = _static()

    @property
    def group(self) -> int:
        return len(self.limits) // len(self.lengths)

    def active(self, slots: Slots) -> Bool[Array, "slots"]:
        return slots.answer < len(self.limits)

    def no_answers(self) -> Answers:
        b, n, config = len(self.limits), self.max_new_tokens, self.model.config
        experts = logits = None
        if self.record_routing and config.num_moe_layers:
            blank = config.gate.blank(b, n, config.num_moe_layers, logits=self.record_router_logits)
            experts, logits = blank.experts, blank.logits
        ints, floats = jnp.zeros((b, n), jnp.int32), jnp.zeros((b, n), jnp.float32)
        kept = None
        if self.record_kept:
            kept = jnp.full((b, n, min(self.sampling.top_k, config.vocab_size)), -1, jnp.int32)
        return Answers(ints, floats, experts, logits, kept, jnp.zeros(b, jnp.int32))

    def prefill(self, first: Array, count: int) -> tuple[Prefilled, Routing | None]:
        """Run `count` prompts from number `first` on.

        Returns:
          The prompts with their caches, and their routing [l count tp k]; None if it is not recorded.
        """
        tokens = jax.lax.dynamic_slice_in_dim(self.prompts, first, count)
        lengths = jax.lax.dynamic_slice_in_dim(self.lengths, first, count)
        segment_ids = (jnp.arange(tokens.shape[1])[None] < lengths[:, None]).astype(jnp.int32)
        out = self.model.apply(
            self.params,
            tokens,
            segment_ids=segment_ids,
            prefill=True,
            router_logits=self.record_router_logits,
            rows="padded",
        )
        assert out.cache is not None
        last = jnp.take_along_axis(out.hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
        return Prefilled(out.cache, last, first), out.routing if self.record_routing else None

    def step(self, answers: Answers, slots: Slots, prefix: Prefix | None = None) -> tuple[Answers, Slots]:
        """Feed the last token of every slot and draw the next one.

        Args:
          answers: of all b answers, in which a slot's new token is recorded.
          prefix: the prompts that groups share; None: each slot's cache holds its own.

        Returns:
          Answers with one more token for every slot that holds one, and the slots, free where an answer ended.
        """
        position, logits = slots.position, answers.logits is not None
        if prefix is None:
            # A free slot idles at column 0, which costs no attention and is overwritten by its next answer.
            position = jnp.where(self.active(slots), position, 0)
        out = self.model.apply(
            self.params,
            slots.tokens[:, None],
            positions=position[:, None],
            cache=slots.cache.replace(prefix=prefix),
            router_logits=logits,
        )

        def record(old: Any, fed: Any) -> Array:
            return old.at[slots.answer, slots.index].set(fed[:, :, 0].transpose(1, 0, 2), mode="drop")

        if answers.experts is not None and out.routing is not None:
            answers = answers.replace(
                experts=record(answers.experts, out.routing.experts),
                logits=record(answers.logits, out.routing.logits) if logits else None,
            )
        assert out.cache is not None
        cache, index = out.cache.replace(prefix=None), slots.index + 1
        slots = slots.replace(cache=cache, index=index, position=slots.position + 1)
        answers, answer, tokens = self.draw(answers, slots.answer, index, out.hidden[:, 0])
        return answers, self.pin(slots.replace(answer=answer, tokens=tokens))

    def draw(self, answers: Answers, answer: Array, index: Array, hidden: Array) -> tuple[Answers, Array, Array]:
        """Draw and record one token of each slot's answer.

        Args:
          answer: [slots], the answer of each slot, b where it is free.
          index: [slots], the place of the token in its answer.
          hidden: [slots d], the states that the tokens are drawn from.

        Returns:
          The answers, what each slot holds then (b where its answer ended), and the tokens [slots].
        """
        free = len(self.limits)
        one = jnp.minimum(answer, free - 1)
        tokens, logprobs, kept = self.drawn(hidden, one, self.keys[one], index)
        if answers.kept is not None and kept is not None:
            answers = answers.replace(kept=answers.kept.at[answer, index].set(kept, mode="drop"))
        answers = answers.replace(
            tokens=answers.tokens.at[answer, index].set(tokens, mode="drop"),
            logprobs=answers.logprobs.at[answer, index].set(logprobs, mode="drop"),
            count=answers.count.at[answer].set(index + 1, mode="drop"),
        )
        ended = is_end(tokens, self.end_ids) | (index + 1 >= self.limits[one])
        return answers, jnp.where(ended, free, answer), tokens

    def drawn(self, hidden: Array, answer: Array, keys: Keys[Array, "n"], index: Array) -> Any:
        """Draw tokens of these answers from states, as `sampling.draw` does from their logits."""
        greedy = (answer + 1) % self.group == 0 if self.sampling.greedy_last else None
        if self.model.kernels.exact:
            return _KERNELS["draw_exactly"](self, hidden, keys, index, greedy)
        return draw(self.model.logits(self.params, hidden), keys, index, self.sampling, greedy)

    def pin(self, slots: Any) -> Any:
        """Slots, like all rows, are sharded over the data axes of the mesh, and their caches also by heads; answers are
        replicated."""
        mesh, axes = self.model.mesh, ("rows", "kv_heads", None, None)
        cache = jax.tree.map(lambda x: sharding.constrain(x, [None] * (x.ndim - 4) + [*axes], mesh), slots.cache)
        return sharding.constrain_rows(slots, mesh).replace(cache=cache)


def is_end(tokens: Integer[Array, "*n"], end_ids: tuple[int, ...]) -> Bool[Array, "*n"]:
    """Return whether a token is one of those that end an answer."""
    return functools.reduce(jnp.logical_or, [tokens == one for one in end_ids])
