"""The comparison of a server with the trainer: fixed answers, scored by both.

The server scores fixed prompts (teacher forcing, temperature 1) and continues them at the temperature of the run; the
trainer scores both, and routes both. So weights that were not replaced, or wrongly, a model of another kind, log-probs
of another temperature, and a record of experts that is of other layers or tokens, or of none, all show before the first
answer that would be trained on.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.ground import processes
from jaxrl_llm.ground.array_typing import Array, Params
from jaxrl_llm.models import Model
from jaxrl_llm.models.scoring import score
from jaxrl_llm.rollout.answer_fields import Answer

ANSWER = 8  # tokens, at most
_ROWS, _PROMPT = 8, 12
# Of |delta log p|: the median, which a flipped near-tie of the router does not move, and the share above 0.01.
_MEDIAN = {"float32": 1e-4, "bfloat16": 2e-2}
_SHARE = {"float32": 0.25, "bfloat16": 0.9}
# A token's experts are compared in a layer where the last that is chosen leads the next by more than rounding moves the
# numbers that the gate chooses by: so many of their standard deviations. A choice flipped before may move a few of
# these too.
_CLEAR = {"float32": 1e-3, "bfloat16": 0.1}
_DIFFER = {"float32": 0.05, "bfloat16": 0.2}  # of the experts of a layer


class Agreement(NamedTuple):
    gap: float  # median |delta log p|
    alike: float  # as in `RouteFormat`: log of the chance of the trainer's most frequent choice in every layer


def fixed_prompts(vocab_size: int, prompt_length: int) -> np.ndarray:
    """[rows, length] token ids, the same for every run of this vocabulary."""
    return np.random.default_rng(0).integers(0, vocab_size, (_ROWS, max(2, min(_PROMPT, prompt_length))), np.int32)


def columns(answers: Sequence[Answer]) -> dict[str, Any]:
    """The answers to all prompts, which have one length, as `check` reads them: plain JSON values."""
    names = ("tokens", "logprobs", "prompt_logprobs", "experts")
    given = {name: [getattr(one, name) for one in answers] for name in names}
    return {name: None if any(one is None for one in each) else np.stack(each).tolist() for name, each in given.items()}


def check(
    address: str,
    model: Model,
    params: Params,
    prompts: np.ndarray,
    said: Mapping[str, Any],
    *,
    temperature: float,
    dtype: str,
) -> Agreement:
    """How far the `columns` of a server's answers to `fixed_prompts` are from the trainer; a collective.

    Raises:
      ValueError: farther than the dtype explains; the message says what is off.
    """
    width = prompts.shape[1]
    tokens = np.concatenate([prompts, np.array(said["tokens"], np.int32)], axis=1)
    plain, ranks = processes.fetch(_own(model, 1.0, params, tokens))
    forced = np.abs(plain[:, 1:width] - np.array(said["prompt_logprobs"]))
    if fault := _beyond(forced, dtype):
        raise ValueError(
            f"{address} does not serve these weights: {fault} over {forced.size} tokens of fixed prompts; its weights "
            "were not replaced, or wrongly, or its model is another"
        )
    theirs = np.array(said["logprobs"])
    own = plain if temperature == 1 else processes.fetch(_own(model, temperature, params, tokens))[0]
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
    alike = 0.0
    if said["experts"] is not None:
        ranks = ranks[:, :, :-1]  # the last token was not fed
        if fault := experts_differ(np.array(said["experts"]), ranks, dtype):
            raise ValueError(
                f"{address} returns other experts than the trainer's: {fault}, while it scores like the trainer; so "
                "its record is of other layers or tokens, or of none"
            )
        alike = _alike(ranks, len(said["experts"][0][0][0]))
    return Agreement(float(np.median(np.concatenate([forced, sampled], axis=1))), alike)


def experts_differ(theirs: np.ndarray, ranks: np.ndarray, dtype: str) -> str:
    """The first layer whose recorded experts are not those of the router, "" if there is none.

    Args:
      theirs: [b t l k].  ranks: [l b t e], by which the trainer's gate chooses; -inf outside of its groups.
    """
    k, experts = theirs.shape[-1], ranks.shape[-1]
    ordered = np.sort(ranks, axis=-1)
    lead = ordered[..., -k] - ordered[..., -k - 1] if k < experts else np.zeros(ranks.shape[:-1])
    clear = lead > _CLEAR[dtype] * np.std(ranks, axis=-1, where=np.isfinite(ranks))
    own, recorded = _chosen(ranks, k), np.moveaxis(theirs, 2, 0)
    missing = 1 - (own[..., :, None] == recorded[..., None, :]).any(axis=-1).mean(axis=-1)  # [l b t]
    for layer, (here, where) in enumerate(zip(missing, clear, strict=True)):
        if where.any() and (share := float(here[where].mean())) > _DIFFER[dtype]:
            return (
                f"{share:.0%} of those of its MoE layer {layer} (bound {_DIFFER[dtype]:.0%}), over {where.sum()} "
                "tokens whose choice is clear"
            )
    return ""


def _chosen(ranks: np.ndarray, k: int) -> np.ndarray:
    return np.sort(np.argsort(-ranks, axis=-1)[..., :k], axis=-1)


def _alike(ranks: np.ndarray, k: int) -> float:
    choices = _chosen(ranks, k).reshape(len(ranks), -1, k)
    counts = [np.unique(layer, axis=0, return_counts=True)[1] for layer in choices]
    return float(sum(np.log(each.max() / each.sum()) for each in counts))


def _beyond(gap: np.ndarray, dtype: str) -> str:
    median, share = float(np.median(gap)), float((gap > 1e-2).mean())
    if median <= _MEDIAN[dtype] and share <= _SHARE[dtype]:
        return ""
    return f"median |delta log p| {median:.2g} (bound {_MEDIAN[dtype]:.0e}), largest {gap.max():.2g}"


@functools.partial(jax.jit, static_argnums=(0, 1))
def _own(model: Model, temperature: float, params: Params, tokens: Array) -> tuple[Array, Array | None]:
    """The log-probs, and of every MoE layer the numbers by which the gate chooses."""
    whole = jax.numpy.ones_like(tokens)
    own = score(model, params, tokens, whole, temperature=temperature, router_logits=True)
    if own.routing is None or own.routing.logits is None:
        return own.logprobs, None
    gate = model.config.gate
    runs = [(kind, slice(at.start, at.stop)) for kind, at in model.config.runs if kind.endswith("moe")]
    weights = {
        name: jax.numpy.concatenate([params[kind]["mlp"][name][at] for kind, at in runs]) for name in gate.shapes(1)
    }
    return own.logprobs, jax.vmap(gate.ranks)(own.routing.logits, weights)
