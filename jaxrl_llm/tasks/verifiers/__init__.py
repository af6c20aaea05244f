"""What an answer is worth. In: prompt, answer, the right answer. Out: a reward. Verifiers by name or of the user's
own; those run in worker processes with limits of time and memory."""

from jaxrl_llm.tasks.verifiers.named_verifiers import MathVerifier, UserVerifier, exact, number, numeric, verifier
from jaxrl_llm.tasks.verifiers.verifier_pool import TIMEOUT, Question, Verdict, close, judge, submit

__all__ = [
    "TIMEOUT",
    "MathVerifier",
    "Question",
    "UserVerifier",
    "Verdict",
    "close",
    "exact",
    "judge",
    "number",
    "numeric",
    "submit",
    "verifier",
]
