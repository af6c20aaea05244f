"""The registry of recipes: their names, their hyper-parameters, and the objectives built from them."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxrl_llm.ground.declared import Declaration, declaration, declarations
from jaxrl_llm.ground.ranges import one_of, suggestion
from jaxrl_llm.objectives.advantages import Advantage
from jaxrl_llm.objectives.aggregation import AGGREGATIONS, Aggregation, name_of
from jaxrl_llm.objectives.corrections import CORRECTIONS, correction_named
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
_TERMS = {key: declaration(Objective, key) for key in ("kl_coef", "kl_estimator", "entropy_coef")}
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
    shared = _AGGREGATION | _TERMS | _CORRECTION

    @property
    def reads(self) -> str:
        return self.advantage.reads

    def objective(self, values: Mapping[str, Any]) -> Objective:
        """The objective of these parts; `values` has every shared hyper-parameter."""
        correction = correction_named(values["correction"], values["correction_cap"])
        return Objective(**self._asdict(), **{key: values[key] for key in _TERMS}, correction=correction)


class PairRecipe(NamedTuple):
    """As `Recipe`, of an objective on pairs."""

    score: Score
    loss: PairLoss
    aggregation: Aggregation
    shared = _AGGREGATION
    reads = PairObjective.reads

    def objective(self, values: Mapping[str, Any]) -> PairObjective:
        return PairObjective(**self._asdict())


AnyRecipe = Recipe | PairRecipe

_RECIPES: dict[str, AnyRecipe] = {}


def names(reads: str | None = None) -> list[str]:
    """The recipes that `make` knows; `reads`: those that learn from "rollouts", "pairs" or "answers"."""
    return [name for name, known in _RECIPES.items() if reads in (None, known.reads)]


def recipe(name: str) -> Any:
    """The parts of the recipe `name`."""
    one_of("objective", name, _RECIPES)
    return _RECIPES[name]


def fields() -> dict[str, Declaration]:
    """Every hyper-parameter of every recipe: the fields of `config.objective`, None for the recipe's own default."""
    out: dict[str, Declaration] = {}
    for known in _RECIPES.values():
        out |= {key: value for key, value in _declared(known).items() if key not in out}
    return {key: value._replace(default=None) for key, value in out.items()}


def register(name: str, recipe: AnyRecipe) -> AnyRecipe:
    """Register `recipe` under `name` for `make` and `config.objective.name`, and its fields for the command line.

    Register before the config is made (at the top of its file), so that `config.objective` gets the recipe's fields.

    Raises:
      ValueError: the name is malformed or taken by another definition, two parts declare one field, a field is known
        elsewhere with another type, or the parts do not go together.
    """
    if not re.fullmatch(r"[a-z0-9_]+", name):
        raise ValueError(f"objective {name!r} must be lower case letters, digits and underscores; rename it")
    if name in _RECIPES and _definition(_RECIPES[name]) != _definition(recipe):
        raise ValueError(f"objective {name!r} is already registered with other parts; give yours another name")
    known = fields()
    for key, own in _declared(recipe).items():
        if key in known and known[key].kind is not own.kind:
            raise ValueError(
                f"hyper-parameter {key!r} of {name!r} is of type {own.kind.__name__}, of other recipes "
                f"{known[key].kind.__name__}; give yours another name"
            )
    _build(recipe, {"max_length": 1})
    _RECIPES[name] = recipe
    return recipe


def _definition(recipe: AnyRecipe) -> list[Any]:
    """The source locations and values of a recipe's parts: equal for a file that is loaded twice."""
    return [
        part and (type(part).__module__, type(part).__qualname__, [d.default for d in declarations(part).values()])
        for part in recipe
    ]


def _declared(recipe: AnyRecipe) -> dict[str, Declaration]:
    """Every hyper-parameter of a recipe, shared ones included; raises if two parts use one name."""
    out = dict(recipe.shared)
    out["aggregation"] = out["aggregation"]._replace(default=name_of(recipe.aggregation))
    for part in filter(None, recipe):
        for key, own in declarations(part).items():
            if key in out:
                raise ValueError(f"hyper-parameter {key!r} is declared twice; rename that of {type(part).__name__}")
            out[key] = own
    return out


def _with_aggregation(recipe: Any, aggregation: str | None) -> Any:
    if aggregation is None or type(recipe.aggregation) is AGGREGATIONS.get(aggregation):
        return recipe
    one_of("aggregation", aggregation, AGGREGATIONS)
    return recipe._replace(aggregation=AGGREGATIONS[aggregation]())


def hyperparameters(name: str, aggregation: str | None = None) -> dict[str, Any]:
    """{hyper-parameter: default} of a recipe, with this `aggregation` if one is named: `constant` brings max_length."""
    return {key: own.default for key, own in _declared(_with_aggregation(recipe(name), aggregation)).items()}


def make(name: str, **hyperparameters_: Any) -> Any:
    """The objective `name` with its hyper-parameters, for example `make("gspo", clip_low=3e-4, kl_coef=0.001)`.

    Raises:
      ValueError: unknown recipe, unknown hyper-parameter (with a suggestion), or a value out of range.
    """
    parts = _with_aggregation(recipe(name), hyperparameters_.get("aggregation"))
    known = _declared(parts)
    for key in hyperparameters_:
        if key not in known:
            owners = [other for other in _RECIPES if key in hyperparameters(other)]
            where = f"; it belongs to {', '.join(owners)}" if owners else suggestion(key, known)
            raise ValueError(f"{name} has no hyper-parameter {key!r}{where}; it has {', '.join(known)}")
    return _build(parts, {key: known[key].checked(key, value) for key, value in hyperparameters_.items()})


def _build(recipe: Any, given: dict[str, Any]) -> Any:
    """The objective of a recipe, with the given values in place of its defaults."""
    values = {key: own.default for key, own in _declared(recipe).items()} | given
    parts = (part and dataclasses.replace(part, **{key: values[key] for key in declarations(part)}) for part in recipe)
    return type(recipe)(*parts).objective(values)
