"""The opinion on a capture: what reproduces it, what comes near, and what is wrong with it."""

import dataclasses
import itertools
import json
from collections.abc import Iterator, Sequence

import numpy as np

from jaxrl_llm import objectives
from jaxrl_llm.audit import advantage_conventions, batch_faults, variants
from jaxrl_llm.audit.advantage_conventions import Convention, Generation
from jaxrl_llm.audit.capture import Capture, Fault
from jaxrl_llm.audit.recomputed import DOUBTFUL, Inputs
from jaxrl_llm.audit.search import Fit
from jaxrl_llm.audit.value_conventions import Critic

_REPORTED = ("reported_loss", "reported_dlogprobs")


@dataclasses.dataclass(frozen=True)
class Opinion:
    """fits: best first; all reproduce loss and gradient, or, if none does, they are the nearest misses.

    conventions: those that give the stored advantages. scores: what a checkpoint says of each stored log-prob.
    """

    capture: Capture
    fits: list[Fit]
    conventions: list[Convention]
    faults: list[Fault]
    scores: Sequence[str] = ()

    @property
    def reproduced(self) -> bool:
        return bool(self.fits) and self.fits[0].reproduces


@np.errstate(all="ignore")  # of arrays with faults that are named
def opinion(capture: Capture, scored: Sequence[Fault] = (), scores: Sequence[str] = ()) -> Opinion:
    """Replay a capture under every objective and convention, then under known mistakes if none fits.

    scored, scores: what `scored_tokens` found.
    """
    generation, critic = Generation.of(capture), Critic.of(capture)
    conventions = generation.reproducing() if generation and np.ptp(generation.rewards) else []
    conventions += critic.conventions
    fits, misses = _searched(capture)
    shown = [_with_critic(fit, critic) for fit in _settled(fits or misses, conventions)]
    named: list[Fault] = []
    if fits:
        doubts = [dict(_of_fit(capture, fit)) for fit in shown]
        named += [(name, said) for name, said in doubts[0].items() if all(name in other for other in doubts)]
        named = [*shown[0].faults, *named, *batch_faults.metric_faults(capture)]
    elif capture.has("reported_dlogprobs") and _finite(capture) and capture["advantages"].any():
        named.append(_unexplained(capture, shown))
    of_advantages = advantage_conventions.faults(capture, generation)
    faults = dict([*named, *critic.faults, *batch_faults.faults(capture), *of_advantages, *scored])
    return Opinion(capture, shown, conventions, list(faults.items()), scores)


def _with_critic(fit: Fit, critic: Critic) -> Fit:
    """The fit with the settings of the value loss; a clip of token ratios whose advantages are GAE's is PPO."""
    plain = fit.objective in ("grpo", "dapo", "dr_grpo") and "ratio" not in fit.settings
    name = "ppo" if critic.conventions and plain else fit.objective
    return dataclasses.replace(fit, objective=name, settings=fit.settings | critic.settings)


def _searched(capture: Capture) -> tuple[list[Fit], list[Fit]]:
    """(fits, misses) of the first kind of replay that fits: plain, conventions, mistaken divisors, mistakes."""
    inputs, misses = Inputs.of(capture), []
    if not _finite(capture):
        return [], []
    if not capture.has("reported_dlogprobs"):
        return [fit for replay in variants.plain(capture, inputs) for fit in replay.losses()], []
    for replays in (variants.plain, variants.conventions, None, variants.mistakes):
        found: list[Fit] = []
        for replay in (replays or variants.plain)(capture, inputs):
            tried = list(replay.fits(mistaken=replays is None))
            found += [fit for fit in tried if fit.reproduces]
            misses += [fit for fit in tried if not fit.reproduces and np.isfinite(fit.loss_difference)]
            if found and replays is variants.mistakes:
                break
        if found:
            return found, misses
    return [], misses


def _finite(capture: Capture) -> bool:
    """True if there are numbers to replay and to compare; `batch_faults` names those that are none."""
    counted = capture["logprobs"][capture.mask]
    return all(np.isfinite(x).all() for x in (counted, *(capture.get(name, 0) for name in _REPORTED)))


