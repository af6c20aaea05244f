"""The reward of the comparison, for a process without jaxrl_llm: `numeric` of jaxrl_llm.tasks.verifiers."""

import re

__all__ = ["reward_of"]


def reward_of(text: str, gold: str) -> float:
    """1 if the last number of an answer is the right one."""
    numbers = re.findall(r"\d+(?:\.\d+)?", text)
    return float(bool(numbers) and float(numbers[-1]) == int(gold))
