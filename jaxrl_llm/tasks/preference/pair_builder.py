"""The TFDS builder of pairs made from a task. Imports tensorflow_datasets, so only preference.py imports it."""

import dataclasses
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from jaxrl_llm.tasks.base import Example, Task
from jaxrl_llm.tasks.builder import written
from jaxrl_llm.tasks.preference.pair_rules import Pair, PairRules, make_pairs
from jaxrl_llm.tasks.splits import data_name

__all__ = ["PairBuilder", "PairConfig", "prepare"]

_FINGERPRINTED = 64  # pairs that enter the name of the data


@dataclasses.dataclass(kw_only=True)
class PairConfig(tfds.core.BuilderConfig):
    """The pairs of one task under one set of rules; `splits` maps train and test to them."""

    splits: Mapping[str, Sequence[Pair]]


class PairBuilder(tfds.core.GeneratorBasedBuilder):
    """Examples {uid, prompt, chosen, rejected, margin}, one for each example of the task."""

    name = "jaxrl_llm_pairs"
    VERSION = tfds.core.Version("1.0.0")

    def _info(self) -> tfds.core.DatasetInfo:
        texts = dict.fromkeys(("prompt", "chosen", "rejected"), tfds.features.Text())
        features = tfds.features.FeaturesDict({"uid": np.int64, **texts, "margin": np.float32})
        return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator[tuple[int, dict[str, Any]]]]:
        del dl_manager  # nothing is downloaded
        assert isinstance(self.builder_config, PairConfig)
        return {split: self._generate_examples(pairs) for split, pairs in self.builder_config.splits.items()}

    def _generate_examples(self, pairs: Sequence[Pair]) -> Iterator[tuple[int, dict[str, Any]]]:
        for pair in pairs:
            yield pair["uid"], dict(pair)


def prepare(task: Task, rules: PairRules, examples: Mapping[str, Sequence[Example]], data_dir: Path) -> Path:
    """The folder that holds the pairs, written first if it is not there; safe in several processes at once.

    Its name holds the task's data, the rules, and a digest of the first pairs that they give: data written by other
    code is never read.

    Raises:
        ValueError: see `make_pairs`; or data_dir cannot be written.
    """
    few = [examples["test"][i] for i in range(min(_FINGERPRINTED, len(examples["test"])))]
    drawn = repr((data_name(task), task.answer_length, rules, list(make_pairs(task, rules, few, "test"))))
    words = "-".join(f"{key}_{value}" for key, value in dataclasses.asdict(rules).items())
    digest = hashlib.blake2b(drawn.encode(), digest_size=4).hexdigest()
    name = f"{task.name}-{re.sub(r'[^a-z0-9_.-]', 'x', words)}-{digest}"

    def config(name: str) -> PairConfig:
        rows = {split: [source[i] for i in range(len(source))] for split, source in examples.items()}
        pairs = {split: list(make_pairs(task, rules, given, split)) for split, given in rows.items()}
        return PairConfig(name=name, splits=pairs)

    return written(PairBuilder, name, data_dir, config)
