"""Rewards of answers. In: prompt, answer, the right answer. Out: a reward. Verifiers by name or of the user's
own; those run in worker processes with limits of time and memory."""

from jaxrl_llm.ground.by_name import ByName
from jaxrl_llm.ground.worker_errors import TIMEOUT
from jaxrl_llm.tasks.base import Question, Verdict
from jaxrl_llm.tasks.verifiers.verdicts import are_right, submit

_LATER = ByName(
    {
        "close": "jaxrl_llm.tasks.verifiers.verifier_pool",
        "exact": "jaxrl_llm.tasks.verifiers.named_verifiers",
        "gold_number": "jaxrl_llm.tasks.verifiers.answer_grammar",
        "number": "jaxrl_llm.tasks.verifiers.answer_grammar",
        "numeric": "jaxrl_llm.tasks.verifiers.named_verifiers",
        "verifier": "jaxrl_llm.tasks.verifiers.named_verifiers",
    }
)
__getattr__ = _LATER.attribute

__all__ = [  # and what `_LATER` names
    "TIMEOUT",
    "Question",
    "Verdict",
    "are_right",
    "submit",
]
