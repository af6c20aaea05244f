"""The row of a step: its metrics are fetched while the next step runs, checked and logged.

A run that fails a check stops and names the step.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl_llm.ground import metrics as M
from jaxrl_llm.ground import processes
from jaxrl_llm.records.run_log import RunLog


@dataclasses.dataclass
class Pending:
    """The metrics of a step that are still on the devices, and what the host knows already."""

    step: int
    host: dict[str, Any]
    scored: dict[str, M.Metric]  # of what the step learns from
    updates: list[dict[str, M.Metric]]
    samples: list[dict[str, Any]]
    bounds: Mapping[str, Any]  # what `check_updates` is told of the run

    @functools.cached_property
    def _fetched(self) -> tuple[dict[str, M.Metric], list[dict[str, M.Metric]]]:
        return processes.fetch((self.scored, self.updates))

    def row(self) -> dict[str, Any]:
        """All that is known of the step; waits for its updates."""
        scored, updates = self._fetched
        each = [M.finalize(update) for update in updates]
        values = M.finalize(M.merge([scored, *updates]))
        values |= {key: value for key, value in each[0].items() if key.startswith("check/")}  # of the first update only
        name = "routing/flips_old_current_by_layer"
        if name in values:
            values["routing/flips_old_current_by_update"] = [update[name] for update in each]  # pyright: ignore
            # The first update has the same parameters as the scoring pass, so that any difference is rounding, or
            # what the sampler chose otherwise where its experts are replayed.
            values["routing/flips_numeric"] = each[0]["routing/flips_old_current"]
        return {**values, **self.host}

    def check(self) -> None:
        """Raises as `check_updates` does."""
        scored, updates = self._fetched
        check_updates(self.step, M.finalize(scored), [M.finalize(update) for update in updates], **self.bounds)

    def write(self, log: RunLog) -> None:
        """Log the step, then check it."""
        log.metrics(self.step, self.row())
        self.check()
        log.samples(self.step, self.samples)


# Two compiled programs of one shape agree up to rounding; a near-tie of the router may occasionally flip a token.
_MEAN = {"float32": 1e-4, "bfloat16": 2e-2}
_SHARE = {"float32": 1e-3, "bfloat16": 0.5}  # of tokens that differ by more than 1e-2


def check_updates(
    step: int,
    scored: Mapping[str, Any],
    updates: Sequence[Mapping[str, Any]],
    *,
    dtype: str,
    sampler_dtype: str,
    truncated: bool,
    flipped: float,
    exact: Callable[[], str] | None = None,
) -> None:
    """Finite losses and gradients; whole pairs; no missing record under replay; current/old = 1 at the first update;
    old/sampler = 1 where both are float32.

    The maximum is not checked, because one flipped near-tie may exceed any bound. flipped: the share of tokens that a
    flip may move (`moved_by_a_flip`). exact: says which operation differs first; given where every token must have the
    sampler's bits.

    Raises:
      FloatingPointError, ValueError: with the step and what to look at.
    """
    for number, update in enumerate(updates, start=1):
        if update.get("update/not_finite", 0) > 0:
            raise FloatingPointError(
                f"step {step}, update {number} of {len(updates)}: the loss or gradient is not finite (loss "
                f"{update['loss/total']}, gradient norm {update['grad/norm']}); lower optimizer.learning_rate or set "
                "optimizer.clip_norm"
            )
        if update.get("pairs/incomplete", 0) > 0:
            raise ValueError(
                f"step {step}, update {number} of {len(updates)}: {update['pairs/incomplete']:.1%} of pairs lack one "
                "of their answers in their micro-batch and teach nothing; a layout must keep both answers together"
            )
    lost = scored.get("check/unrecorded", 0)
    if lost > 0:
        raise ValueError(
            f"step {step}: {lost:.0f} (layer, token) pairs have no recorded routing to replay; the record and the "
            "rollout are not of the same tokens"
        )
    if updates:
        _check(f"step {step}: current/old at the first update", updates[0], "check/current_old", dtype)
    # Where nothing was scored, the forward of the one update is pi_old.
    values = {**(updates[0] if updates else {}), **scored}
    if exact is not None and not truncated and values.get("check/sampler_equal", 1) < 1:  # NaN of no token
        raise ValueError(
            f"step {step}: {1 - values['check/sampler_equal']:.2%} of tokens have another log-prob than the sampler "
            f"gave them; under model.numerics=exact none may. {exact()}"
        )
    if dtype == sampler_dtype == "float32" and not truncated:
        _check(f"step {step}: old/sampler", values, "check/old_sampler", "float32", flipped)


def moved_by_a_flip(answers: int, group_size: int, experts: int) -> float:
    """The share of tokens that one flipped near-tie of a router moves: the later ones of its answer, or, in a prompt,
    those of all its answers, of which a twentieth of all tokens is taken at most. A dense model has no router."""
    return max(1, min(group_size, answers / 20)) / answers if experts else 0.0


def _check(what: str, values: Mapping[str, Any], name: str, dtype: str, flipped: float = 0.0) -> None:
    if found := disagreement(values, name, dtype, flipped=flipped):
        raise ValueError(
            f"{what} is not 1: {found}; two passes over the same tokens disagree, so every ratio would be wrong"
        )


def disagreement(values: Mapping[str, Any], name: str, dtype: str, allowed: float = 0.0, flipped: float = 0.0) -> str:
    """Return what exceeds the bounds of two passes over the same tokens; "" if they hold or nothing was compared.

    Args:
      values: of |delta log p| the mean, the share of tokens above 1e-2 and the mean of the rest, as `NAME_mean`,
        `NAME_share` and `NAME_rest`.
      allowed: a share of tokens that may be above 1e-2, where the dtype allows less.
      flipped: as allowed, and these tokens may be off by anything: the bound of the mean is that of the rest. The mean
        of all must be a number still.
    """
    most, share = max(allowed, flipped, _SHARE[dtype]), values.get(f"{name}_share")
    if share is None or math.isnan(share):
        return ""  # nothing was scored, or no token counts
    mean, bound, of = values[f"{name}_mean"], _MEAN[dtype], ""
    if flipped and not math.isnan(mean):  # the rest may be no token at all
        mean, of = values[f"{name}_rest"], " of the rest"
    if not mean > bound and share <= most and not math.isnan(values[f"{name}_mean"]):
        return ""
    return f"mean |delta log p| {mean:.2e}{of} (bound {bound:.0e}), {share:.2%} of tokens above 1e-2 (bound {most:.1%})"
