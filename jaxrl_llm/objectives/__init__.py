"""What is maximised. In: arrays of log-probs, rewards and masks. Out: un-reduced terms, a loss, metrics. An objective
is four choices: advantage, ratio, surrogate, aggregation. Knows no model, config or optimizer: docs/objectives.md."""

from jaxrl_llm.objectives.advantages import (
    Advantage,
    Gae,
    GroupAdvantage,
    Imitation,
    degenerate_groups,
    gae,
    group_advantages,
    overlong_filter,
    overlong_penalty,
    token_rewards,
    whiten,
)
from jaxrl_llm.objectives.aggregation import (
    Aggregation,
    Constant,
    SequenceMeanTokenMean,
    SequenceMeanTokenSum,
    TokenMean,
)
from jaxrl_llm.objectives.batch import Batch
from jaxrl_llm.objectives.corrections import Correction, IcePop, SequenceMask, Truncated
from jaxrl_llm.objectives.objective import Objective
from jaxrl_llm.objectives.pair_objective import PairObjective
from jaxrl_llm.objectives.pair_parts import Logistic, LogLikelihood, PairLoss, ReferenceRatio, RewardHead, Score, Square
from jaxrl_llm.objectives.parts import Declaration, Part, hyperparameter
from jaxrl_llm.objectives.ratios import (
    NoRatio,
    Ratio,
    RouterShift,
    SamplerRatio,
    SequenceProduct,
    SequenceRatio,
    SequenceTokenRatio,
    TokenRatio,
)
from jaxrl_llm.objectives.recipes import PAIR_RECIPES, RECIPES
from jaxrl_llm.objectives.registry import (
    AnyObjective,
    PairRecipe,
    Recipe,
    fields,
    hyperparameters,
    make,
    names,
    recipe,
    register,
)
from jaxrl_llm.objectives.surrogates import Cispo, Clip, GeometricMean, LogProb, Soft, Surrogate, Vespo
from jaxrl_llm.objectives.trust_regions import DivergenceMask, StalenessClip
from jaxrl_llm.objectives.value import ValueLoss

__all__ = [
    "PAIR_RECIPES",
    "RECIPES",
    "Advantage",
    "Aggregation",
    "AnyObjective",
    "Batch",
    "Cispo",
    "Clip",
    "Constant",
    "Correction",
    "Declaration",
    "DivergenceMask",
    "Gae",
    "GeometricMean",
    "GroupAdvantage",
    "IcePop",
    "Imitation",
    "LogLikelihood",
    "LogProb",
    "Logistic",
    "NoRatio",
    "Objective",
    "PairLoss",
    "PairObjective",
    "PairRecipe",
    "Part",
    "Ratio",
    "Recipe",
    "ReferenceRatio",
    "RewardHead",
    "RouterShift",
    "SamplerRatio",
    "Score",
    "SequenceMask",
    "SequenceMeanTokenMean",
    "SequenceMeanTokenSum",
    "SequenceProduct",
    "SequenceRatio",
    "SequenceTokenRatio",
    "Soft",
    "Square",
    "StalenessClip",
    "Surrogate",
    "TokenMean",
    "TokenRatio",
    "Truncated",
    "ValueLoss",
    "Vespo",
    "degenerate_groups",
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
    "token_rewards",
    "whiten",
]