def _settled(fits: list[Fit], conventions: list[Convention]) -> list[Fit]:
    """Best first: sound ones, exact ones, then those with the fewest settings away from their recipe's defaults."""
    of_advantages = conventions[0].settings if conventions else {}
    sound = [fit for fit in fits if not fit.faults] or fits
    short = [fit for fit in sound if _digits(fit) <= 4] or sound
    best = min((abs(fit.loss_difference) for fit in short), default=0.0)
    if not any(fit.reproduces for fit in short):
        short = sorted(short, key=lambda fit: (abs(fit.loss_difference), _away(fit)))[:5]
    else:
        short = sorted(short, key=lambda fit: (abs(fit.loss_difference) > 10 * best + 1e-6, _away(fit)))
    return [dataclasses.replace(fit, settings=fit.settings | of_advantages) for fit in short]


def _digits(fit: Fit) -> int:
    """Digits of the longest number among the settings of a fit."""
    numbers = [x for x in fit.settings.values() if isinstance(x, float)]
    return max((len(f"{x:.15g}".replace(".", "").strip("0-")) for x in numbers), default=0)


def _away(fit: Fit) -> tuple[int, int]:
    """How many settings differ from the defaults of the recipe, and the place of the recipe in the table."""
    known = objectives.hyperparameters(fit.objective)
    away = sum(value != known.get(key) for key, value in fit.settings.items())
    return away, objectives.names().index(fit.objective)


def _of_fit(capture: Capture, fit: Fit) -> Iterator[Fault]:
    """Settings of the best fit that no published recipe has: meant, or a mistake."""
    value = fit.settings.get
    if value("kl_coef", 0) < 0:
        yield "kl_subtracted", f"reproduced with kl_coef {value('kl_coef'):g}: the KL is subtracted from the loss"
    if value("kl_estimator") in DOUBTFUL:
        yield (
            "kl_estimator_doubtful",
            f"reproduced with {value('kl_estimator')}, whose gradient is not KL(pi, pi_ref)'s",
        )
    from_reference = np.abs(capture.get("ref_logprobs", capture["logprobs"]) - capture["logprobs"])[capture.mask].max()
    if from_reference > 1e-3 and not value("kl_coef"):
        said = "reproduced without a KL, though ref_logprobs are there and differ from logprobs"
        yield "kl_missing", f"{said}; right only if the KL is in the rewards, or is a metric"
    low, high = value("clip_low", 0.0), value("clip_high", 0.0)
    if low is None or high is None:
        yield "no_clip", f"ratios that every published range cuts keep their gradient: {fit.open}"
    elif low > high and not {"clip_low", "clip_high"} & fit.open.keys():
        yield "clip_sides_swapped", f"the range is 1 - {low:g} to 1 + {high:g}: wider below than above"
    if value("tau_pos", 0) > value("tau_neg", 9):
        yield "tau_swapped", f"tau is {value('tau_pos'):g} for good answers, {value('tau_neg'):g} for bad ones"
    if fit.objective == "rloo" and value("std") == "sample":
        said = "the ratio is the product over the answer, not its geometric mean"
        yield "ratio_not_normalised", f"{said}, while advantages are GRPO's: GSPO without 1 / |y|"


def _unexplained(capture: Capture, misses: list[Fit]) -> Fault:
    """The fault of a loss that nothing reproduces, with what is known of it."""
    reported = float(capture["reported_loss"])
    same_gradient = [fit for fit in misses if (fit.gradient_difference or 0) < 1e-4]
    for fit, factor in itertools.product(same_gradient, (-1, 2, 4, 8, 16, 0.5, 0.25, 0.125)):
        if abs(reported - factor * (reported - fit.loss_difference)) < 1e-5 * max(abs(reported), 1e-3):
            if factor < 0:
                return "loss_negated", "the gradient is reproduced, and the reported loss has the opposite sign"
            said = f"the gradient is {fit.objective}'s, the reported loss {factor:g} times what belongs to it"
            return "loss_and_gradient_apart", said
    if not same_gradient:
        return "not_reproduced", "no objective, convention or known mistake gives this loss and gradient"
    said = f"the gradient is {same_gradient[0].objective}'s, the loss is {same_gradient[0].loss_difference:.3g} off"
    return "loss_and_gradient_apart", f"{said}: a term without a gradient, or another value"


def as_json(made: Opinion) -> str:
    """The fits, best first, and the faults."""
    keys = ("objective", "settings", "loss_difference", "gradient_difference")
    fits = [{key: getattr(fit, key) for key in keys} for fit in made.fits]
    faults = [{"name": name, "evidence": evidence} for name, evidence in made.faults]
    told = {"fits": fits, "faults": faults}
    return json.dumps(told, indent=1, default=lambda x: x.item() if hasattr(x, "item") else str(x)) + "\n"
