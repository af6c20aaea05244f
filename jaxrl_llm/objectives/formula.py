"""An objective as one line of mathematics, for a person who starts a run."""

import dataclasses
from typing import Any

from jaxrl_llm.objectives import advantages as A
from jaxrl_llm.objectives import aggregation as agg
from jaxrl_llm.objectives import ratios as r
from jaxrl_llm.objectives import surrogates as s
from jaxrl_llm.objectives.objective import Objective

__all__ = ["formula"]

_AGGREGATIONS = {
    agg.SequenceMeanTokenMean: "mean_y mean_t",
    agg.TokenMean: "mean_yt",
    agg.SequenceMeanTokenSum: "mean_y sum_t",
}
_RATIOS = {
    r.NoRatio: "",
    r.TokenRatio: "r = pi / pi_old by token",
    r.SequenceRatio: "r = (pi(y) / pi_old(y))^(1 / |y|)",
    r.SequenceTokenRatio: "r = (pi(y) / pi_old(y))^(1 / |y|), gradient by token",
    r.SequenceProduct: "r = pi(y) / pi_old(y)",
}


def formula(objective: Objective) -> tuple[str, str]:
    """What is maximised and what its letters mean: ("mean_y mean_t min(r A, clip(r, 0.8, 1.2) A)", "r = ...").

    y is an answer, t a token of it, R its reward, sg the stopped gradient. A part of a user's own stands there by its
    class and fields.
    """
    terms = f"{_aggregation(objective.aggregation)} {_surrogate(objective.surrogate)}"
    if objective.correction is not None:
        terms += f" w, w = {_own(objective.correction)}"
    if objective.kl_coef:
        terms += f" - {objective.kl_coef:g} KL(pi, pi_ref)"
    if objective.entropy_coef:
        terms += f" + {objective.entropy_coef:g} H(pi)"
    if objective.value is not None:
        terms += f" - {objective.value.value_coef:g} value loss"
    letters = (_ratio(objective.ratio), _advantage(objective.advantage))
    return terms, ", ".join(letter for letter in letters if letter)


def _aggregation(part: Any) -> str:
    if isinstance(part, agg.Constant):
        return f"mean_y sum_t 1/{part.max_length or 'L'}"
    return _AGGREGATIONS.get(type(part)) or _own(part)


def _surrogate(part: Any) -> str:
    match part:
        case s.LogProb():
            return "A log pi"
        case s.Clip():
            bounded = f"min(r A, clip(r, {1 - part.clip_low:.6g}, {1 + part.clip_high:.6g}) A)"
            return bounded if part.dual_clip is None else f"max({bounded}, {part.dual_clip:g} A if A < 0)"
        case s.Soft():
            return f"4/tau sigmoid(tau (r - 1)) A, tau = {part.tau_pos:g} (A > 0), {part.tau_neg:g} (A < 0)"
        case s.Cispo():
            return f"sg(min(r, {part.cap:g})) A log pi"
        case _:
            return f"{_own(part)} A"


def _ratio(part: Any) -> str:
    known = _RATIOS.get(type(part))
    return f"r = {_own(part)}" if known is None else known


def _advantage(part: Any) -> str:
    if isinstance(part, A.Gae):
        kl = f", R - {part.reward_kl_coef:g} KL in the reward" if part.reward_kl_coef else ""
        return f"A = GAE(gamma {part.gamma:g}, lambda {part.lam:g}){kl}"
    if not isinstance(part, A.GroupAdvantage):
        return f"A = {_own(part)}"
    centre = {"mean": "R - mean R", "leave_one_out": "R - mean R of the others", "none": "R"}[part.baseline]
    if part.std == "none":
        return f"A = {centre}"
    return f"A = ({centre}) / std R" + (" of the batch" if part.std == "batch" else "")


def _own(part: Any) -> str:
    fields = (f"{field.name}={getattr(part, field.name)}" for field in dataclasses.fields(part))
    return f"{type(part).__name__}({', '.join(fields)})"
