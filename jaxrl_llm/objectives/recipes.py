"""The usual recipes on one screen: four choices, and the value function where there is one. Equations are in the parts.

The other recipes are in further_recipes.py, which is imported when one of them is asked for.
"""

from jaxrl_llm.ground.by_name import ByName
from jaxrl_llm.objectives import advantages as A
from jaxrl_llm.objectives import aggregation as agg
from jaxrl_llm.objectives import pair_parts as p
from jaxrl_llm.objectives import ratios as r
from jaxrl_llm.objectives import surrogates as s
from jaxrl_llm.objectives.recipe_forms import PairRecipe, Recipe
from jaxrl_llm.objectives.value import ValueLoss

_GROUP = A.GroupAdvantage()
_CENTRED, _LEAVE_ONE_OUT = A.GroupAdvantage("none"), A.GroupAdvantage("none", "leave_one_out")
_BY_SEQUENCE, _BY_TOKEN, _SUM = agg.SequenceMeanTokenMean(), agg.TokenMean(), agg.SequenceMeanTokenSum()

# fmt: off
RECIPES = {  # from rollouts, `sft` from given answers
    "reinforce":  Recipe(_CENTRED,       r.NoRatio(),            s.LogProb(),           _SUM),
    "rloo":       Recipe(_LEAVE_ONE_OUT, r.AnswerRatio(),        s.Clip(),              _BY_SEQUENCE),
    "ppo":        Recipe(A.Gae(),        r.TokenRatio(),         s.Clip(),              _BY_TOKEN, ValueLoss()),
    "grpo":       Recipe(_GROUP,         r.TokenRatio(),         s.Clip(),              _BY_SEQUENCE),
    "dr_grpo":    Recipe(_CENTRED,       r.TokenRatio(),         s.Clip(),              agg.Constant()),
    "dapo":       Recipe(_GROUP,         r.TokenRatio(),         s.Clip(0.2, 0.28),     _BY_TOKEN),
    "gspo":       Recipe(_GROUP,         r.SequenceRatio(),      s.Clip(3e-4, 4e-4),    _BY_SEQUENCE),
    "gspo_token": Recipe(_GROUP,         r.SequenceTokenRatio(), s.Clip(3e-4, 4e-4),    _BY_SEQUENCE),
    "sapo":       Recipe(_GROUP,         r.TokenRatio(),         s.Soft(),              _BY_SEQUENCE),
    "cispo":      Recipe(_GROUP,         r.TokenRatio(),         s.Cispo(),             _BY_TOKEN),
    "gmpo":       Recipe(_GROUP,         r.TokenRatio(),         s.GeometricMean(),     _BY_SEQUENCE),
    "rspo":       Recipe(_GROUP,         r.RouterShift(),        s.Clip(),              _BY_SEQUENCE),
    "sft":        Recipe(A.Imitation(),  r.NoRatio(),            s.LogProb(),           _BY_TOKEN),
}
PAIR_RECIPES = {  # from pairs of answers
    "reward_model": PairRecipe(p.RewardHead(),     p.Logistic(1.0),                    _SUM),
    "dpo":          PairRecipe(p.ReferenceRatio(), p.Logistic(0.1),                    _SUM),
    "cdpo":         PairRecipe(p.ReferenceRatio(), p.Logistic(0.1, 0.1),               _SUM),
    "ipo":          PairRecipe(p.ReferenceRatio(), p.Square(0.1),                      _BY_SEQUENCE),
    "simpo":        PairRecipe(p.LogLikelihood(),  p.Logistic(2.0, target_margin=1.0), _BY_SEQUENCE),
}
# fmt: on
FURTHER_RECIPES = ByName(
    {
        "vespo": "jaxrl_llm.objectives.further_recipes",
        "sat": "jaxrl_llm.objectives.further_recipes",
        "dppo": "jaxrl_llm.objectives.further_recipes",
        "cppo": "jaxrl_llm.objectives.further_recipes",
        "opsm": "jaxrl_llm.objectives.further_recipes",
        "a3po": "jaxrl_llm.objectives.further_recipes",
        "reinforce_pp": "jaxrl_llm.objectives.further_recipes",
        "reinforce_pp_baseline": "jaxrl_llm.objectives.further_recipes",
        "luspo": "jaxrl_llm.objectives.further_recipes",
        "clip_cov": "jaxrl_llm.objectives.further_recipes",
        "kl_cov": "jaxrl_llm.objectives.further_recipes",
        "dro": "jaxrl_llm.objectives.further_recipes",
        "cpo": "jaxrl_llm.objectives.further_recipes",
        "orpo": "jaxrl_llm.objectives.further_recipes",
        "exo": "jaxrl_llm.objectives.further_recipes",
        "nca": "jaxrl_llm.objectives.further_recipes",
        "apo_zero": "jaxrl_llm.objectives.further_recipes",
        "apo_down": "jaxrl_llm.objectives.further_recipes",
        "kto": "jaxrl_llm.objectives.further_recipes",
    }
)
