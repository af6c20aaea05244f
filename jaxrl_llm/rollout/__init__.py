"""Groups of answers to prompts. In: parameters and prompts. Out: a `Rollout` of tokens, the sampler's log-probs and
the experts of every token, and what the task's verifier says of the answers. One decoder, two loops: all answers at
once, or slots that refill."""

from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.rollout import Rollout
from jaxrl_llm.rollout.sampling import Sampling
from jaxrl_llm.rollout.verification import verify

__all__ = ["Engine", "Rollout", "Sampling", "verify"]
