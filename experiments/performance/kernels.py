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
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxrl_llm.ground import sharding
from jaxrl_llm.models import ModelConfig, choose_attention
from jaxrl_llm.models.attention import attend, flash, flash_decode, kv_cache
from jaxrl_llm.models.experts.grouped_matmul import grouped_matmul

__all__ = ["ATTENTION", "SIZES", "attention", "grouped", "times"]

SIZES = (32768, 128, 2048, 768)  # rows, groups, d, f: 4096 tokens with 8 of Qwen3-30B-A3B's 128 experts each
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
    """By kernel its largest error and best seconds: `flash`, its gradients too, on rows of two segments and padding;
    `decode`, one token a row over caches of every fill, with bytes a second of what is filled.

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

    def normal(*shape: int) -> Any:
        return jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16)

    q, k, v, cotangent = normal(b, t, h, d), normal(b, kv, t, d), normal(b, kv, t, d), normal(b, t, h, d)
    if choose_attention(config, platform) == "flash":
        segments = jnp.asarray(np.repeat([1, 2, 0], [t // 2, t - t // 2 - t // 8, t // 8])[None].repeat(b, 0))
        used = (segments != 0)[:, :, None, None]
        inside = (segments[:, :, None] == segments[:, None]) & jnp.tri(t, dtype=bool)[None]
        cotangent = jnp.where(used, cotangent, 0)

        @jax.jit
        def kernel(q: Any, k: Any, v: Any) -> Any:
            out, pull = jax.vjp(lambda *x: flash.flash_attention(*x, segments), q, k, v)
            return jnp.where(used, out, 0), *pull(cotangent)

        @jax.jit
        def plain(q: Any, k: Any, v: Any) -> Any:
            out, pull = jax.vjp(lambda *x: jnp.where(used, attend.attend(*x, inside), 0), *_exact(q, k, v))
            return out, *pull(cotangent.astype(jnp.float32))

        errors = _compare(kernel, plain, q, k, v)
        parts = "result", "gradient of queries", "gradient of keys", "gradient of values"
        for name, error in zip(parts, errors, strict=True):
            _hold("flash attention", name, error, _ROUNDING, "model.attention_implementation=plain")
        pairs = b * h * t * (t + 1) / 2  # of the kernel, which does not leave out other segments
        seconds, _ = times(lambda: kernel(q, k, v), repeats)
        found["flash"] = {"errors": errors, "seconds": seconds, "flops_per_s": 7 * 2 * d * pairs / seconds}
    if kv_cache.layout_of(config, platform) == kv_cache.FILLED:
        columns = t - t % kv_cache.FILLED.multiple
        filled, one = jnp.asarray(np.linspace(1, columns, b, dtype=np.int32)), q[:, :1]
        visible = jnp.arange(columns)[None, None] < filled[:, None, None]
        k, v = k[:, :, :columns], v[:, :, :columns]

        @jax.jit
        def decode(q: Any, k: Any, v: Any) -> Any:
            return (flash_decode.attend_filled(q, (k,), (v,), visible, filled),)

        @jax.jit
        def whole(q: Any, k: Any, v: Any) -> Any:
            return (attend.attend(*_exact(q, k, v), visible),)

        errors = _compare(decode, whole, one, k, v)
        _hold("decode over a cache", "result", errors[0], _ROUNDING, "model.attention_implementation=plain")
        seconds, _ = times(lambda: decode(one, k, v), repeats)
        read = 2 * 2 * kv * d * float(filled.sum())
        found["decode"] = {"errors": errors, "seconds": seconds, "bytes_per_s": read / seconds}
    return found


def _exact(*arrays: Any) -> list[Any]:
    return [x.astype(jnp.float32) for x in arrays]


def _compare(kernel: Callable[..., Any], plain: Callable[..., Any], *args: Any) -> list[float]:
    with jax.default_matmul_precision("highest"):
        wanted = plain(*args)
    return [float(e) for e in jax.jit(_errors)(kernel(*args), wanted)]


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
    print(json.dumps({"grouped": grouped(), **attention()}, indent=1))
