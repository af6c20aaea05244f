"""Parts that a config names, each imported when a run asks for it."""

from jaxrl_llm.ground.by_name import ByName
from jaxrl_llm.ground.ranges import one_of
from jaxrl_llm.objectives.corrections import Correction, Product

ADVANTAGES = ByName(
    {
        "group": "jaxrl_llm.objectives.advantages:GroupAdvantage",
        "reinforce_pp": "jaxrl_llm.objectives.further_advantages:ReturnToGo",
        "group_kl": "jaxrl_llm.objectives.further_advantages:GroupOfKlRewards",
        "group_whitened": "jaxrl_llm.objectives.further_advantages:GroupWhitened",
        "pass_at_k": "jaxrl_llm.objectives.further_advantages:PassAtK",
        "best_of_group": "jaxrl_llm.objectives.further_advantages:BestOfGroup",
        "maxrl": "jaxrl_llm.objectives.further_advantages:MaxRL",
        "length_adaptive": "jaxrl_llm.objectives.further_advantages:LengthAdaptiveGae",
        "teacher": "jaxrl_llm.objectives.distillation:TeacherAdvantage",
        "none": "jaxrl_llm.objectives.distillation:NoAdvantage",
        "prompt_mean": "jaxrl_llm.objectives.further_advantages:PromptMean",
        "opo": "jaxrl_llm.objectives.further_advantages:LengthWeighted",
        "optimal_token": "jaxrl_llm.objectives.further_advantages:OptimalToken",
        "remax": "jaxrl_llm.objectives.further_advantages:GreedyBaseline",
    }
)
CORRECTIONS = ByName(
    {
        "tis": "jaxrl_llm.objectives.corrections:Truncated",
        "icepop": "jaxrl_llm.objectives.corrections:IcePop",
        "sequence_mask": "jaxrl_llm.objectives.corrections:SequenceMask",
        "decoupled": "jaxrl_llm.objectives.corrections:Decoupled",
        "sequence_tis": "jaxrl_llm.objectives.further_corrections:SequenceTruncated",
        "sequence_decoupled": "jaxrl_llm.objectives.further_corrections:SequenceDecoupled",
        "clamped": "jaxrl_llm.objectives.further_corrections:Clamped",
        "veto": "jaxrl_llm.objectives.further_corrections",
        "m2po": "jaxrl_llm.objectives.further_corrections:SecondMoment",
        "high_entropy": "jaxrl_llm.objectives.further_corrections:HighEntropy",
        "token_k1": "jaxrl_llm.objectives.further_corrections",
        "token_k2": "jaxrl_llm.objectives.further_corrections",
        "token_k3": "jaxrl_llm.objectives.further_corrections",
        "seq_sum_k1": "jaxrl_llm.objectives.further_corrections",
        "seq_sum_k2": "jaxrl_llm.objectives.further_corrections",
        "seq_sum_k3": "jaxrl_llm.objectives.further_corrections",
        "seq_mean_k2": "jaxrl_llm.objectives.further_corrections",
        "seq_mean_k3": "jaxrl_llm.objectives.further_corrections",
        "seq_max_k2": "jaxrl_llm.objectives.further_corrections",
        "seq_max_k3": "jaxrl_llm.objectives.further_corrections",
    }
)


def correction_named(name: str | None, cap: float | None = None) -> Correction | None:
    """The correction `name`, or the product of several joined by `*`; None for None. `cap` is that of the first."""
    if name is None:
        if cap is not None:
            raise ValueError(f"correction_cap={cap} without a correction; set correction to {', '.join(CORRECTIONS)}")
        return None
    first, *others = [part.strip() for part in name.split("*")]
    for part in (first, *others):
        one_of("correction", part, CORRECTIONS)
    leading = CORRECTIONS[first]() if cap is None else CORRECTIONS[first](cap=cap)
    return Product((leading, *(CORRECTIONS[part]() for part in others))) if others else leading
