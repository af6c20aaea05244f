"""Sorting digits: '3915062847=' -> '0123456789'."""

import numpy as np

from jaxrl_llm.ground.ranges import within
from jaxrl_llm.tasks.base import Row, Task
from jaxrl_llm.tasks.tokenizers.plain_tokenizers import CharTokenizer


def sort(*, digits: int = 10) -> Task:
    """Write the digits of the prompt in ascending order; there are 10**digits prompts."""
    within("sort.digits", digits, 1, 64)

    def sample(rng: np.random.Generator) -> tuple[str, str]:
        text = "".join(map(str, rng.integers(0, 10, size=digits)))
        return f"{text}=", "".join(sorted(text))

    def verify(prompt: str, answer: str, gold: str, row: Row) -> float:
        return float(answer == "".join(sorted(prompt.removesuffix("="))))

    return Task(
        name="sort",
        prompt_length=digits + 1,
        answer_length=digits + 1,
        tokenizer=CharTokenizer("0123456789="),
        sample=sample,
        verify=verify,
    )
