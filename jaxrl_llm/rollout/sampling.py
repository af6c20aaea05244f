"""How a token is drawn from its logits, and its log-prob under the distribution that it was drawn from."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Key as Keys
from jaxtyping import UInt32

from jaxrl_llm.ground.array_typing import Array, Bool, Float, Integer, Key
from jaxrl_llm.ground.declared import Block, declared
from jaxrl_llm.models import log_softmax

_WHOLE = 1024  # tokens of a vocabulary up to which each has a word of its own
_BLOCK = 256  # tokens of a block of a larger one
_SORTED = 1024  # tokens that are sorted before a whole vocabulary is


@dataclasses.dataclass(frozen=True)
class Sampling(Block, prefix="rollout."):
    """Temperature, then min-p, top-k and top-p, renormalised after each: the order of vLLM.

    Each keeps the most probable tokens, so what is left is a prefix of the tokens sorted by probability.
    """

    temperature: float = declared(1.0, "0 is greedy, which training refuses", least=0)
    top_k: int = declared(0, "most tokens to draw from; 0 keeps every one", least=0)
    top_p: float = declared(
        1.0, "draw from the fewest tokens with this much probability; trains with a top_k", above=0, most=1
    )
    min_p: float = declared(0.0, "drop tokens below this share of the largest probability; likewise", least=0, most=1)
    greedy_last: bool = False  # the last answer of each group is greedy, so that one rollout measures both

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def __str__(self) -> str:
        """ "temperature 0.6, top_p 0.95": the temperature and each cut."""
        given = {name: getattr(self, name) for name in ("top_k", "top_p", "min_p")}
        cuts = [f"{name} {value:g}" for name, value in given.items() if value != getattr(Sampling, name)]
        return ", ".join([f"temperature {self.temperature:g}", *cuts])

    @property
    def cuts(self) -> bool:
        """True if tokens are left out of the draw."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


def answer_keys(key: Key, uids: Integer[Array, "p"], group_size: int) -> Keys[Array, "b"]:
    """fold_in(fold_in(key, uid), sample_index) of every answer, in (prompt, sample) order: [p * group_size]."""
    per_prompt = jax.vmap(lambda uid: jax.random.fold_in(key, uid))(uids)
    per_answer = jax.vmap(lambda k: jax.vmap(lambda g: jax.random.fold_in(k, g))(jnp.arange(group_size)))(per_prompt)
    return per_answer.reshape(-1)


def exponential(words: UInt32[Array, "*n"]) -> Float[Array, "*n"]:
    """-log(1 - v) ~ Exp(1) of uniform random words, v the middle of one of 2^32 equal steps: float32, in (1e-10, 17).

    In a race a token of probability p wins by a number near p, so the small ones need their relative precision, which
    a uniform of 23 bits does not have. Steps of 2^-32 give p = 1e-9 its share to 0.3 %, and larger p nearly exactly.
    """
    v = (jnp.astype(~words, jnp.float32) + 0.5) * 2.0**-32
    # 1 - v rounds to steps of 2^-24, so it serves from 1/64 on; below, three terms of the series are right to 1e-6.
    return jnp.where(v < 1 / 64, v * (1 + v * (1 / 2 + v / 3)), -jnp.log(jnp.maximum(1 - v, 2.0**-24)))


def draw(
    logits: Float[Array, "n v"],
    keys: Keys[Array, "n"],
    index: Integer[Array, "n"],
    sampling: Sampling,
    greedy: Bool[Array, "n"] | None = None,
) -> tuple[Integer[Array, "n"], Float[Array, "n"], Integer[Array, "n m"] | None]:
    """One token a row, int32, and its log-prob under the distribution after temperature and cuts (0 when greedy); and
    where a cut is asked for the tokens that it was drawn from, most probable first and -1 behind the last. m is v, or
    a smaller top_k; without a top_k those of a large vocabulary are not told.

    Args:
      keys: of `answer_keys`; the randomness is fold_in(key of the answer, index of the token in it).
      index: position of the token in its answer, from 0.
      greedy: rows that take the most probable token instead.
    """
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if sampling.greedy:
        return best, jnp.zeros(logits.shape[0], jnp.float32), None
    keys = jax.vmap(jax.random.fold_in)(keys, index)
    tokens, logprobs, kept = _draw(logits / sampling.temperature, keys, sampling)
    if greedy is not None:
        tokens, logprobs = jnp.where(greedy, best, tokens), jnp.where(greedy, 0, logprobs)
    return tokens, logprobs, kept


