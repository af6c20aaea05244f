"""The forms of a recipe: the parts of an objective with their defaults, and the hyper-parameters that all share."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxrl_llm.ground.declared import Declaration, declaration
from jaxrl_llm.objectives.advantages import Advantage
from jaxrl_llm.objectives.aggregation import AGGREGATIONS, Aggregation
from jaxrl_llm.objectives.named_parts import ADVANTAGES, CORRECTIONS, correction_named
from jaxrl_llm.objectives.objective import Objective
from jaxrl_llm.objectives.pair_objective import PairObjective
from jaxrl_llm.objectives.pair_parts import PairLoss, Score
from jaxrl_llm.objectives.ratios import Ratio
from jaxrl_llm.objectives.surrogates import Surrogate
from jaxrl_llm.objectives.value import ValueLoss

AnyObjective = Objective | PairObjective

# Hyper-parameters beside the fields of the parts: choices by name, and fields of `Objective` itself.
_AGGREGATION = {
    "aggregation": Declaration(str, None, f"{' | '.join(AGGREGATIONS)}: how tokens and sequences are averaged", True)
}
_ADVANTAGE = {
    "advantage": Declaration(str, None, f"{' | '.join(ADVANTAGES)}: in place of the recipe's own advantage", True)
}
_TERMS = {key: declaration(Objective, key) for key in ("kl_coef", "kl_estimator", "teacher_coef", "entropy_coef")}
_CORRECTION = {
    "correction": Declaration(str, None, f"sampler correction: {' | '.join(CORRECTIONS)}; off unless set", True),
    "correction_cap": Declaration(float, None, "bound of the sampler correction", True),
}


class Recipe(NamedTuple):
    """The parts of an objective with their defaults; `recipe(name)._replace(...)` makes a variant of a known one."""

    advantage: Advantage
    ratio: Ratio
    surrogate: Surrogate
    aggregation: Aggregation
    value: ValueLoss | None = None
    shared = _AGGREGATION | _ADVANTAGE | _TERMS | _CORRECTION

    @property
    def reads(self) -> str:
        return self.advantage.reads

    def objective(self, values: Mapping[str, Any]) -> Objective:
        """The objective of these parts; `values` has every shared hyper-parameter."""
        correction = correction_named(values["correction"], values["correction_cap"])
        return Objective(**self._asdict(), **{key: values[key] for key in _TERMS}, correction=correction)


class PairRecipe(NamedTuple):
    """The parts of an objective on pairs, with their defaults."""

    score: Score
    loss: PairLoss
    aggregation: Aggregation
    shared = _AGGREGATION
    reads = PairObjective.reads

    def objective(self, values: Mapping[str, Any]) -> PairObjective:
        return PairObjective(**self._asdict())
