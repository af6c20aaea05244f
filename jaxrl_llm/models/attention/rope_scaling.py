"""RoPE in other forms: for more positions than in pretraining, and of neighbours. Loaded where a config has
one."""

import math

import jax.numpy as jnp

from jaxrl_llm.ground.array_typing import Array, Float

FIELDS = {
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "linear": ("factor",),
    "yarn": (
        *("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
        *("attention_factor", "truncate"),
    ),
    "dynamic": ("factor", "max_position_embeddings"),
}


def check_scaling(kind: str, numbers: tuple[float, ...]) -> None:
    """Raise ValueError unless `rope_scaling` has the numbers of its `rope_type`."""
    names = FIELDS[kind]
    positive = numbers[:4] if kind == "yarn" else numbers  # its last two may be 0
    right = len(numbers) == len(names) and min(positive) > 0 and min(numbers) >= 0
    if right and kind == "llama3":
        right = numbers[1] < numbers[2]
    if right and kind == "yarn":
        right = numbers[2] > numbers[3]
    if not right:
        raise ValueError(
            f"model.rope_scaling={numbers} must be () or, for model.rope_type={kind}, the {len(names)} positive "
            f"numbers {', '.join(names)}, with the factor or count of high frequencies above that of low ones"
        )


def check_length(length: int, numbers: tuple[float, ...]) -> None:
    """Raise ValueError for sequences that a dynamic RoPE turns by other frequencies than those of its theta.

    transformers computes theta (factor n / m - factor + 1)^(d / (d - 2)), m = max_position_embeddings, with n the
    length of the call so far if above m. A token's keys thus depend on when they were cached, and a forward over the
    whole answer gives others than its decoding did.
    """
    factor, longest = numbers
    if length > longest:
        raise ValueError(
            f"model.rope_type=dynamic (factor {factor:g}) is computed up to max_position_embeddings={longest:.0f} "
            f"tokens, and prompt and answer may have {length}: beyond, its frequencies change while an answer is "
            "decoded; lower rollout.max_prompt_length or the tokens of an answer, or take a checkpoint with yarn or "
            "linear scaling"
        )


def scaled_frequencies(
    kind: str, numbers: tuple[float, ...], frequency: Float[Array, " half"], theta: float
) -> tuple[Float[Array, " half"], float]:
    """Return the frequencies in use, and the factor of cos and sin, from theta^(-2i/d), i < d/2."""
    if kind == "llama3":
        return _llama3(frequency, *numbers), 1.0
    if kind == "linear":
        return frequency / numbers[0], 1.0
    if kind == "dynamic":
        return frequency, 1.0  # of rows that `check_length` accepts
    return _yarn(frequency, theta, *numbers)


def _llama3(frequency: Array, factor: float, low: float, high: float, original: float) -> Array:
    """Llama 3's longer context (arXiv 2407.21783): with n = original * frequency / 2 pi turns over the original length,

    frequency / factor for n < low,   frequency for n > high,   and a mixture, linear in n, in between.
    """
    kept = jnp.clip((original * frequency / (2 * math.pi) - low) / (high - low), 0.0, 1.0)
    return kept * frequency + (1 - kept) * frequency / factor


def _yarn(
    frequency: Array, theta: float, factor: float, original: float, fast: float, slow: float, scale: float, cut: float
) -> tuple[Array, float]:
    """YaRN (arXiv 2309.00071): a mixture that is linear in i, from the pair that turns `fast` times over the original
    length, which is kept, to the one that turns `slow` times, which is divided by the factor."""
    last = 2 * len(frequency) - 1

    def pair(turns: float) -> float:
        return (last + 1) * math.log(original / (2 * math.pi * turns)) / (2 * math.log(theta))

    low, high = pair(fast), pair(slow)
    if cut:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, last)
    divided = jnp.clip((jnp.arange(len(frequency)) - low) / max(high - low, 0.001), 0.0, 1.0)
    used = frequency * (1 - divided) + frequency / factor * divided
    return used, scale or 0.1 * math.log(max(factor, 1.0)) + 1.0


def rotate_pairs(x: Float[Array, "b t h d"], cos: Array, sin: Array) -> Float[Array, "b t h d"]:
    """`rotate` of neighbours (x1, x2, x1', x2', ..., rest)."""
    first = x[..., : 2 * cos.shape[-1]].astype(jnp.float32)
    x1, x2 = first[..., ::2], first[..., 1::2]
    y = jnp.stack([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).reshape(first.shape)
    return jnp.concatenate([y.astype(x.dtype), x[..., first.shape[-1] :]], axis=-1)
