"""Whether a server computes what the trainer computes: fixed answers, scored by both.

The server scores fixed prompts (teacher forcing, temperature 1) and continues them at the temperature of the run; the
trainer scores both. So weights that were not replaced, or wrongly, a model of another kind, log-probs of another
temperature and a stale version all show before the first answer that would be trained on.
"""

import functools

import jax
import numpy as np

from jaxrl_llm.ground.array_typing import Array, Params
from jaxrl_llm.models import Model
from jaxrl_llm.models.scoring import score
from jaxrl_llm.rollout.server import Answer

ANSWER = 8  # tokens, at most
_ROWS, _PROMPT = 8, 12
# Of |delta log p|: the median, which a flipped near-tie of the router does not move, and the share above 0.01.
_MEDIAN = {"float32": 1e-4, "bfloat16": 2e-2}
_SHARE = {"float32": 0.25, "bfloat16": 0.9}


def fixed_prompts(vocab_size: int, prompt_length: int) -> np.ndarray:
    """[rows, length] token ids, the same for every run of this vocabulary."""
    return np.random.default_rng(0).integers(0, vocab_size, (_ROWS, max(2, min(_PROMPT, prompt_length))), np.int32)


def check(
    address: str,
    model: Model,
    params: Params,
    prompts: np.ndarray,
    answers: list[Answer],
    *,
    temperature: float,
    dtype: str,
) -> float:
    """The median |delta log p| between a server's answers to `fixed_prompts` and the trainer.

    Raises:
      ValueError: it is beyond what the dtype explains; the message says what is off.
    """
    width = prompts.shape[1]
    tokens = np.concatenate([prompts, np.array([one.tokens for one in answers], np.int32)], axis=1)
    plain = np.asarray(_own(model, 1.0, params, tokens))
    forced = np.abs(plain[:, 1:width] - np.array([one.prompt_logprobs for one in answers]))
    if fault := _beyond(forced, dtype):
        raise ValueError(
            f"{address} does not serve these weights: {fault} over {forced.size} tokens of fixed prompts; its weights "
            "were not replaced, or wrongly, or its model is another"
        )
    theirs = np.array([one.logprobs for one in answers])
    own = plain if temperature == 1 else np.asarray(_own(model, temperature, params, tokens))
    sampled = np.abs(own[:, width:] - theirs)
    if fault := _beyond(sampled, dtype):
        raw = temperature != 1 and not _beyond(np.abs(plain[:, width:] - theirs), dtype)
        raise ValueError(
            f"{address} gives log-probs of temperature 1, not {temperature}: start it with --logprobs-mode "
            "processed_logprobs"
            if raw
            else f"{address} scores what it samples unlike the trainer, at temperature {temperature}: {fault} over "
            f"{sampled.size} tokens, while it scores prompts like the trainer; look at its --logprobs-mode and at "
            "top_k and top_p"
        )
    return float(np.median(np.concatenate([forced, sampled], axis=1)))


def _beyond(gap: np.ndarray, dtype: str) -> str:
    median, share = float(np.median(gap)), float((gap > 1e-2).mean())
    if median <= _MEDIAN[dtype] and share <= _SHARE[dtype]:
        return ""
    return f"median |delta log p| {median:.2g} (bound {_MEDIAN[dtype]:.0e}), largest {gap.max():.2g}"


@functools.partial(jax.jit, static_argnums=(0, 1))
def _own(model: Model, temperature: float, params: Params, tokens: Array) -> Array:
    return score(model, params, tokens, jax.numpy.ones_like(tokens), temperature=temperature).logprobs
