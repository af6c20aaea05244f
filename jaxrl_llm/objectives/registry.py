"""The registry of recipes: their names, their hyper-parameters, and the objectives built from them."""

import dataclasses
import re
from typing import Any

from jaxrl_llm.ground.declared import Declaration, declarations
from jaxrl_llm.ground.ranges import one_of, suggestion
from jaxrl_llm.objectives.aggregation import AGGREGATIONS, name_of
from jaxrl_llm.objectives.named_parts import ADVANTAGES
from jaxrl_llm.objectives.recipe_forms import PairRecipe, Recipe
from jaxrl_llm.objectives.recipes import FURTHER_RECIPES, PAIR_RECIPES, RECIPES

AnyRecipe = Recipe | PairRecipe

_RECIPES: dict[str, AnyRecipe] = {**RECIPES, **PAIR_RECIPES}


def names(reads: str | None = None) -> list[str]:
    """The recipes that `make` knows; `reads`: those that learn from "rollouts", "pairs" or "answers"."""
    known = list(dict.fromkeys([*RECIPES, *PAIR_RECIPES, *FURTHER_RECIPES, *_RECIPES]))
    return [name for name in known if reads == recipe(name).reads] if reads else known


def recipe(name: str) -> Any:
    """The parts of the recipe `name`."""
    one_of("objective", name, names())
    if name not in _RECIPES:
        _RECIPES[name] = FURTHER_RECIPES[name]
    return _RECIPES[name]


def fields(*, loaded: bool = False) -> dict[str, Declaration]:
    """Every hyper-parameter of every recipe and named advantage: the fields of `config.objective`, None for the
    recipe's own default; `loaded`: only of the recipes that have been imported."""
    out: dict[str, Declaration] = {}
    for known in [*_RECIPES.values()] if loaded else map(recipe, names()):
        out |= {key: value for key, value in _declared(known).items() if key not in out}
    for kind in () if loaded else ADVANTAGES.values():
        out |= {key: value for key, value in declarations(kind).items() if key not in out}
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
    taken = _RECIPES.get(name) or FURTHER_RECIPES.get(name)
    if taken and _definition(taken) != _definition(recipe):
        raise ValueError(f"objective {name!r} is already registered with other parts; give yours another name")
    known = fields(loaded=True)
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


def _with_named(recipe: Any, aggregation: str | None, advantage: str | None) -> Any:
    """The recipe with these parts in place of its own."""
    if aggregation is not None and type(recipe.aggregation) is not AGGREGATIONS.get(aggregation):
        one_of("aggregation", aggregation, AGGREGATIONS)
        recipe = recipe._replace(aggregation=AGGREGATIONS[aggregation]())
    if advantage is None or not isinstance(recipe, Recipe):
        return recipe
    one_of("advantage", advantage, ADVANTAGES)
    return recipe._replace(advantage=ADVANTAGES[advantage]())


def hyperparameters(name: str, aggregation: str | None = None, advantage: str | None = None) -> dict[str, Any]:
    """{hyper-parameter: default} of a recipe, with these parts if they are named: `constant` brings max_length."""
    return {key: own.default for key, own in _declared(_with_named(recipe(name), aggregation, advantage)).items()}


def make(name: str, **hyperparameters_: Any) -> Any:
    """The objective `name` with its hyper-parameters, for example `make("gspo", clip_low=3e-4, kl_coef=0.001)`.

    Raises:
      ValueError: unknown recipe, unknown hyper-parameter (with a suggestion), or a value out of range.
    """
    parts = _with_named(recipe(name), hyperparameters_.get("aggregation"), hyperparameters_.get("advantage"))
    known = _declared(parts)
    for key in hyperparameters_:
        if key not in known:
            owners = [other for other in names() if key in hyperparameters(other)]
            owners += [f"advantage={other}" for other in ADVANTAGES if key in declarations(ADVANTAGES[other])]
            where = f"; it belongs to {', '.join(owners)}" if owners else suggestion(key, known)
            raise ValueError(f"{name} has no hyper-parameter {key!r}{where}; it has {', '.join(known)}")
    return _build(parts, {key: known[key].checked(key, value) for key, value in hyperparameters_.items()})


def _build(recipe: Any, given: dict[str, Any]) -> Any:
    """The objective of a recipe, with the given values in place of its defaults."""
    values = {key: own.default for key, own in _declared(recipe).items()} | given
    parts = (part and dataclasses.replace(part, **{key: values[key] for key in declarations(part)}) for part in recipe)
    return type(recipe)(*parts).objective(values)
