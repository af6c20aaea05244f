"""Objectives as compositions of four choices: advantage, ratio, surrogate, aggregation. See docs/objectives.md."""

from jaxrl_llm.objectives.advantages import (
    Gae,
    GroupAdvantage,
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
from jaxrl_llm.objectives.ratios import (
    NoRatio,
    Ratio,
    RouterShift,
    SequenceProduct,
    SequenceRatio,
    SequenceTokenRatio,
    TokenRatio,
)
from jaxrl_llm.objectives.recipes import hyperparameters, make, names
from jaxrl_llm.objectives.surrogates import Cispo, Clip, GeometricMean, LogProb, Soft, Surrogate, Vespo
from jaxrl_llm.objectives.value import ValueLoss

__all__ = [
    "Aggregation",
    "Batch",
    "Cispo",
    "Clip",
    "Constant",
    "Correction",
    "Gae",
    "GeometricMean",
    "GroupAdvantage",
    "IcePop",
    "LogProb",
    "NoRatio",
    "Objective",
    "Ratio",
    "RouterShift",
    "SequenceMask",
    "SequenceMeanTokenMean",
    "SequenceMeanTokenSum",
    "SequenceProduct",
    "SequenceRatio",
    "SequenceTokenRatio",
    "Soft",
    "Surrogate",
    "TokenMean",
    "TokenRatio",
    "Truncated",
    "ValueLoss",
    "Vespo",
    "degenerate_groups",
    "gae",
    "group_advantages",
    "hyperparameters",
    "make",
    "names",
    "overlong_filter",
    "overlong_penalty",
    "token_rewards",
    "whiten",
]
