"""Pairs of answers, one preferred to the other. In: a task, or a JSON Lines file of pairs. Out: streams of encoded
pairs for the objectives that read them."""

from jaxrl_llm.ground.by_name import ByName
from jaxrl_llm.tasks.preference.pair_config import CORRUPTIONS, PairRules, PreferenceConfig

_LATER = ByName(
    {
        "Pair": "jaxrl_llm.tasks.preference.pair_rules",
        "PairBatch": "jaxrl_llm.tasks.preference.pair_batches",
        "PairEncoder": "jaxrl_llm.tasks.preference.pair_batches",
        "PairSplits": "jaxrl_llm.tasks.preference.pair_file",
        "all_pairs": "jaxrl_llm.tasks.preference.pair_batches",
        "file_identity": "jaxrl_llm.tasks.preference.pair_file",
        "make_pairs": "jaxrl_llm.tasks.preference.pair_rules",
        "pair_stream": "jaxrl_llm.tasks.preference.pair_batches",
        "pairs": "jaxrl_llm.tasks.preference.pair_rules",
        "read_pairs": "jaxrl_llm.tasks.preference.pair_file",
        "read_splits": "jaxrl_llm.tasks.preference.pair_file",
    }
)
__getattr__ = _LATER.attribute

__all__ = ["CORRUPTIONS", "PairRules", "PreferenceConfig"]  # and what `_LATER` names
