"""The range of a clip, read from a batch: gradients say between which ratios it lies, the loss says where."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator

import numpy as np

from jaxrl_llm.audit.families import CLIP_RANGES, DUAL_CLIPS, Settings

Loss = Callable[..., float]
NEVER = {"clip_low": 1.0, "clip_high": 1e9}  # bounds that no ratio reaches
_PUBLISHED = {
    "clip_low": [*dict.fromkeys(low for low, _ in CLIP_RANGES)],
    "clip_high": [*dict.fromkeys(high for _, high in CLIP_RANGES)],
    "dual_clip": [*DUAL_CLIPS],
}


@dataclasses.dataclass(frozen=True)
class Bound:
    """One bound of a clip: the largest excess that keeps its gradient, and the least that loses it (inf if none)."""

    kept: float
    cut: float

    @property
    def reached(self) -> bool:
        return self.cut < np.inf

    def holds(self, value: float) -> bool:
        return self.kept * (1 - 1e-6) <= value <= self.cut * (1 + 1e-6)

    def inside(self, share: float) -> float:
        return self.kept + share * (self.cut - self.kept) if self.reached else max(self.kept, 1e-9) * (1 + share)


class ClipRange(dict[str, Bound]):
    """The bounds by name. `dual_clip` is of the ratio itself, `clip_low` and `clip_high` of its distance to 1."""

    @classmethod
    def of(cls, log_ratio: np.ndarray, advantages: np.ndarray, kept: np.ndarray, cut: np.ndarray) -> "ClipRange | None":
        """The range that keeps these tokens and cuts those; None if no clip does, as cut tokens are on a good side."""
        ratio, good, bad = np.exp(log_ratio), advantages > 0, advantages < 0
        if (cut & good & (ratio <= 1)).any() or (cut & (ratio == 1)).any():
            return None

        def bound(excess: np.ndarray, where: np.ndarray, least: float) -> Bound:
            inside, outside = excess[kept & where], excess[cut & where & (excess > least)]
            return Bound(float(inside.max(initial=least)), float(outside.min(initial=np.inf)))

        found = cls(
            clip_low=bound(1 - ratio, bad, 0.0), clip_high=bound(ratio - 1, good, 0.0), dual_clip=bound(ratio, bad, 1.0)
        )
        return found if all(one.kept <= one.cut * (1 + 1e-9) for one in found.values()) else None

    @property
    def reached(self) -> list[str]:
        return [name for name, bound in self.items() if bound.reached]

    def settings(self, loss: Loss, reported: float, tolerance: float) -> list[Settings]:
        """Ranges under which the loss is the reported one: published ones, else what solves for a bound, else any.

        loss: of clip_low, clip_high and dual_clip; inside the intervals it is linear in each bound that is reached.
        """
        start = {name: bound.inside(0.25) for name, bound in self.items() if name != "dual_clip" or bound.reached}
        base, slope = loss(**start), {}
        for name in self.reached:
            further = self[name].inside(0.75)
            slope[name] = (loss(**start | {name: further}) - base) / max(further - start[name], 1e-12)

        def gap(values: Settings) -> float:
            return reported - base - sum(slope[name] * (values[name] - start[name]) for name in slope)

        found = [values for values in self._published() if abs(gap(values)) <= tolerance]
        if not found and not slope and abs(gap({})) <= tolerance:  # so far out that no published range would keep them
            far = self["clip_low"].kept > 0.4
            return [{"clip_low": None if far else 0.2, "clip_high": None, "dual_clip": None}]
        found = found or list(self._solved(slope, gap, tolerance))
        middle = {name: self[name].inside(0.5) for name in ("clip_low", "clip_high")} | {"dual_clip": None}
        return found or [middle]

    def _holding(self, name: str) -> list[float]:
        return [value for value in _PUBLISHED[name] if self[name].holds(value)]

    def _published(self) -> Iterator[Settings]:
        told = self["clip_low"].reached or self["clip_high"].reached
        pairs = itertools.product(_PUBLISHED["clip_low"], _PUBLISHED["clip_high"]) if told else CLIP_RANGES
        duals = self._holding("dual_clip")
        if not self["dual_clip"].reached:
            duals = [None, *(c for c in duals if told and c == DUAL_CLIPS[0])]
        for (low, high), dual in itertools.product(pairs, duals):
            if self["clip_low"].holds(low) and self["clip_high"].holds(high):
                yield {"clip_low": low, "clip_high": high, "dual_clip": dual}

    def _solved(
        self, slope: dict[str, float], gap: Callable[[Settings], float], tolerance: float
    ) -> Iterator[Settings]:
        """One bound solved for, the others published; only numbers of two or three digits are taken for settings.

        A bound that no token reached has the first published value that holds, or none.
        """
        free: Settings = {name: next(iter(self._holding(name)), None) for name in ("clip_low", "clip_high")} | {
            "dual_clip": None
        }
        for name in (name for name in slope if slope[name]):
            others = [other for other in slope if other != name]
            for chosen in itertools.product(*map(self._holding, others)):
                values = free | dict(zip(others, chosen, strict=True))
                exact = gap(values | {name: 0.0}) / slope[name]
                rounded: Iterator[Settings] = (values | {name: float(f"{exact:.{digits}g}")} for digits in (2, 3))
                fitting = (x for x in rounded if self[name].holds(x[name]) and abs(gap(x)) <= tolerance)
                yield from itertools.islice(fitting, 1)

    def open(self) -> dict[str, str]:
        """{bound: the values that would do as well} of those that no token reached."""
        out = {}
        for name in (name for name, bound in self.items() if not bound.reached):
            kept = self[name].kept
            any_ = f"from {kept:.2g}" if kept else "any"
            out[name] = f"none, or from {kept:.3g}" if name == "dual_clip" else any_
        return out


def as_arguments(settings: Settings) -> Settings:
    """The settings as an objective takes them: None is a bound that nothing reaches."""
    return {name: NEVER.get(name) if value is None else value for name, value in settings.items()}
