"""Modular arithmetic: '(45*67)%97=' -> '8'."""

import operator

import numpy as np

from jaxrl_llm.ground.ranges import within
from jaxrl_llm.tasks.base import Row, Task
from jaxrl_llm.tasks.tokenizers.plain_tokenizers import CharTokenizer

_APPLY = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def modular(*, modulus: int = 97, operators: str = "+-*") -> Task:
    """Apply one operator to two residues and reduce; there are modulus**2 prompts for each operator."""
    within("modular.modulus", modulus, 2, 9999)
    if not operators or len(set(operators)) != len(operators) or not set(operators) <= set(_APPLY):
        raise ValueError(f"modular.operators={operators!r} must be some of '+-*', each at most once; e.g. '+-'")
    width = len(str(modulus - 1))

    def sample(rng: np.random.Generator) -> tuple[str, str]:
        left, right = map(int, rng.integers(0, modulus, size=2))
        sign = operators[int(rng.integers(len(operators)))]
        return f"({left}{sign}{right})%{modulus}=", str(_APPLY[sign](left, right) % modulus)

    def verify(prompt: str, answer: str, gold: str, row: Row) -> float:
        inside, _ = prompt.removeprefix("(").split(")")
        sign = next(s for s in _APPLY if s in inside)
        left, right = inside.split(sign)
        return float(answer == str(_APPLY[sign](int(left), int(right)) % modulus))

    return Task(
        name="modular",
        prompt_length=2 * width + len(str(modulus)) + 5,
        answer_length=width + 1,
        tokenizer=CharTokenizer(f"0123456789{operators}()%="),
        sample=sample,
        verify=verify,
    )
