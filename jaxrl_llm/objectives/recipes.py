"""Every recipe on one screen: four choices, and the value function where there is one. Equations are in the parts."""

import dataclasses
from typing import Any, NamedTuple

from jaxrl_llm.objectives import advantages as A
from jaxrl_llm.objectives import aggregation as agg
from jaxrl_llm.objectives import ratios as r
from jaxrl_llm.objectives import surrogates as s
from jaxrl_llm.objectives.corrections import correction_named
from jaxrl_llm.objectives.objective import Objective
from jaxrl_llm.objectives.value import ValueLoss
from jaxrl_llm.ranges import one_of, suggestion

__all__ = ["hyperparameters", "make", "names"]


class Recipe(NamedTuple):
    advantage: A.GroupAdvantage | A.Gae
    ratio: r.Ratio
    surrogate: s.Surrogate
    aggregation: agg.Aggregation
    value: ValueLoss | None = None


_GROUP, _CENTRED, _LEAVE_ONE_OUT = (
    A.GroupAdvantage(),
    A.GroupAdvantage("none"),
    A.GroupAdvantage("none", "leave_one_out"),
)
_BY_SEQUENCE, _BY_TOKEN = agg.SequenceMeanTokenMean(), agg.TokenMean()

# fmt: off
_RECIPES = {
    "reinforce":  Recipe(_CENTRED,       r.NoRatio(),            s.LogProb(),           agg.SequenceMeanTokenSum()),
    "rloo":       Recipe(_LEAVE_ONE_OUT, r.TokenRatio(),         s.Clip(),              _BY_SEQUENCE),
    "ppo":        Recipe(A.Gae(),        r.TokenRatio(),         s.Clip(),              _BY_TOKEN, ValueLoss()),
    "grpo":       Recipe(_GROUP,         r.TokenRatio(),         s.Clip(),              _BY_SEQUENCE),
    "dr_grpo":    Recipe(_CENTRED,       r.TokenRatio(),         s.Clip(),              agg.Constant()),
    "dapo":       Recipe(_GROUP,         r.TokenRatio(),         s.Clip(0.2, 0.28),     _BY_TOKEN),
    "gspo":       Recipe(_GROUP,         r.SequenceRatio(),      s.Clip(3e-4, 4e-4),    _BY_SEQUENCE),
    "gspo_token": Recipe(_GROUP,         r.SequenceTokenRatio(), s.Clip(3e-4, 4e-4),    _BY_SEQUENCE),
    "sapo":       Recipe(_GROUP,         r.TokenRatio(),         s.Soft(),              _BY_SEQUENCE),
    "cispo":      Recipe(_GROUP,         r.TokenRatio(),         s.Cispo(),             _BY_TOKEN),
    "gmpo":       Recipe(_GROUP,         r.TokenRatio(),         s.GeometricMean(),     _BY_SEQUENCE),
    "vespo":      Recipe(_GROUP,         r.SequenceProduct(),    s.Vespo(),             _BY_TOKEN),
    "rspo":       Recipe(_GROUP,         r.RouterShift(),        s.Clip(),              _BY_SEQUENCE),
}
# fmt: on

_SHARED = {"kl_coef": 0.0, "kl_estimator": "k3", "entropy_coef": 0.0, "correction": None, "correction_cap": None}


def names() -> list[str]:
    """The recipes that `make` knows."""
    return list(_RECIPES)


def _recipe(name: str, aggregation: str | None) -> Recipe:
    one_of("objective", name, _RECIPES)
    recipe = _RECIPES[name]
    if aggregation is None or type(recipe.aggregation) is agg.AGGREGATIONS.get(aggregation):
        return recipe
    one_of("aggregation", aggregation, agg.AGGREGATIONS)
    return recipe._replace(aggregation=agg.AGGREGATIONS[aggregation]())


def _fields(recipe: Recipe) -> dict[str, Any]:
    return {f.name: getattr(part, f.name) for part in recipe if part is not None for f in dataclasses.fields(part)}


def hyperparameters(name: str, aggregation: str | None = None) -> dict[str, Any]:
    """{hyper-parameter: default} of a recipe; max_length None means that it must be given.

    `aggregation` is the override, if any: `constant` brings max_length with it.
    """
    recipe = _recipe(name, aggregation)
    used = next(key for key, kind in agg.AGGREGATIONS.items() if type(recipe.aggregation) is kind)
    return {**_fields(recipe), "aggregation": used, **_SHARED}


def _convert(key: str, value: Any) -> Any:
    """Configs hand out ints where floats are meant, and lists for tuples."""
    if key != "max_length" and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return tuple(value) if isinstance(value, list) else value


def make(name: str, **hyperparameters_: Any) -> Objective:
    """The objective `name` with its hyper-parameters: `make("gspo", clip_low=3e-4, clip_high=4e-4, kl_coef=0.001)`.

    Raises:
      ValueError: unknown recipe, unknown hyper-parameter (with a suggestion), or a value out of range.
    """
    recipe = _recipe(name, hyperparameters_.get("aggregation"))
    known = hyperparameters(name, hyperparameters_.get("aggregation"))
    for key in hyperparameters_:
        if key not in known:
            owners = [other for other in _RECIPES if key in hyperparameters(other)]
            where = f"; it belongs to {', '.join(owners)}" if owners else suggestion(key, known)
            raise ValueError(f"{name} has no hyper-parameter {key!r}{where}; it has {', '.join(known)}")
    given = {**known, **{key: _convert(key, value) for key, value in hyperparameters_.items()}}

    def with_given(part: Any) -> Any:
        return part and dataclasses.replace(part, **{f.name: given[f.name] for f in dataclasses.fields(part)})

    return Objective(
        **{field: with_given(part) for field, part in recipe._asdict().items()},
        kl_coef=given["kl_coef"],
        kl_estimator=given["kl_estimator"],
        entropy_coef=given["entropy_coef"],
        correction=correction_named(given["correction"], given["correction_cap"]),
    )
