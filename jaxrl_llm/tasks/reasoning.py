"""Any of the generated tasks of the library reasoning-gym, with its own verifier."""

import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxrl_llm.ground.ranges import suggestion
from jaxrl_llm.tasks.base import Draw, Task, register
from jaxrl_llm.tasks.tokenizers import ByteTokenizer

_INDICES = 2**31 - 1  # entries are made from their index alone
_NO_SETTINGS: Mapping[str, Any] = {}


@register
def reasoning_gym(
    *,
    dataset: str = "chain_sum",
    settings: Mapping[str, Any] = _NO_SETTINGS,
    prompt_length: int = 256,
    answer_length: int = 256,
) -> Task:
    """`dataset` of `reasoning_gym.create_dataset` with its own `settings`, such as {"min_digits": 2}."""
    written = json.dumps(dict(settings), sort_keys=True)

    def sample(rng: np.random.Generator) -> Draw:
        index = int(rng.integers(_INDICES))
        entry = _dataset(dataset, written)[index]
        return entry["question"], str(entry["answer"] or ""), {"index": index}

    _dataset(dataset, written)  # so that a mistake shows at the start
    return Task(
        name="reasoning_gym",
        prompt_length=prompt_length,
        answer_length=answer_length,
        tokenizer=ByteTokenizer(),
        sample=sample,
        drop_long=True,
        verify=ReasoningGymVerifier(dataset, written),
        isolated=True,
    )


@dataclasses.dataclass(frozen=True)
class ReasoningGymVerifier:
    """The data set's own score of an answer, in [0, 1]; the entry is made again from its index."""

    dataset: str
    settings: str  # JSON

    def load(self) -> None:
        _dataset(self.dataset, self.settings)

    def __call__(self, prompt: str, answer: str, gold: str, row: Mapping[str, Any]) -> float:
        dataset = _dataset(self.dataset, self.settings)
        return dataset.score_answer(answer.strip(), dataset[row["index"]])


@functools.lru_cache(maxsize=4)
def _dataset(name: str, settings: str) -> Any:
    try:
        import reasoning_gym as library
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ImportError("the task reasoning_gym needs its library; pip install 'jaxrl_llm[tasks]'") from error
    if name not in DATASETS:
        raise ValueError(
            f"reasoning_gym.dataset={name!r} is unknown{suggestion(name, DATASETS)}; "
            f"there are {', '.join(sorted(DATASETS))}"
        )
    try:
        return library.create_dataset(name, seed=0, size=_INDICES, **json.loads(settings))
    except (TypeError, AssertionError, ValueError) as error:
        raise ValueError(f"reasoning_gym.settings={settings} do not fit {name!r} ({error}); correct them") from error