def _draw(
    logits: Float[Array, "n v"], keys: Keys[Array, "n"], sampling: Sampling
) -> tuple[Integer[Array, "n"], Float[Array, "n"], Integer[Array, "n m"] | None]:
    """Draw as `draw` does, from logits at their temperature."""
    vocabulary, top_p = logits.shape[1], sampling.top_p
    most = min(sampling.top_k, vocabulary) or vocabulary
    if most == vocabulary and top_p == 1 and sampling.min_p == 0:
        tokens = _raced(logits, keys)
        return tokens, _logprobs(logits, tokens), None
    least = jnp.max(logits, axis=-1, keepdims=True) + (math.log(sampling.min_p) if sampling.min_p else -jnp.inf)

    def of_best(count: int, total: Array | None = None) -> tuple[Array, Array, Array]:
        """Return so many of the most probable tokens; their probabilities are renormalised, or are those of a total."""
        best, order = jax.lax.top_k(logits, count)
        best = jnp.where(best >= least, best, -jnp.inf)
        if top_p < 1:
            # Sorted: a token stays while the mass before it is below top_p, so the first one always does.
            probs = jax.nn.softmax(best, axis=-1) if total is None else jnp.exp(best - total)
            best = jnp.where(jnp.cumsum(probs, axis=-1) - probs < top_p, best, -jnp.inf)
        choice = _raced(best, keys, of_blocks=False)
        tokens = jnp.take_along_axis(order, choice[:, None], axis=-1)[:, 0]
        return tokens, _logprobs(best, choice), jnp.where(best > -jnp.inf, order, -1)

    if most < vocabulary or most <= _SORTED:
        return of_best(most)
    # A whole vocabulary takes forty times as long to sort as its first tokens, which nearly always hold all that is
    # kept. Both draw the same: the first words of a race are those of a shorter one.
    total = jax.nn.logsumexp(jnp.where(logits >= least, logits, -jnp.inf), axis=-1, keepdims=True)
    best = jax.lax.top_k(logits, _SORTED)[0]
    held = jnp.sum(jnp.exp(best - total), axis=-1)
    last = jnp.min(best, axis=-1)  # not best[:, -1], whose slice XLA:CPU takes of a sort of the whole vocabulary
    enough = (last < least[:, 0]) | ((held >= top_p) & (top_p < 1))
    first, whole = (lambda: of_best(_SORTED, total)[:2]), (lambda: of_best(most, total)[:2])
    return *jax.lax.cond(jnp.all(enough), first, whole), None


def _logprobs(logits: Float[Array, "n v"], tokens: Integer[Array, "n"]) -> Float[Array, "n"]:
    return log_softmax(logits, jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0])[0]


def _raced(logits: Float[Array, "n v"], keys: Keys[Array, "n"], of_blocks: bool = True) -> Integer[Array, "n"]:
    """One of each row's softmax, int32.

    An exponential race, argmax_i p_i / E_i with E_i ~ Exp(1), picks i with probability p_i / sum p: it needs no
    normaliser, and a rounding of the logits changes the winner only at a near-tie. Of a large vocabulary a block of
    tokens is drawn first, then one of its tokens, which takes a word a block and not a word a token.
    """
    weights = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
    if of_blocks and logits.shape[1] > _WHOLE:
        blocks = jnp.pad(weights, ((0, 0), (0, -weights.shape[1] % _BLOCK))).reshape(len(weights), -1, _BLOCK)
        count = blocks.shape[1]
        words = _words(keys, count + _BLOCK)
        block = _first(jnp.sum(blocks, axis=-1), words[:, :count])
        within = _first(jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0], words[:, count:])
        return block * _BLOCK + within
    return _first(weights, _words(keys, logits.shape[1]))


def _words(keys: Keys[Array, "n"], count: int) -> UInt32[Array, "n count"]:
    return jax.vmap(lambda key: jax.random.bits(key, (count,), jnp.uint32))(keys)


def _first(weights: Float[Array, "n v"], words: UInt32[Array, "n v"]) -> Integer[Array, "n"]:
    return jnp.argmax(weights / exponential(words), axis=-1).astype(jnp.int32)
