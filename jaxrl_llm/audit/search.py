"""Which objectives and conventions reproduce a loss and its gradient: each family, divisor and KL in turn."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.audit import divisors as d
from jaxrl_llm.audit.capture import Capture, Fault
from jaxrl_llm.audit.clip_range import NEVER, ClipRange, as_arguments
from jaxrl_llm.audit.families import (
    CLIP_RANGES,
    DUAL_CLIPS,
    KL_COEFFICIENTS,
    LENGTHS,
    TRIALS,
    Family,
    Settings,
    families,
)
from jaxrl_llm.audit.recomputed import ESTIMATORS, SOUND, Column, Inputs, kl, log_ratio, policy
from jaxrl_llm.objectives.surrogates import Cispo

GRADIENT_TOLERANCE = 2e-5  # of the largest entry, and of the norm
LOSS_TOLERANCE = 2e-6  # of the sum of the terms' sizes


@dataclasses.dataclass(frozen=True)
class Fit:
    """An objective with settings, and how far its loss and gradient are from the reported ones.

    loss_difference: reported minus replayed. gradient_difference: norm of the difference over the reported norm.
    open: settings that this batch leaves open, and the values that would do as well.
    faults: names and evidence, if the objective is reproduced by a mistake.
    """

    objective: str
    settings: Settings
    loss_difference: float
    gradient_difference: float | None
    open: dict[str, str] = dataclasses.field(default_factory=dict)
    faults: tuple[Fault, ...] = ()
    reproduces: bool = True


class Explained(NamedTuple):
    """How a policy term and a KL add up to a gradient: the KL's coefficient, and the tokens whose policy term stays."""

    kl_coef: float
    kept: np.ndarray
    difference: float


