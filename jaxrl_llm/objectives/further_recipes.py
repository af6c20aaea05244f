"""The recipes that are imported when a config names one, each under its name. Equations are in the parts."""

from jaxrl_llm.objectives import advantages as A
from jaxrl_llm.objectives import aggregation as agg
from jaxrl_llm.objectives import covariance as cov
from jaxrl_llm.objectives import further_advantages as fa
from jaxrl_llm.objectives import further_pair_losses as fp
from jaxrl_llm.objectives import pair_parts as p
from jaxrl_llm.objectives import ratios as r
from jaxrl_llm.objectives import surrogates as s
from jaxrl_llm.objectives import trust_regions as t
from jaxrl_llm.objectives import vespo as v
from jaxrl_llm.objectives.recipe_forms import PairRecipe, Recipe

_GROUP = A.GroupAdvantage()
_BY_SEQUENCE, _BY_TOKEN, _SUM = agg.SequenceMeanTokenMean(), agg.TokenMean(), agg.SequenceMeanTokenSum()

_PREFIX_BUDGET = t.PrefixBudgetMask("tv", 0.15, 0.15)  # thresholds of the paper's dense models

# fmt: off
vespo                 = Recipe(_GROUP,             r.SequenceProduct(),   v.Vespo(),              _BY_TOKEN)
sat                   = Recipe(_GROUP,             r.SamplerRatio(),      t.StalenessClip(),      _BY_SEQUENCE)
dppo                  = Recipe(_GROUP,             r.SamplerRatio(),      t.DivergenceMask(),     _BY_TOKEN)
cppo                  = Recipe(_GROUP,             r.SamplerRatio(),      _PREFIX_BUDGET,         _BY_TOKEN)
opsm                  = Recipe(_GROUP,             r.SamplerRatio(),      t.SequenceMaskedClip(), _BY_SEQUENCE)
a3po                  = Recipe(_GROUP,             r.InterpolatedRatio(), t.DecoupledClip(),      _BY_TOKEN)
luspo                 = Recipe(_GROUP,             r.SequenceRatio(),     s.Clip(3e-4, 4e-4),     _SUM)
reinforce_pp          = Recipe(fa.ReturnToGo(),    r.TokenRatio(),        s.Clip(),               _BY_TOKEN)
reinforce_pp_baseline = Recipe(fa.GroupWhitened(), r.TokenRatio(),        s.Clip(),               _BY_TOKEN)
clip_cov              = Recipe(_GROUP,             r.TokenRatio(),        cov.ClipCov(),          _BY_TOKEN)
kl_cov                = Recipe(_GROUP,             r.TokenRatio(),        cov.KlCov(),            _BY_TOKEN)
dro                   = Recipe(_GROUP,             r.TokenRatio(),        t.SquaredStep(),        _BY_TOKEN)

cpo      = PairRecipe(p.LogLikelihood(1.0), p.Logistic(0.1),         _SUM)
orpo     = PairRecipe(p.LogLikelihood(1.0), fp.OddsRatio(0.1),        _BY_SEQUENCE)
exo      = PairRecipe(p.ReferenceRatio(),   fp.ReverseKl(0.1),        _SUM)
nca      = PairRecipe(p.ReferenceRatio(),   fp.NoiseContrastive(0.1), _SUM)
apo_zero = PairRecipe(p.ReferenceRatio(),   fp.AnchoredUp(0.1),       _SUM)
apo_down = PairRecipe(p.ReferenceRatio(),   fp.AnchoredDown(0.1),     _SUM)
kto      = PairRecipe(p.ReferenceRatio(),   fp.Prospect(0.1),         _SUM)
# fmt: on
