"""Is the grouped matmul of this accelerator right, and how fast: against every row times every matrix, masked.

`accelerator.py` runs it before it measures a mixture of experts; python -m experiments.performance.grouped, by itself.
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
from jaxrl_llm.models.experts.grouped_matmul import grouped_matmul

__all__ = ["SIZES", "check", "times"]

SIZES = (32768, 128, 2048, 768)  # rows, groups, d, f: 4096 tokens with 8 of Qwen3-30B-A3B's 128 experts each
# Of the largest value. Operands are exact in bfloat16 and sums float32, but results and gradients are rounded to
# bfloat16; float32 operands may be rounded to TF32 (2^-11).
_BOUNDS = {"bfloat16": (1e-2, 1e-2, 1e-2), "float32": (5e-3, 5e-3, 5e-3)}


def check(sizes: tuple[int, int, int, int] = SIZES, repeats: int = 5) -> dict[str, dict[str, Any]]:
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
            if not error <= bound:
                raise RuntimeError(
                    f"the grouped matmul is wrong on {platform} in {dtype}: its {name} is off by {error:.2g} of the "
                    "largest value; please report it, and train with model.experts_implementation=dense until then"
                )
        flops = 2.0 * counts.sum() * d * f
        calls = (lambda a=args: run(*a), lambda a=args, c=cotangent: both(*a, c))
        seconds = [times(call, repeats)[0] for call in calls]
        found[dtype] = {"errors": errors, "forward": flops / seconds[0], "forward_and_backward": 3 * flops / seconds[1]}
    return found


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
    print(json.dumps(check(), indent=1))
