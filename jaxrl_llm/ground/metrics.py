"""Metrics that merge exactly over micro-batches, minibatches and devices.

A metric is a small pytree of sums (of one maximum in `Maximum`), so that any split of a batch gives the same number.
Nothing is divided before `finalize`, which runs on the host. The fields are untyped because trees of metrics also carry
host arrays, abstract shapes and shardings.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.ground.array_typing import Array, Bool

# Log-ratios live in [-20, 20]; the bins are uniform in asinh space: 1e-5 wide around 0, 10 % of the value in the tails.
_EDGES = np.sinh(np.linspace(-np.arcsinh(20.0 / 1e-4), np.arcsinh(20.0 / 1e-4), 257)) * 1e-4


class Metric(flax.struct.PyTreeNode):
    """Base of the metrics. On the host one converts to a number and prints as one: `float(metrics["clip/high"])`."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(repr=False, **kwargs)  # each inherits the repr below

    def values(self) -> dict[str, Any]:
        """{suffix of the key: number, or numbers of an array}, NaN of nothing."""
        raise NotImplementedError

    def __float__(self) -> float:
        """The first of `values`: of `Moments` the mean."""
        return float(next(iter(self.values().values())))

    def __repr__(self) -> str:
        try:
            shown = {name: np.array2string(np.asarray(x), precision=6) for name, x in self.values().items()}
        except (TypeError, RuntimeError):  # tracers, shapes, shardings, and arrays that are gone
            return f"{type(self).__name__}({', '.join(f'{name}={x!r}' for name, x in vars(self).items())})"
        return ", ".join(f"{name.removeprefix('_')} {text}".lstrip() for name, text in shown.items())


class Mean(Metric):
    """total / count."""

    total: Any
    count: Any

    @classmethod
    def of(cls, x: Array, where: Bool[Array, "*any"]) -> "Mean":
        return cls(jnp.sum(x, where=where, initial=0, dtype=jnp.float32), jnp.sum(where, dtype=jnp.float32))

    def values(self) -> dict[str, Any]:
        return {"": np.where(self.count > 0, self.total / np.maximum(self.count, 1), np.nan)}


class Maximum(Metric):
    """The largest element, -inf of none."""

    value: Any

    @classmethod
    def of(cls, x: Array, where: Bool[Array, "*any"]) -> "Maximum":
        return cls(jnp.max(x, where=where, initial=-jnp.inf))

    def values(self) -> dict[str, Any]:
        return {"": np.where(np.isfinite(self.value), self.value, np.nan)}


class Moments(Metric):
    """Mean and variance of w = 1 + x from the sums of 1, x and x^2.

    Storing the deviation from one keeps float32 exact where it matters: a ratio of 1 + 1e-5 has variance 1e-10.
    """

    count: Any
    total: Any
    square: Any

    @classmethod
    def of(cls, deviation: Array, where: Bool[Array, "*any"]) -> "Moments":
        x = jnp.where(where, deviation, 0).astype(jnp.float32)
        return cls(jnp.sum(where, dtype=jnp.float32), jnp.sum(x), jnp.sum(x * x))

    def values(self) -> dict[str, Any]:
        n = np.maximum(np.asarray(self.count, np.float64), 1)
        mean, square = np.asarray(self.total, np.float64) / n, np.asarray(self.square, np.float64) / n
        known = self.count > 0
        return {
            "_mean": np.where(known, 1 + mean, np.nan),
            "_var": np.where(known, np.maximum(square - mean**2, 0), np.nan),
        }


class EffectiveSize(Moments):
    """(sum w)^2 / (n sum w^2) of weights w = 1 + x: the effective fraction of the samples, 1 for equal weights."""

    def values(self) -> dict[str, Any]:
        n = np.asarray(self.count, np.float64)
        total, square = np.asarray(self.total, np.float64), np.asarray(self.square, np.float64)
        size = (n + total) ** 2 / np.maximum(n * (n + 2 * total + square), 1e-300)
        return {"": np.where(n > 0, size, np.nan)}


class ExplainedVariance(Metric):
    """1 - Var(target - prediction) / Var(target): 1 of a perfect prediction, 0 of a constant; NaN of equal targets."""

    target: Any
    error: Any

    @classmethod
    def of(cls, target: Array, prediction: Array, where: Bool[Array, "*any"]) -> "ExplainedVariance":
        return cls(Moments.of(target, where), Moments.of(target - prediction, where))

    def values(self) -> dict[str, Any]:
        target, error = self.target.values()["_var"], self.error.values()["_var"]
        return {"": np.where(target > 0, 1 - error / np.where(target > 0, target, 1), np.nan)}


class Histogram(Metric):
    """Counts of log-ratios in 256 fixed bins; the 99th percentile, at a bin's centre, is reported as a ratio."""

    counts: Any

    @classmethod
    def of(cls, log_ratio: Array, where: Bool[Array, "*any"]) -> "Histogram":
        bins = jnp.searchsorted(jnp.asarray(_EDGES[1:-1], jnp.float32), log_ratio.astype(jnp.float32).ravel())
        weights = where.ravel().astype(jnp.float32)
        return cls(jnp.zeros(len(_EDGES) - 1, jnp.float32).at[bins].add(weights))

    def values(self) -> dict[str, Any]:
        counts = np.asarray(self.counts, np.float64)
        if counts.sum() == 0:
            return {"": np.nan}
        i = min(int(np.searchsorted(np.cumsum(counts), 0.99 * counts.sum())), len(counts) - 1)
        return {"": np.exp((_EDGES[i] + _EDGES[i + 1]) / 2)}


Metrics = Mapping[str, Metric]


def _combine(metric: Metric, reduce_sum: Any, reduce_max: Any) -> Metric:
    return jax.tree.map(reduce_max if isinstance(metric, Maximum) else reduce_sum, metric)


def combine(a: Metrics, b: Metrics) -> dict[str, Metric]:
    """Merge two sets of the same metrics inside a jitted loop."""
    return _merged((a, b), jnp)


def identity(shapes: Metrics) -> dict[str, Metric]:
    """The neutral element of `combine` for metrics of these shapes (arrays or jax.ShapeDtypeStruct)."""
    lowest = functools.partial(jnp.full_like, fill_value=-jnp.inf)
    return {name: _combine(m, jnp.zeros_like, lowest) for name, m in shapes.items()}


def merge(many: Sequence[Metrics]) -> dict[str, Metric]:
    """Merge metrics of several minibatches; a key may be missing in some of them."""
    return _merged(many, np)


def _merged(many: Sequence[Metrics], numpy: Any) -> dict[str, Metric]:
    names = dict.fromkeys(name for metrics in many for name in metrics)
    stacked = {name: jax.tree.map(lambda *xs: numpy.stack(xs), *[m[name] for m in many if name in m]) for name in names}
    return {name: _combine(m, lambda x: numpy.sum(x, 0), lambda x: numpy.max(x, 0)) for name, m in stacked.items()}


def finalize(metrics: Metrics) -> dict[str, float | list[float]]:
    """Host numbers: a metric named `a` gives `a`, but `Moments` named `a` give `a_mean` and `a_var`."""
    out: dict[str, float | list[float]] = {}
    for name, metric in jax.device_get(dict(metrics)).items():
        for suffix, value in metric.values().items():
            out[name + suffix] = np.asarray(value, np.float64).tolist()
    return out
