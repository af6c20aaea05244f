"""How a token is drawn from its logits, and its log-prob under the distribution that it was drawn from."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Key as Keys
from jaxtyping import UInt32

from jaxrl_llm.ground.array_typing import Array, Bool, Float, Integer, Key
from jaxrl_llm.ground.declared import Block, declared


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

    @property
    def cuts(self) -> bool:
        """Whether tokens are left out of the draw."""
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
    a smaller top_k.

    The draw is an exponential race, argmax_i p_i / E_i with E_i ~ Exp(1), which picks i with probability p_i / sum p:
    it needs no normaliser, and a rounding of the logits changes the winner only at a near-tie.

    Args:
      keys: of `answer_keys`; the randomness is fold_in(key of the answer, index of the token in it).
      index: position of the token in its answer, from 0.
      greedy: rows that take the most probable token instead.
    """
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if sampling.greedy:
        return best, jnp.zeros(logits.shape[0], jnp.float32), None
    vocabulary, order = logits.shape[1], None
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < vocabulary or sampling.top_p < 1 or sampling.min_p > 0:
        logits, order = jax.lax.top_k(logits, min(sampling.top_k, vocabulary) or vocabulary)
    if sampling.min_p > 0:
        logits = jnp.where(logits >= logits[:, :1] + math.log(sampling.min_p), logits, -jnp.inf)
    if sampling.top_p < 1:
        # Sorted: a token stays while the mass before it is below top_p, so the first one always does.
        probs = jax.nn.softmax(logits, axis=-1)
        kept = jnp.cumsum(probs, axis=-1) - probs < sampling.top_p
        logits = jnp.where(kept, logits, -jnp.inf)
    shifted = logits - jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.exp(shifted)
    keys = jax.vmap(jax.random.fold_in)(keys, index)
    words = jax.vmap(lambda k: jax.random.bits(k, logits.shape[1:], jnp.uint32))(keys)
    choice = jnp.argmax(weights / exponential(words), axis=-1)[:, None]
    logprobs = jnp.take_along_axis(shifted, choice, axis=-1)[:, 0] - jnp.log(jnp.sum(weights, axis=-1))
    tokens = (choice if order is None else jnp.take_along_axis(order, choice, axis=-1))[:, 0].astype(jnp.int32)
    if greedy is not None:
        tokens, logprobs = jnp.where(greedy, best, tokens), jnp.where(greedy, 0, logprobs)
    kept = None if order is None else jnp.where(logits > -jnp.inf, order, -1).astype(jnp.int32)
    return tokens, logprobs, kept