def explain(target: np.ndarray, of_policy: np.ndarray, of_kl: np.ndarray, cuts: bool) -> Explained | None:
    """Split `target` by token into `of_policy`, or nothing of it if `cuts`, and a multiple of `of_kl`."""
    size = np.abs(target).max() or np.abs(of_policy).max()
    largest, best = np.abs(of_kl).max(), 0.0

    def misses(coefficient: float) -> tuple[np.ndarray, np.ndarray]:
        rest = target - coefficient * of_kl
        return np.abs(rest - of_policy), np.abs(rest) if cuts else np.full(rest.shape, np.inf)

    def unexplained(coefficient: float) -> int:
        return int((np.minimum(*misses(coefficient)) > 1e-3 * size).sum())

    if largest > 1e-9 * size:
        telling = np.flatnonzero(np.abs(of_kl) > 0.05 * largest)
        at = np.unravel_index(telling[:: max(len(telling) // 40, 1)], target.shape)
        with_policy, without = (target[at] - of_policy[at]) / of_kl[at], target[at] / of_kl[at]
        best = float(min([*with_policy, *without] if cuts else with_policy, key=unexplained))
        for _ in range(2):
            kept = np.less_equal(*misses(best))
            best = float(np.sum(of_kl * (target - kept * of_policy)) / np.sum(of_kl**2))
    error = np.minimum(*misses(best))
    if error.max() > GRADIENT_TOLERANCE * size:
        return None
    return Explained(best, np.less_equal(*misses(best)), float(np.linalg.norm(error) / (np.linalg.norm(target) or 1)))


def shown_divisor(target: np.ndarray, of_policy: np.ndarray, of_kl: np.ndarray) -> float:
    """The divisor under which most tokens agree on one share of the KL; 0 if there is none.

    All arrays hold tokens, [n]. Without a KL each token tells a divisor, with one each pair of neighbours.
    """
    x, k, y, size = of_policy, of_kl, target, np.abs(target).max()
    i = np.arange(min(len(y), 60))
    if k.any():
        i = i[:-1]
        determinant = x[i] * k[i + 1] - x[i + 1] * k[i]
        i = i[np.abs(determinant) > 1e-12]
        determinant = x[i] * k[i + 1] - x[i + 1] * k[i]
        a = (y[i] * k[i + 1] - y[i + 1] * k[i]) / determinant
        b = (x[i] * y[i + 1] - x[i + 1] * y[i]) / determinant
    else:
        i = np.flatnonzero((np.abs(x) > 1e-9) & (np.abs(y) > 1e-3 * size))[:60]
        a, b = y[i] / x[i], 0 * x[i]
    if not len(i):
        return 0.0
    matters = a[:, None] * np.abs(x) > 1e-3 * size  # a cut token says nothing of the divisor
    agree = (matters & (np.abs(y - a[:, None] * x - b[:, None] * k) < 1e-4 * size)).sum(1)
    best = float(a[agree.argmax()])
    return 1 / best if best > 0 else 0.0


class Replay:
    """The replays of one set of inputs under every family, divisor and KL.

    settings: of the conventions that made these inputs. faults: what they are evidence of, if they are a mistake.
    only: the one surrogate that the convention goes with. bonus: what the reported loss has in it beside these terms.
    Inputs that are not the capture's own are tried under fewer settings.
    """

    def __init__(
        self,
        capture: Capture,
        inputs: Inputs,
        settings: Settings | None = None,
        *faults: Fault,
        only: type | None = None,
        bonus: float = 0.0,
    ):
        self.capture, self.inputs, self.settings, self.faults = capture, inputs, settings or {}, faults
        self.few = bool(settings or faults)
        for name in ("_weights", "_policy", "_kl"):  # of this replay alone, so that they end with it
            setattr(self, name, functools.cache(getattr(self, name)))
        self.target = np.where(inputs.mask, capture.get("reported_dlogprobs", 0.0), 0.0)
        self.reported = float(capture["reported_loss"]) - bonus
        self.families = [family for family in families(inputs) if only in (None, family.surrogate)]
        self.every = [(family, weights) for family in self.families for weights in (d.BY_SEQUENCE, d.BY_TOKEN)]

    def fits(self, mistaken: bool = False) -> Iterator[Fit]:
        """Every fit; `mistaken`: under divisors that are mistakes instead of the usual ones."""
        outside = np.abs(self.capture["reported_dlogprobs"][~self.inputs.mask])
        if not self.inputs.advantages.any() or outside.max(initial=0) > GRADIENT_TOLERANCE * np.abs(self.target).max():
            return
        for family, weights in self.every:
            for settings in self._trials(family, weights):
                of_policy = self._policy(family, tuple(settings.items())).pullback(self._weights(weights))
                for estimator in ("", *self._estimators(family)):
                    of_kl = self._kl_gradient(family, estimator, weights) if estimator else 0 * of_policy
                    for divisor in self._divisors(weights, of_policy, of_kl, mistaken):
                        found = explain(self.target * divisor.value, of_policy, of_kl, family.clips)
                        if found and (not estimator or abs(found.kl_coef) > 1e-6):
                            yield from self._named(family, settings, weights, estimator, divisor, found)

    def losses(self) -> Iterator[Fit]:
        """Every fit of the loss alone, under published ranges, coefficients and lengths."""
        for family, weights in self.every:
            row = self._weights(weights)
            known = self._known_divisors(weights)
            terms = [({}, 0.0)]
            for estimator in (name for name in self._estimators(family) if name in SOUND):
                of_kl = float(np.sum(row * self._kl(family, estimator).value))
                terms += [({"kl_coef": x, "kl_estimator": estimator}, x * of_kl) for x in KL_COEFFICIENTS]
            for settings in self._published(family):
                value = row * self._policy(family, tuple(as_arguments(settings).items())).value
                for divisor in known:
                    for said, of_kl in terms:
                        gap = self.reported - float(np.sum(value) + of_kl) / divisor.value
                        size = float(np.sum(np.abs(value)) + of_kl) / divisor.value
                        if abs(gap) <= LOSS_TOLERANCE * size + 1e-9:
                            name, more = family.named(divisor.aggregation)
                            yield Fit(name, settings | more | divisor.settings | self.settings | said, gap, None)

    def _published(self, family: Family) -> list[Settings]:
        if not family.clips:
            return list(TRIALS.get(family.surrogate, [{}]))
        return [{"clip_low": low, "clip_high": high, "dual_clip": dual}
                for dual in (None, DUAL_CLIPS[0]) for low, high in CLIP_RANGES]  # fmt: skip

    def _known_divisors(self, weights: str) -> list[d.Divisor]:
        out = [one for one in d.named(self.capture, self.inputs, weights) if one.fault is None]
        if weights == d.BY_TOKEN:
            answers = int(self.inputs.mask.any(1).sum()) * d.steps_of(self.capture)[0]
            lengths = [n for n in (self.inputs.mask.shape[1], *LENGTHS) if n >= self.inputs.mask.shape[1]]
            out += [d.Divisor(float(answers * n), "constant", {"max_length": n}) for n in dict.fromkeys(lengths)]
        return out

    def _estimators(self, family: Family) -> list[str]:
        """The estimators of the KL; those of an answer's ratio only where the policy term has one."""
        if self.inputs.ref is None:
            return []
        of_answers = family.objective().ratio.unit == "sequence"
        return [name for name in (SOUND if self.few else ESTIMATORS) if of_answers or "sequence" not in name]

    def _trials(self, family: Family, weights: str) -> list[Settings]:
        if family.clips:
            return [dict(NEVER)]
        trials = list(TRIALS.get(family.surrogate, [{}]))[: 1 if self.few else None]
        if family.surrogate is Cispo:
            trials += [{"cap": cap} for cap in self._caps(family, weights) if {"cap": cap} not in trials]
        return trials

    def _caps(self, family: Family, weights: str) -> list[float]:
        """Caps of the ratio that the gradient itself shows, for each usual divisor."""
        wide = self._policy(family, (("cap", 1e9),)).pullback(self._weights(weights))
        ratio = np.exp(log_ratio(family.objective(), self.inputs))
        telling = np.abs(wide) > 1e-9
        found = set()
        for divisor in self._divisors(weights, wide, 0 * wide, False):
            share = self.target[telling] * divisor.value / wide[telling]
            caps = (share * ratio[telling])[share < 1 - 1e-4]
            if len(caps) and (share > 0).all() and np.ptp(caps) < 1e-4 * caps.max():
                found.add(float(f"{np.median(caps):.4g}"))
        return sorted(found)

    def _divisors(self, weights: str, of_policy: np.ndarray, of_kl: np.ndarray, mistaken: bool) -> list[d.Divisor]:
        """The usual divisors and constant lengths, or those that are mistakes; what the gradient shows of itself."""
        usual, mask = d.named(self.capture, self.inputs, weights), self.inputs.mask
        seen = shown_divisor(self.target[mask], of_policy[mask], of_kl[mask])
        lengths = list(d.constant(self.capture, self.inputs, seen)) if weights == d.BY_TOKEN and seen else []
        if not mistaken:
            return usual + lengths
        wrong = list(d.mistaken(self.capture, self.inputs, weights))
        if seen and min(abs(seen / one.value - 1) for one in (*usual, *lengths, *wrong)) > 1e-4:
            times = f"{usual[0].value / seen:.6g} times the recipe's, which no divisor in the capture explains"
            wrong.append(d.Divisor(seen, weights, {}, ("loss_scaled", f"loss and gradient are {times}")))
        return wrong

    def _weights(self, name: str) -> np.ndarray:
        return d.weights_of(name, self.inputs, self.inputs.batch(self.families[0].objective()))

    def _policy(self, family: Family, settings: tuple[tuple[str, Any], ...]) -> Column:
        return policy(family.objective(**dict(settings)), self.inputs)

    def _kl(self, family: Family, estimator: str) -> Column:
        return kl(estimator, family.objective(), self.inputs)

    def _kl_gradient(self, family: Family, estimator: str, weights: str) -> np.ndarray:
        own = family if "sequence" in estimator else self.families[0]
        key = (own, estimator, weights, self.inputs.key)
        if key not in self.capture.replayed:
            self.capture.replayed[key] = self._kl(own, estimator).pullback(self._weights(weights))
        return self.capture.replayed[key]

    def _named(
        self, family: Family, settings: Settings, weights: str, estimator: str, divisor: d.Divisor, found: Explained
    ) -> Iterator[Fit]:
        """The fits of one explanation of the gradient, with the ranges under which the loss is the reported one too."""
        row, kl_coef = self._weights(weights) / divisor.value, _rounded(found.kl_coef)
        of_kl = kl_coef * float(np.sum(row * self._kl(family, estimator).value)) if estimator else 0.0
        base = self._policy(family, tuple(settings.items()))

        def loss(**bounds: Any) -> float:
            column = self._policy(family, tuple(bounds.items())) if bounds else base
            return float(np.sum(row * column.value)) + of_kl

        tolerance = LOSS_TOLERANCE * (float(np.sum(np.abs(row * base.value))) + abs(of_kl)) + 1e-8
        trials, open_ = [settings], {}
        if family.clips:
            steep = np.abs(base.pullback(self._weights(weights)))
            telling = steep > 1e-4 * (np.abs(self.target).max() * divisor.value or steep.max())
            ratios = log_ratio(family.objective(**NEVER), self.inputs)
            spans = ClipRange.of(ratios, self.inputs.advantages, found.kept & telling, ~found.kept & telling)
            trials, open_ = (spans.settings(loss, self.reported, tolerance), spans.open()) if spans else ([], {})
        name, said = family.named(divisor.aggregation)
        said |= divisor.settings | self.settings
        if estimator:
            said |= {"kl_coef": kl_coef, "kl_estimator": estimator}
        faults = (*self.faults, *([divisor.fault] if divisor.fault else ()))
        for values in trials:
            gap = self.reported - loss(**as_arguments(values))
            # Inside the intervals of a clip the loss is linear, up to rounding.
            near = abs(gap) <= tolerance * (1 + family.clips)
            yield Fit(name, values | said, gap, found.difference, open_, faults, near)


def _rounded(x: float) -> float:
    """The number with as few digits as its precision leaves."""
    return next((y for y in (float(f"{x:.{n}g}") for n in range(1, 6)) if abs(y - x) <= 2e-4 * abs(x)), x)
