"""What an answer is worth. In: prompt, answer, the right answer. Out: a reward. Verifiers by name or of the user's
own; those run in worker processes with limits of time and memory."""

from jaxrl_llm.ground.workers import TIMEOUT
from jaxrl_llm.tasks.verifiers.named_verifiers import code_files, exact, number, numeric, own_answer, verifier
from jaxrl_llm.tasks.verifiers.verifier_pool import Verdict, close, submit

__all__ = [
    "TIMEOUT",
    "Verdict",
    "close",
    "code_files",
    "exact",
    "number",
    "numeric",
    "own_answer",
    "submit",
    "verifier",
]
