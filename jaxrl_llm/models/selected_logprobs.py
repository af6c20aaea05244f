"""Log-probs of given tokens, and entropies, from hidden states without the full logits.

The logits of a chunk of tokens exist only while that chunk is worked on: the forward keeps two numbers a token (the
log of the partition sum, and the entropy), and the backward recomputes the chunk's logits. Memory is chunk x vocabulary
however many tokens there are. If there are few logits, all tokens are one chunk, and probabilities are kept for the
backward, as a plain softmax does; on a CPU those of all chunks are, up to a gigabyte.

Kept tokens are marked in a chunk's logits and the others taken out, so the products are those of the full softmax:
2 d v operations a token forward and 4 d v to 6 d v backward, whatever is kept, and one byte a logit for the marks.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import Mesh

from jaxrl_llm.ground import sharding
from jaxrl_llm.ground.array_typing import Array, Float, Integer
from jaxrl_llm.ground.by_name import ByName
from jaxrl_llm.models.softmax import OUT, log_softmax

_KERNELS = ByName({"exact_scores": "jaxrl_llm.models.exact.exact_scores"})

_ONE_CHUNK = 2**22  # logits (16 MB)


def score_chunk(platform: str) -> int:
    """Tokens whose logits exist at one time, on each device. Every chunk reads the head three times and adds to its
    gradient, which on an accelerator costs more than the memory of a larger one."""
    return 1024 if platform == "cpu" else 4096


def kept_probabilities(tokens: int, vocabulary: int, platform: str) -> int:
    """Bytes of the probabilities that a forward over so many tokens leaves for its backward, on each device."""
    kept = tokens * vocabulary <= (2**28 if platform == "cpu" else _ONE_CHUNK)
    return 4 * tokens * vocabulary if kept else 0


def selected_logprobs(
    hidden: Float[Array, "n d"],
    head: Float[Array, "d v"],
    targets: Integer[Array, "n"],
    *,
    temperature: float = 1.0,
    kept: Integer[Array, "n m"] | None = None,
    mesh: Mesh | None = None,
    exact: Any = None,
) -> tuple[Float[Array, "n"], Float[Array, "n"]]:
    """log p_n[target_n] and the entropy -sum_j p_nj log p_nj of p_n = softmax(hidden_n @ head / temperature).

    kept: the tokens that the softmax is over, -1 for none; a row without a token, and None: the whole vocabulary.
    exact: operations (`Tiles`) that give a token the same bits whatever the other ones are.

    Products accumulate in float32 and all that follows is float32. The gradient of an entropy that is not used costs
    nothing. On the mesh of the enclosing jit every device scores its own tokens with the full head, which is gathered
    once, and its gradient scattered once; XLA's partitioner would do so for every chunk.
    """
    if temperature <= 0:
        raise ValueError(f"temperature={temperature} must be positive to score; set rollout.temperature")
    how: Any = {"temperature": float(temperature), "platform": sharding.platform(mesh), "exact": exact}
    scored: Any = functools.partial(_selected, **how)
    run = scored
    if mesh is not None and mesh.size > 1:
        states, tokens = (sharding.spec(("tokens", None)[: x.ndim], x.shape, mesh) for x in (hidden, targets))
        slices = sharding.spec(("embed", "vocab"), head.shape, mesh)

        def on_device(hidden: Array, head: Array, *of_token: Any) -> tuple[Array, Array]:
            return scored(hidden, sharding.gathered(head, slices, mesh), *of_token)

        specs = (states, slices, tokens, states)
        run = jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=(tokens, tokens), check_vma=False)
    return run(hidden, head, targets.astype(jnp.int32), kept)


def _logits(hidden: Array, head: Array, kept: Array | None, temperature: float) -> Array:
    logits = jnp.matmul(hidden, head, preferred_element_type=jnp.float32) / temperature
    if kept is None:
        return logits
    # A negative index would count from the end.
    places = jnp.arange(len(kept))[:, None], jnp.where(kept < 0, logits.shape[1], kept)
    inside = jnp.broadcast_to(jnp.all(kept < 0, axis=1, keepdims=True), logits.shape)
    return jnp.where(inside.at[places].set(True, mode="drop"), logits, OUT)


def in_chunks(x: Array, chunk: int) -> Array:
    """[n ...] -> [steps, size, ...], padded with zeros. Strided, so that rows sharded over devices stay there."""
    steps = -(-x.shape[0] // chunk)
    size = -(-x.shape[0] // steps)
    padded = jnp.pad(x, [(0, steps * size - x.shape[0])] + [(0, 0)] * (x.ndim - 1))
    return padded.reshape(size, steps, *x.shape[1:]).swapaxes(0, 1)


def from_chunks(x: Array, n: int) -> Array:
    """The inverse of `in_chunks`."""
    return x.swapaxes(0, 1).reshape(-1, *x.shape[2:])[:n]


def _chunk_forward(hidden, head, targets, kept, temperature):
    logits = _logits(hidden, head, kept, temperature)
    return log_softmax(logits, jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0])


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _selected(hidden, head, targets, kept, temperature, platform, exact):
    return _forward(hidden, head, targets, kept, temperature, platform, exact, keep=False)[0]


def _forward(hidden, head, targets, kept, temperature, platform, exact, keep):
    if exact:
        logprob, entropy, log_partition = _KERNELS["exact_scores"](exact, hidden, head, targets, kept, temperature)
        probs = None
    elif hidden.shape[0] * head.shape[1] <= _ONE_CHUNK:
        logprob, entropy, log_partition, probs = _chunk_forward(hidden, head, targets, kept, temperature)
    else:
        keep = keep and kept_probabilities(hidden.shape[0], head.shape[1], platform) > 0

        def one(tokens):
            hidden, targets, kept = tokens
            return _chunk_forward(hidden, head, targets, kept, temperature)[: 4 if keep else 3]

        cut = functools.partial(in_chunks, chunk=score_chunk(platform))
        parts: Any = lax.map(one, jax.tree.map(cut, (hidden, targets, kept)))
        logprob, entropy, log_partition = (from_chunks(p, targets.size) for p in parts[:3])
        probs = parts[3] if keep else None
    return (logprob, entropy), (hidden, head, targets, kept, log_partition, entropy, probs)


def _selected_fwd(hidden, head, targets, kept, temperature, platform, exact):
    kept = None if kept is None else kept.value
    return _forward(hidden.value, head.value, targets.value, kept, temperature, platform, exact, keep=True)


def _chunk_backward(
    head, probs, temperature, platform, hidden, targets, kept, log_partition, entropy, d_logprob, d_entropy
):
    """d logits = d_logprob (1[target] - p) - d_entropy p (log p + H)."""
    if probs is None or d_entropy is not None:
        log_probs = _logits(hidden, head, kept, temperature) - log_partition[:, None]
        probs = jnp.exp(log_probs)
    is_target = lax.broadcasted_iota(jnp.int32, probs.shape, 1) == targets[:, None]
    d_logits = d_logprob[:, None] * (is_target.astype(jnp.float32) - probs)
    if d_entropy is not None:
        d_logits -= d_entropy[:, None] * probs * (log_probs + entropy[:, None])
    d_logits = (d_logits / temperature).astype(hidden.dtype)
    d_hidden = jnp.matmul(d_logits, head.T, preferred_element_type=jnp.float32).astype(hidden.dtype)
    columns = hidden.T
    if platform == "cpu":  # as a copy: XLA:CPU sums over the rows of both factors at a third of its speed
        columns = lax.optimization_barrier(columns)
    return d_hidden, jnp.matmul(columns, d_logits, preferred_element_type=jnp.float32)


def _selected_bwd(temperature, platform, exact, residuals, cotangents):
    del exact  # a gradient need not be
    hidden, head, targets, kept, log_partition, entropy, probs = residuals
    d_logprob, d_entropy = (None if isinstance(c, SymbolicZero) else c for c in cotangents)
    d_logprob = jnp.zeros_like(log_partition) if d_logprob is None else d_logprob
    per_token = (hidden, targets, kept, log_partition, entropy, d_logprob, d_entropy)
    if probs is not None and probs.ndim == 2:
        d_hidden, d_head = _chunk_backward(head, probs, temperature, platform, *per_token)
        return d_hidden, d_head.astype(head.dtype), None, None
    chunks = jax.tree.map(functools.partial(in_chunks, chunk=score_chunk(platform)), per_token)

    def step(d_head, of_chunk):
        probs, tokens = of_chunk
        d_hidden, change = _chunk_backward(head, probs, temperature, platform, *tokens)
        return d_head + change, d_hidden

    d_head, d_hidden = lax.scan(step, jnp.zeros(head.shape, jnp.float32), (probs, chunks))
    return from_chunks(d_hidden, targets.size), d_head.astype(head.dtype), None, None


_selected.defvjp(_selected_fwd, _selected_bwd, symbolic_zeros=True)
