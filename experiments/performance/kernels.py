"""Are the kernels of this accelerator right, and how fast: each against plain float32 products at highest precision.

    python -m experiments.performance.kernels

`grouped`    the experts' products against every row times every matrix, masked
`attention`  flash attention of packed rows, and the decode over caches as far as they are filled, against softmax
             written out; where this platform has no kernel of its own, there is nothing to check

`accelerator.py` runs those that a model takes before it measures it.
"""

import functools
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxrl_llm.ground import sharding
from jaxrl_llm.models import ModelConfig, Rows, choose_attention
from jaxrl_llm.models.attention import attend, flash, flash_decode, kv_cache
from jaxrl_llm.models.experts.grouped_matmul import grouped_matmul

__all__ = ["ATTENTION", "MANY", "SIZES", "SMALL", "attention", "grouped", "times"]

SIZES = (32768, 128, 2048, 768)  # rows, groups, d, f: 4096 tokens with 8 of Qwen3-30B-A3B's 128 experts each
MANY = (24576, 8, 2048, 768)  # so many rows a group that Hopper GPUs take another kernel, where it is installed
SMALL = (512, 8, 64, 48)
ATTENTION = (4, 2048, 16, 8, 128)  # rows, tokens, heads, key heads and their size: attention of Qwen3-0.6B
_ROUNDING = 5e-2  # of the largest value: weights of the softmax, results and gradients are rounded to bfloat16
# Of the largest value. Operands are exact in bfloat16 and sums float32, but results and gradients are rounded to
# bfloat16; float32 operands may be rounded to TF32 (2^-11).
_BOUNDS = {"bfloat16": (1e-2, 1e-2, 1e-2), "float32": (5e-3, 5e-3, 5e-3)}


def grouped(sizes: tuple[int, int, int, int] = SIZES, repeats: int = 5) -> dict[str, dict[str, Any]]:
    """By dtype: errors of the result and of both gradients, and FLOP/s of the forward and of forward and backward.

    Loads are as uneven as a router's: exponential shares, every eighth group empty, the last rows of no group.

    Raises:
      RuntimeError: an error beyond what rounding explains.
    """
    platform = sharding.platform(None)
    m, groups, d, f = sizes
    rng = np.random.default_rng(0)
    shares = rng.exponential(size=groups) * (np.arange(groups) % 8 != 3)
    counts = np.floor(0.95 * m * shares / shares.sum()).astype(np.int32)
    used = jnp.arange(m)[:, None] < counts.sum()  # what rows of no group give means nothing
    run = jax.jit(functools.partial(grouped_matmul, platform=platform))

    @jax.jit
    def both(rows: Any, weights: Any, counts: Any, cotangent: Any) -> Any:
        out, pull = jax.vjp(lambda rows, weights: run(rows, weights, counts), rows, weights)
        d_rows, d_weights = pull(cotangent)
        return jnp.where(used, out, 0), jnp.where(used, d_rows, 0), d_weights

    found = {}
    for dtype, bounds in _BOUNDS.items():
        rows, weights, cotangent = (
            jnp.asarray(rng.standard_normal(s, np.float32), dtype) for s in ((m, d), (groups, d, f), (m, f))
        )
        args = rows, weights, jnp.asarray(counts)
        errors = [float(e) for e in jax.jit(_errors)(both(*args, cotangent), _reference(*args, cotangent))]
        for name, error, bound in zip(
            ("result", "gradient of rows", "gradient of matrices"), errors, bounds, strict=True
        ):
            _hold(f"grouped matmul in {dtype}", name, error, bound, "model.experts_implementation=dense")
        flops = 2.0 * counts.sum() * d * f
        calls = (lambda a=args: run(*a), lambda a=args, c=cotangent: both(*a, c))
        seconds = [times(call, repeats)[0] for call in calls]
        found[dtype] = {"errors": errors, "forward": flops / seconds[0], "forward_and_backward": 3 * flops / seconds[1]}
    return found


def attention(sizes: tuple[int, int, int, int, int] = ATTENTION, repeats: int = 5) -> dict[str, dict[str, Any]]:
    """By kernel its largest error and best seconds: `flash`, its gradients too, on rows of two segments and padding,
    `flash_padded` on rows of one segment and padding; `decode`, one token a row over caches of every fill, with bytes a
    second of what is filled.

    Empty where this platform has no kernel for bfloat16.

    Raises:
      RuntimeError: an error beyond what rounding explains.
    """
    b, t, h, kv, d = sizes
    platform = sharding.platform(None)
    config = ModelConfig(
        vocab_size=8, num_attention_heads=h, num_key_value_heads=kv, head_dim=d, num_experts=0, dtype="bfloat16"
    )
    rng, found = np.random.default_rng(0), {}
    shapes = (b, t, h, d), (b, kv, t, d), (b, kv, t, d), (b, t, h, d)
    *arrays, cotangent = (jnp.asarray(rng.standard_normal(s, np.float32), jnp.bfloat16) for s in shapes)
    if choose_attention(config, platform) == "flash":
        found["flash"] = _flash(arrays, cotangent, repeats, "packed")
        found["flash_padded"] = _flash(arrays, cotangent, repeats, "padded")
    if kv_cache.layout_of(config, platform) == kv_cache.FILLED:
        found["decode"] = _decode(arrays, repeats)
    return found


