"""An objective as one line of mathematics with the meaning of its letters, for a person who starts a run."""

from jaxrl_llm.objectives.objective import Objective
from jaxrl_llm.objectives.pair_objective import PairObjective
from jaxrl_llm.objectives.parts import Part

__all__ = ["formula"]


def formula(objective: Objective | PairObjective) -> tuple[list[str], list[str]]:
    """What is maximised, term by term, and its definitions: (["mean_yt M r A", "- 0.1 KL(pi, pi_ref)"], ["M = ..."]).

    y is an answer, t a token of it, R its reward, sg the stopped gradient; of a pair, D is the difference of the
    scores s of its answers. Every part writes its own piece.
    """
    if isinstance(objective, PairObjective):
        score, *centring = _pieces(objective.score)
        sum_of_tokens = _pieces(objective.aggregation)[0].removeprefix("mean_y ")
        loss, *letters = _pieces(objective.loss)
        letters += ["D = s(chosen) - s(rejected)", f"s = {sum_of_tokens} {score}"]
        return [f"mean over pairs {loss}", *centring], letters
    correction = objective.correction
    aggregation, *definitions = _pieces(objective.aggregation)
    surrogate, *letters = _pieces(objective.surrogate)
    letters += [*_pieces(objective.ratio, "r = "), *_pieces(objective.advantage, "A = ")]
    if correction is not None:
        letters += _pieces(correction, "w = ")
    terms = [f"{aggregation} {'w ' if correction else ''}{surrogate}"]
    if objective.kl_coef:
        terms.append(f"- {objective.kl_coef:g} KL(pi, pi_ref)")
    if objective.entropy_coef:
        terms.append(f"+ {objective.entropy_coef:g} H(pi)")
    if objective.value is not None:
        terms.append(f"- {objective.value.value_coef:g} value loss")
    return terms, [definition for definition in (*letters, *definitions) if definition]


def _pieces(part: Part, letter: str = "") -> list[str]:
    """A part's formula, cut at its definitions; name and fields of a class that inherits one and computes another."""
    written = "formula" in vars(type(part))
    return part.formula().split("; ") if written else [letter + Part.formula(part)]
