"""Pairs of answers, one preferred to the other. In: a task, or a JSON Lines file of pairs. Out: streams of encoded
pairs for the objectives that read them."""

from jaxrl_llm.tasks.preference.pair_config import PairSplits, PreferenceConfig, file_identity
from jaxrl_llm.tasks.preference.pair_file import read_pairs
from jaxrl_llm.tasks.preference.pair_rules import CORRUPTIONS, Pair, PairRules, make_pairs, pairs
from jaxrl_llm.tasks.preference.pair_stream import PairBatch, PairEncoder, all_pairs, pair_stream

__all__ = [
    "CORRUPTIONS",
    "Pair",
    "PairBatch",
    "PairEncoder",
    "PairRules",
    "PairSplits",
    "PreferenceConfig",
    "all_pairs",
    "file_identity",
    "make_pairs",
    "pair_stream",
    "pairs",
    "read_pairs",
]