def _flash(arrays: Sequence[Any], cotangent: Any, repeats: int, rows: Rows) -> dict[str, Any]:
    b, t, h, d = arrays[0].shape
    ids = {"packed": [1, 2, 0], "padded": [1, 1, 0]}[rows]
    segments = jnp.asarray(np.repeat(ids, [t // 2, t - t // 2 - t // 8, t // 8])[None].repeat(b, 0))
    used = (segments != 0)[:, :, None, None]
    inside = (segments[:, :, None] == segments[:, None]) & jnp.tri(t, dtype=bool)[None]
    cotangent = jnp.where(used, cotangent, 0)

    def with_gradients(attend: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arrays: Any) -> Any:
            out, pull = jax.vjp(lambda q, k, v: jnp.where(used, attend(q, k, v), 0), *arrays)
            return out, *pull(cotangent.astype(out.dtype))

        return jax.jit(run)

    kernel = with_gradients(lambda q, k, v: flash.flash_attention(q, k, v, segments, rows=rows))
    errors = _errors_of(kernel, with_gradients(lambda q, k, v: attend.attend(q, k, v, inside)), arrays)
    parts = "result", "gradient of queries", "gradient of keys", "gradient of values"
    for part, error in zip(parts, errors, strict=True):
        _hold(f"flash attention of {rows} rows", part, error, _ROUNDING, "model.attention_implementation=plain")
    seconds, _ = times(lambda: kernel(*arrays), repeats)
    pairs = b * h * t * (t + 1) / 2  # of the kernel, which does not leave out other segments
    return {"errors": errors, "seconds": seconds, "flops_per_s": 7 * 2 * d * pairs / seconds}


def _decode(arrays: Sequence[Any], repeats: int) -> dict[str, Any]:
    b, t, _, d = arrays[0].shape
    columns = t - t % kv_cache.FILLED.multiple
    filled = jnp.asarray(np.linspace(1, columns, b, dtype=np.int32))
    visible = jnp.arange(columns)[None, None] < filled[:, None, None]
    q, k, v = arrays[0][:, :1], *(x[:, :, :columns] for x in arrays[1:])
    kernel = jax.jit(lambda q, k, v: flash_decode.attend_filled(q, (k,), (v,), visible, filled))
    errors = _errors_of(kernel, jax.jit(lambda q, k, v: attend.attend(q, k, v, visible)), (q, k, v))
    _hold("decode over a cache", "result", errors[0], _ROUNDING, "model.attention_implementation=plain")
    seconds, _ = times(lambda: kernel(q, k, v), repeats)
    read = 2 * 2 * k.shape[1] * d * float(filled.sum())
    return {"errors": errors, "seconds": seconds, "bytes_per_s": read / seconds}


def _errors_of(kernel: Callable[..., Any], plain: Callable[..., Any], arrays: Sequence[Any]) -> list[float]:
    """Return each result's largest error against `plain` in float32, over the largest value."""
    with jax.default_matmul_precision("highest"):
        wanted = plain(*(x.astype(jnp.float32) for x in arrays))
    found = jax.tree.leaves(kernel(*arrays))
    return [float(e) for e in jax.jit(_errors)(found, jax.tree.leaves(wanted))]


def _hold(kernel: str, part: str, error: float, bound: float, instead: str) -> None:
    if not error <= bound:
        raise RuntimeError(
            f"the {kernel} is wrong on {sharding.platform(None)}: its {part} is off by {error:.2g} of the largest "
            f"value; please report it, and train with {instead} until then"
        )


@jax.jit
def _reference(rows: Any, weights: Any, counts: Any, cotangent: Any) -> Any:
    stops = jnp.cumsum(counts)
    row = jnp.arange(len(rows))[:, None]
    dot = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)

    def one(totals: Any, group: Any) -> Any:
        w, start, stop = group
        mine = (row >= start) & (row < stop)
        x, dy = jnp.where(mine, rows, 0), jnp.where(mine, cotangent, 0)
        return (totals[0] + dot(x, w), totals[1] + dot(dy, w.T)), dot(x.T, dy)

    zeros = jnp.zeros(cotangent.shape, jnp.float32), jnp.zeros(rows.shape, jnp.float32)
    (out, d_rows), d_weights = lax.scan(one, zeros, (weights, stops - counts, stops))
    return out, d_rows, d_weights


def _errors(found: Any, wanted: Any) -> Any:
    return [jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b)) for a, b in zip(found, wanted, strict=True)]


def times(run: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """(best seconds after the first run, what the first took more)."""
    seconds = []
    for _ in range(1 + repeats):
        start = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:]), seconds[0] - min(seconds[1:])


if __name__ == "__main__":
    on_cpu = sharding.platform(None) == "cpu"  # whose grouped matmul is dense over groups
    products = {f"grouped, {sizes[0]} rows": grouped(sizes) for sizes in ((SMALL,) if on_cpu else (SIZES, MANY))}
    print(json.dumps(products | attention(), indent=1))
