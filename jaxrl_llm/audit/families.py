"""The recipes that a captured batch can be replayed under, one family for each pair of ratio and surrogate."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxrl_llm import objectives
from jaxrl_llm.audit.recomputed import Inputs
from jaxrl_llm.objectives import Objective
from jaxrl_llm.objectives.aggregation import name_of
from jaxrl_llm.objectives.ratios import SequenceRatio, TokenRatio
from jaxrl_llm.objectives.surrogates import Cispo, Clip, GeometricMean, Soft
from jaxrl_llm.objectives.trust_regions import DivergenceMask, SequenceMaskedClip
from jaxrl_llm.objectives.vespo import Vespo

Settings = dict[str, Any]

# Ranges and bounds that papers and the defaults of peers have: what is tried where a batch does not say it itself.
CLIP_RANGES = (
    (0.2, 0.2), (0.2, 0.28), (0.2, 0.27), (0.02, 0.04), (3e-4, 4e-4), (0.1, 0.1), (0.3, 0.3), (0.2, 0.3), (0.4, 0.4),
)  # fmt: skip
_CAPS = (5.0, 0.2, 0.28, 1.2, 1.28, 2.0, 3.0, 4.0, 6.0, 10.0, 1.0, 1.1, 1.3, 1.4, 1.5, 8.0)
DUAL_CLIPS = (3.0, 4.0, 10.0, 2.0, 1.5)
KL_COEFFICIENTS = (0.001, 0.01, 0.04, 0.1, 0.05, 0.02, 0.005, 0.2)
LENGTHS = tuple(2**n for n in range(5, 16))  # of the constant aggregation
TRIALS: dict[type, Sequence[Settings]] = {
    Soft: [{}, {"tau_pos": 1.05, "tau_neg": 1.0}, *({"tau_pos": t, "tau_neg": t} for t in (1.0, 1.05, 2.0, 0.5))],
    Cispo: [{"cap": cap} for cap in _CAPS],
    GeometricMean: [{"log_clip": bound} for bound in (0.4, 0.2, 0.3, 0.5)],
    Vespo: [{}, {"phi_pos": (3.0, 2.0), "phi_neg": (2.0, 3.0)}],
    DivergenceMask: [{"divergence": kind} for kind in ("tv", "kl")],
    SequenceMaskedClip: [{"delta": delta} for delta in (0.1, 0.05, 0.2, 0.5)],
}


@dataclasses.dataclass(frozen=True)
class Family:
    """Recipes that share ratio and surrogate; they differ in how tokens and answers are averaged.

    by_sequence: the token's ratio of the recipes is replaced by that of the answer, as TRL and verl can be set to.
    """

    names: tuple[str, ...]
    by_sequence: bool = False

    def objective(self, **settings: Any) -> Objective:
        made = objectives.make(self.names[0], aggregation="token_mean", **settings)
        return dataclasses.replace(made, ratio=SequenceRatio()) if self.by_sequence else made

    @property
    def surrogate(self) -> type:
        return type(objectives.recipe(self.names[0]).surrogate)

    @property
    def clips(self) -> bool:
        """True if the surrogate is the plain clip, whose range the batch itself tells."""
        return self.surrogate is Clip

    def named(self, aggregation: str) -> tuple[str, Settings]:
        """The recipe with this aggregation, or the first one with the aggregation as a setting."""
        extra = {"ratio": "sequence"} if self.by_sequence else {}
        fitting = [name for name in self.names if name_of(objectives.recipe(name).aggregation) == aggregation]
        return (fitting or self.names)[0], extra | {"aggregation": aggregation}


def families(inputs: Inputs) -> list[Family]:
    """The families whose arrays the capture has, those with a critic, given answers or a whole minibatch left out."""
    given = {"ref_logprobs": inputs.ref is not None, "sampler_logprobs": inputs.sampler is not None, "age": True}
    groups: dict[Any, list[str]] = {}
    for name in objectives.names("rollouts"):
        recipe = objectives.recipe(name)
        needs = recipe.ratio.needs | recipe.surrogate.needs | recipe.aggregation.needs
        whole = recipe.surrogate.whole_minibatch  # as Clip-Cov, which a micro-batch cannot show
        if recipe.value is None and not whole and all(given.get(array, False) for array in needs):
            groups.setdefault((type(recipe.ratio), type(recipe.surrogate)), []).append(name)
    found = [Family(tuple(names)) for names in groups.values()]
    variants = [
        Family(tuple(names), by_sequence=True)
        for (ratio, surrogate), names in groups.items()
        if ratio is TokenRatio and "sequence" in surrogate.units and (SequenceRatio, surrogate) not in groups
    ]
    return found + variants
