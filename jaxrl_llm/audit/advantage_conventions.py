"""The convention that made the advantages out of the rewards, and the mistakes that are seen in them."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.audit.capture import Capture, Fault
from jaxrl_llm.objectives import group_advantages

_EPS = (1e-4, 1e-6, 1e-8, 1e-5, 0.0)
_TOLERANCE = 2e-5  # of the largest advantage


@dataclasses.dataclass(frozen=True)
class Convention:
    """Advantages of the generation batch under one convention, in its order."""

    settings: dict[str, Any]
    advantages: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Generation:
    """The rewards that advantages were made from, ordered by group, and where the rows of the capture are in them."""

    rewards: np.ndarray
    by_function: np.ndarray | None
    advantages: np.ndarray
    group_size: int
    order: np.ndarray  # place in the file of each answer here

    @classmethod
    def of(cls, capture: Capture) -> "Generation | None":
        """The generation batch, or the micro-batch where it is one; None if groups are missing, or not of one size."""
        prefix = "batch_" if capture.has("batch_rewards", "batch_group") else ""
        names = ("rewards", "group", "advantages", "rewards_by_function")
        rewards, groups, advantages, by_function = (capture.get(prefix + name) for name in names)
        if rewards is None or groups is None or advantages is None or advantages.ndim != 1:
            return None
        sizes = np.unique(groups, return_counts=True)[1]
        if np.ptp(sizes) or not np.isfinite(rewards).all():
            return None
        order = np.argsort(groups, kind="stable")
        by_function = None if by_function is None or not np.isfinite(by_function).all() else by_function[order]
        return cls(rewards[order], by_function, advantages[order], int(sizes[0]), order)

    def in_file_order(self, advantages: np.ndarray) -> np.ndarray:
        out = np.empty_like(advantages)
        out[self.order] = advantages
        return out

    @functools.cached_property
    def conventions(self) -> list[Convention]:
        """Every convention of `group_advantages`, and rewards that are normalised one function at a time."""
        plain = [{"std": std, "baseline": baseline, "std_eps": eps} for std, baseline, eps in itertools.product(
            ("sample", "batch", "population"), ("mean", "leave_one_out"), _EPS)]  # fmt: skip
        plain += [{"std": "none", "baseline": baseline} for baseline in ("mean", "leave_one_out", "none")]
        out = [Convention(row, self._made(self.rewards, **row)) for row in plain]
        if self.by_function is None or self.by_function.shape[1] == 1:
            return out
        weights = weights_of(self.by_function, self.rewards)
        for std, eps in itertools.product(("sample", "population"), _EPS):
            how = {"std": std, "std_eps": eps}
            normal = np.stack([self._made(column, **how) for column in self.by_function.T], 1)
            made = self._made(normal @ weights, size=len(self.rewards), **how)
            out.append(Convention({"advantage": "normalize_then_sum"} | how, made))
        return out

    def _made(self, rewards: np.ndarray, std: str, baseline: str = "mean", std_eps: float = 0.0, size: int = 0) -> Any:
        size = size or self.group_size
        made = group_advantages(jnp.asarray(rewards), group_size=size, std=std, baseline=baseline, eps=std_eps)
        return np.asarray(made)

    def apart(self, advantages: np.ndarray) -> float:
        """The largest distance to the advantages of the file, over their largest size."""
        return float(np.abs(advantages - self.advantages).max() / max(np.abs(self.advantages).max(), 1e-3))

    def reproducing(self) -> list[Convention]:
        """The conventions that give the advantages of the file."""
        misses = [self.apart(one.advantages) for one in self.conventions]
        least = min(_TOLERANCE, 3 * min(misses) + 2e-6)
        return [one for miss, one in zip(misses, self.conventions, strict=True) if miss <= least]


def weights_of(by_function: np.ndarray, rewards: np.ndarray) -> np.ndarray:
    """The weights of the reward functions in the rewards, by least squares."""
    return np.linalg.lstsq(by_function, rewards, rcond=None)[0]


def faults(capture: Capture, generation: Generation | None) -> Iterator[Fault]:
    """Advantages that are not those of the rewards, and rewards that are not those of the generation batch."""
    yield from _of_rows(capture)
    advantages = capture["advantages"]
    if not np.isfinite(advantages).all():
        yield "advantages_not_finite", f"{(~np.isfinite(advantages)).sum()} advantages are not finite"
        return
    if not np.abs(advantages).max() > 1e-6:
        yield (
            "advantages_all_zero",
            "every advantage is 0, so the batch teaches nothing: all answers to a prompt earned alike",
        )
    if capture.has("rewards_by_function", "rewards"):
        yield from _of_sum(capture)
    if generation is None or not np.ptp(generation.rewards):
        return
    found = generation.reproducing()
    if not found:
        yield next(_unexplained(generation))
    elif all(one.settings["std"] == "population" for one in found):
        yield (
            "std_without_bessel",
            "advantages are divided by the standard deviation with ddof 0; TRL, verl and the recipes here take ddof 1",
        )


def _of_rows(capture: Capture) -> Iterator[Fault]:
    """Values of an answer that differ from those of its row in the generation batch."""
    if not capture.has("row"):
        return
    rows = capture["row"]
    if twice := len(rows) - len(np.unique(rows)):
        yield "rows_repeated", f"row names {twice} places of the batch twice"
    for name in ("rewards", "advantages", "group"):
        whole, own = capture.get(f"batch_{name}"), capture.get(name)
        if whole is None or own is None or own.ndim > 1:
            continue
        if rows.min() < 0 or rows.max() >= len(whole):
            yield "rows_out_of_range", f"row goes to {rows.max()}, the generation batch has {len(whole)}"
            return
        right, differ = whole[rows], np.abs(own - whole[rows]) > 1e-6 * max(np.abs(whole).max(), 1)
        if differ.any():
            causes = {
                "; they are those of the first rows, in the order before the shuffle": (own, whole[: len(own)]),
                "; they have the opposite sign": (own, -right),
                "; they are the same numbers in another order": (np.sort(own), np.sort(right)),
            }
            said = next((said for said, (x, y) in causes.items() if np.allclose(x, y, atol=1e-6)), "")
            yield (
                f"{name}_of_other_rows",
                f"{name} of {differ.sum()} of {len(rows)} answers are not batch_{name} at their row{said}",
            )


def _of_sum(capture: Capture) -> Iterator[Fault]:
    prefix = "batch_" if capture.has("batch_rewards", "batch_rewards_by_function") else ""
    by_function, rewards = capture[f"{prefix}rewards_by_function"], capture[f"{prefix}rewards"]
    if np.isfinite(by_function).all() and np.isfinite(rewards).all() and len(rewards) > by_function.shape[1]:
        left = np.abs(by_function @ weights_of(by_function, rewards) - rewards).max()
        if left > 1e-4 * max(np.abs(rewards).max(), 1e-3):
            yield "rewards_are_no_sum", f"no weights of the reward functions give the rewards (closest: {left:.2g} off)"


def _unexplained(generation: Generation) -> Iterator[Fault]:
    """Faults of advantages that no convention gives, the likeliest first; the last is always there."""
    n, size, theirs = len(generation.rewards), generation.group_size, generation.advantages
    places = np.arange(n)
    moved = [
        (
            "groups_mixed",
            "grouped every other answer instead of one after another",
            np.argsort(places % (n // size), kind="stable"),
        ),
        ("groups_shifted", "groups that begin one answer too early", np.roll(places, 1)),
        ("groups_begin_late", "groups that begin one answer too late", np.roll(places, -1)),
    ]
    others = [(name, f"those of {said}", order, size) for name, said, order in moved]
    others += [("groups_mixed", f"those of groups of {k}, not of {size}", places, k)
               for k in range(2, n + 1) if n % k == 0 and k != size]  # fmt: skip
    for name, said, order, k in others:
        regrouped = dataclasses.replace(
            generation, rewards=generation.rewards[order], group_size=k, advantages=theirs[order]
        )
        if any(regrouped.apart(one.advantages) <= _TOLERANCE for one in regrouped.conventions):
            yield name, f"the advantages are {said}"
    for one in generation.conventions:
        told = one.advantages
        slope = float(np.sum(told * theirs) / max(np.sum(told**2), 1e-12))
        changed = [
            ("advantages_negated", -told, "have the opposite sign of those of the rewards"),
            ("advantages_scaled", slope * told, f"are {slope:.4g} times those of the rewards ({one.settings})"),
            ("advantages_clipped", np.clip(told, theirs.min(), theirs.max()),
             f"are cut at {theirs.min():.4g} and {theirs.max():.4g}"),
        ]  # fmt: skip
        for name, advantages, said in changed:
            if generation.apart(advantages) <= _TOLERANCE:
                yield name, f"the advantages {said}"
    nearest = min(generation.conventions, key=lambda one: generation.apart(one.advantages))
    off = np.abs(nearest.advantages - theirs)
    off = off[off > _TOLERANCE * max(np.abs(theirs).max(), 1e-3)]
    said = f"no convention gives the advantages; the nearest, {nearest.settings}, is {off.max():.3g} off"
    yield "advantages_not_of_these_rewards", f"{said}, and by more than rounding on {len(off)} of {n} answers"
