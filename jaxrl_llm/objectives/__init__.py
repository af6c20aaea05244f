"""The loss. In: arrays of log-probs, rewards and masks. Out: un-reduced terms, a loss, metrics. An objective
is four choices: advantage, ratio, surrogate, aggregation; recipes.py has them all on one screen. Knows no model, config
or optimizer: docs/objectives.md."""

from jaxrl_llm.objectives.advantages import gae, group_advantages
from jaxrl_llm.objectives.batch import Batch
from jaxrl_llm.objectives.objective import Objective
from jaxrl_llm.objectives.pair_objective import PairObjective
from jaxrl_llm.objectives.parts import hyperparameter
from jaxrl_llm.objectives.recipe_forms import AnyObjective
from jaxrl_llm.objectives.recipes import PAIR_RECIPES, RECIPES
from jaxrl_llm.objectives.registry import fields, hyperparameters, make, names, recipe, register
from jaxrl_llm.objectives.rewards import overlong_filter, overlong_penalty

__all__ = [
    "PAIR_RECIPES",
    "RECIPES",
    "AnyObjective",
    "Batch",
    "Objective",
    "PairObjective",
    "fields",
    "gae",
    "group_advantages",
    "hyperparameter",
    "hyperparameters",
    "make",
    "names",
    "overlong_filter",
    "overlong_penalty",
    "recipe",
    "register",
]
