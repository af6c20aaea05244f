"""Metrics that merge exactly over micro-batches, minibatches and devices.

A metric is one of four small pytrees: `Mean` (total, count), `Maximum`, `Moments` (count, sum x, sum x^2) and
`Histogram` (counts in fixed log-spaced bins, from which quantiles are read). All are sums except the maximum, so that
any split of a batch gives the same number. Nothing is divided before `finalize`, which runs on the host.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.array_typing import Array, Bool, Float

__all__ = ["Histogram", "Maximum", "Mean", "Metric", "Metrics", "Moments", "combine", "finalize", "identity", "merge", "merge_stacked"]

# Ratios live between e^-20 and e^20; 64 bins a decade near 1 would be too many, so the bins are uniform in asinh space:
# fine (1e-5) around log-ratio 0 and logarithmic in the tails.
_EDGES = np.sinh(np.linspace(-np.arcsinh(20.0 / 1e-4), np.arcsinh(20.0 / 1e-4), 257)) * 1e-4


class Mean(flax.struct.PyTreeNode):
    """total / count."""

    total: Float[Array, "*any"]
    count: Float[Array, "*any"]

    @classmethod
    def of(cls, x: Array, where: Bool[Array, "*any"]) -> "Mean":
        return cls(jnp.sum(x, where=where, initial=0, dtype=jnp.float32), jnp.sum(where, dtype=jnp.float32))

    def values(self) -> dict[str, Any]:
        return {"": np.where(self.count > 0, self.total / np.maximum(self.count, 1), np.nan)}


class Maximum(flax.struct.PyTreeNode):
    """The largest element, -inf of none."""

    value: Float[Array, "*any"]

    @classmethod
    def of(cls, x: Array, where: Bool[Array, "*any"]) -> "Maximum":
        return cls(jnp.max(x, where=where, initial=-jnp.inf))

    def values(self) -> dict[str, Any]:
        return {"": np.where(np.isfinite(self.value), self.value, np.nan)}


class Moments(flax.struct.PyTreeNode):
    """Mean, variance and effective sample size of weights w = 1 + x from the sums of 1, x and x^2.

    Storing the deviation from one keeps float32 exact where it matters: a ratio of 1 + 1e-5 has variance 1e-10.
    """

    count: Float[Array, "*any"]
    total: Float[Array, "*any"]
    square: Float[Array, "*any"]

    @classmethod
    def of(cls, deviation: Array, where: Bool[Array, "*any"]) -> "Moments":
        x = jnp.where(where, deviation, 0).astype(jnp.float32)
        return cls(jnp.sum(where, dtype=jnp.float32), jnp.sum(x), jnp.sum(x * x))

    def values(self) -> dict[str, Any]:
        n = np.maximum(np.asarray(self.count, np.float64), 1)
        mean, square = np.asarray(self.total, np.float64) / n, np.asarray(self.square, np.float64) / n
        first, second = 1 + mean, 1 + 2 * mean + square
        ess = np.where(self.count > 0, first**2 / np.maximum(second, 1e-300), np.nan)
        return {"_mean": first, "_var": np.maximum(square - mean**2, 0), "_ess": ess}


class Histogram(flax.struct.PyTreeNode):
    """Counts of log-ratios in 256 fixed bins; quantiles are read at bin centres and returned as ratios."""

    counts: Float[Array, "bins"]

    @classmethod
    def of(cls, log_ratio: Array, where: Bool[Array, "*any"]) -> "Histogram":
        bins = jnp.searchsorted(jnp.asarray(_EDGES[1:-1], jnp.float32), log_ratio.astype(jnp.float32).ravel())
        weights = where.ravel().astype(jnp.float32)
        return cls(jnp.zeros(len(_EDGES) - 1, jnp.float32).at[bins].add(weights))

    def quantile(self, q: float) -> float:
        counts = np.asarray(self.counts, np.float64)
        if counts.sum() == 0:
            return float("nan")
        i = int(np.searchsorted(np.cumsum(counts), q * counts.sum()))
        i = min(i, len(counts) - 1)
        return float(np.exp((_EDGES[i] + _EDGES[i + 1]) / 2))

    def values(self) -> dict[str, Any]:
        return {"_p50": self.quantile(0.50), "_p99": self.quantile(0.99)}


Metric = Mean | Maximum | Moments | Histogram
Metrics = Mapping[str, Metric]


def _combine(metric: Metric, reduce_sum: Any, reduce_max: Any) -> Metric:
    return jax.tree.map(reduce_max if isinstance(metric, Maximum) else reduce_sum, metric)


def merge_stacked(metrics: Metrics) -> dict[str, Metric]:
    """Merge metrics that carry a leading axis (the micro-batches of a scan)."""
    return {name: _combine(m, lambda x: jnp.sum(x, 0), lambda x: jnp.max(x, 0)) for name, m in metrics.items()}


def combine(a: Metrics, b: Metrics) -> dict[str, Metric]:
    """Merge two sets of the same metrics inside a jitted loop."""
    return merge_stacked({name: jax.tree.map(lambda x, y: jnp.stack([x, y]), m, b[name]) for name, m in a.items()})


def identity(shapes: Metrics) -> dict[str, Metric]:
    """The neutral element of `combine` for metrics of these shapes (arrays or jax.ShapeDtypeStruct)."""
    neutral = lambda fill: lambda x: jnp.full(x.shape, fill, x.dtype)  # noqa: E731
    return {name: _combine(m, neutral(0), neutral(-jnp.inf)) for name, m in shapes.items()}


def merge(many: Sequence[Metrics]) -> dict[str, Metric]:
    """Merge metrics of several minibatches; a key may be missing in some of them."""
    names = dict.fromkeys(name for metrics in many for name in metrics)
    stacked = {
        name: jax.tree.map(lambda *xs: np.stack([np.asarray(x) for x in xs]), *[m[name] for m in many if name in m])
        for name in names
    }
    return {name: _combine(m, lambda x: np.sum(x, 0), lambda x: np.max(x, 0)) for name, m in stacked.items()}


def finalize(metrics: Metrics) -> dict[str, float | list[float]]:
    """Host numbers: a `Mean` named `a` gives `a`; `Moments` named `ratio/token` give `ratio/token_mean`, `_var`, `_ess`."""
    out: dict[str, float | list[float]] = {}
    for name, metric in jax.device_get(dict(metrics)).items():
        for suffix, value in metric.values().items():
            out[name + suffix] = np.asarray(value, np.float64).tolist()
    return out
