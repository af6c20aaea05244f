"""Other inputs that a loss may have read: conventions that stacks add to a recipe, and mistakes with their evidence."""

import itertools
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxrl_llm import objectives
from jaxrl_llm.audit.advantage_conventions import Generation
from jaxrl_llm.audit.batch_faults import moved
from jaxrl_llm.audit.capture import Capture
from jaxrl_llm.audit.divisors import steps_of
from jaxrl_llm.audit.recomputed import Inputs, apart
from jaxrl_llm.audit.search import Replay
from jaxrl_llm.objectives.batch import mean_of_answer
from jaxrl_llm.objectives.further_corrections import high_entropy_mask
from jaxrl_llm.objectives.named_parts import CORRECTIONS
from jaxrl_llm.objectives.surrogates import Cispo

_QUANTILES = (0.2, 0.1, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.25, 0.75, 0.05, 0.15)
_ENTROPY_COEFFICIENTS = (0.01, 0.001, 0.005, 0.002, 0.003, 0.0001, 0.02, 0.05, 0.1)
_CORRECTIONS = ("tis", "icepop", "sequence_mask", "decoupled", "sequence_tis", "sequence_decoupled")
_CAPS = (2.0, 3.0, 5.0, 10.0, 1.5)
_DRIFTS = (0.1, 0.05, 0.2, 0.5, 0.3, 0.02, 0.01, 1.0)


def plain(capture: Capture, inputs: Inputs) -> Iterator[Replay]:
    """The arrays as they are; with the sampler's weights, if the capture has them."""
    if not capture.has("sampler_ratio"):
        yield Replay(capture, inputs)
        return
    ratio, settings = capture["sampler_ratio"], _correction_of(capture, inputs)
    yield Replay(capture, inputs.replace(weight=ratio), settings)
    inside = inputs.old - np.log(np.maximum(ratio, 1e-8))  # as TRL's VESPO has it
    yield Replay(capture, inputs.replace(old=inside), settings | {"sampler_ratio": "inside the ratio"})


def conventions(capture: Capture, inputs: Inputs) -> Iterator[Replay]:
    """An entropy bonus by the mean over tokens, and weights on the policy term that some stacks have as options."""
    base = inputs.replace(weight=capture.get("sampler_ratio", inputs.weight))
    if capture.has("entropy"):  # the gradient of its bonus is not by the log-probs
        mean = float(capture["entropy"][inputs.mask].mean()) / steps_of(capture)[0]
        yield from (Replay(capture, base, {"entropy_coef": x}, bonus=-x * mean) for x in _ENTROPY_COEFFICIENTS)
    seen: set[bytes] = set()
    for settings, weight in _weights(capture, inputs):
        told = np.where(inputs.mask, weight, 1.0)
        if (told != 1).any() and told.tobytes() not in seen:
            seen.add(told.tobytes())
            only = Cispo if "floor" in settings else None
            yield Replay(capture, base.replace(weight=base.weight * told), settings, only=only)


def _weights(capture: Capture, inputs: Inputs) -> Iterator[tuple[dict[str, Any], np.ndarray]]:
    mask, bad = inputs.mask, inputs.advantages < 0
    if capture.has("entropy"):
        for share in _QUANTILES:
            high = high_entropy_mask(jnp.asarray(capture["entropy"]), share, jnp.asarray(mask))
            yield {"correction": "high_entropy", "correction_cap": share}, np.asarray(high)
    for around, other in (("sampler_logprobs", inputs.sampler), ("old_logprobs", inputs.old)):
        if other is not None:
            drift = np.asarray(mean_of_answer(-apart(inputs, inputs.logprobs, other), jnp.asarray(mask)))
            levels = [-np.inf, *np.unique(drift[bad & mask])]
            for least, dropped in itertools.pairwise(levels):  # the limit lies between two answers, or below all
                limit = next((x for x in _DRIFTS if least <= x < dropped), least if np.isfinite(least) else dropped)
                yield {"off_policy_mask": around, "delta": float(f"{limit:.3g}")}, ~(bad & (drift >= dropped))
    ratio = np.exp(np.where(mask, inputs.logprobs - inputs.old, 0))
    for floor in (0.8, 1.0, 0.9, 0.7, 0.5):  # of CISPO in verl, 0.8 there; SkyRL's default is 1
        yield {"floor": floor}, np.maximum(floor / ratio, 1)
    if inputs.sampler is not None and not capture.has("sampler_ratio"):
        yield from _corrections(inputs)


def _corrections(inputs: Inputs) -> Iterator[tuple[dict[str, Any], np.ndarray]]:
    """The sampler's corrections of the objectives that weigh tokens or answers."""
    log_k, batch = apart(inputs, inputs.old, inputs.sampler), inputs.batch(objectives.make("grpo"))
    for name, cap in itertools.product(_CORRECTIONS, _CAPS):
        weight = CORRECTIONS[name](cap=cap).weight(log_k, batch)
        yield {"correction": name, "correction_cap": cap}, np.asarray(weight)


def _correction_of(capture: Capture, inputs: Inputs) -> dict[str, Any]:
    """The correction that the given weights are, if the sampler's log-probs are there to tell."""
    for settings, weight in _corrections(inputs) if inputs.sampler is not None else ():
        if np.allclose(np.where(inputs.mask, weight - capture["sampler_ratio"], 0), 0, atol=2e-5):
            return settings
    return {"correction": "sampler_ratio"}


# A mistake: its name, how it comes about, and the inputs that are others under it.
Mistake = tuple[str, str, dict[str, Any]]


def mistakes(capture: Capture, inputs: Inputs) -> Iterator[Replay]:
    """The inputs of known mistakes. Whatever reproduces the reported loss and gradient names its fault."""
    of_weights: list[Mistake] = []
    if capture.has("sampler_ratio"):
        of_weights, inputs = _of_weights(capture, inputs), inputs.replace(weight=capture["sampler_ratio"])
    others = (_of_masks(capture, inputs), _of_ratios(inputs), _of_advantages(capture, inputs))
    for name, said, changes in itertools.chain(of_weights, *others):
        yield Replay(capture, inputs.replace(**changes), {}, (name, f"loss and gradient are reproduced {said}"))


# fmt: off
def _of_weights(capture: Capture, inputs: Inputs) -> list[Mistake]:
    ratio = capture["sampler_ratio"]
    known = inputs if inputs.sampler is not None else inputs.replace(sampler=inputs.old)
    whole = np.exp(np.asarray(apart(known, known.old, known.sampler)))
    return [
        ("sampler_ratio_unused",        "without sampler_ratio",             {"weight": np.ones(ratio.shape)}),
        ("sampler_ratio_inverted",      "with 1 / sampler_ratio",            {"weight": 1 / np.maximum(ratio, 1e-8)}),
        ("sampler_ratio_twice",         "with the square of sampler_ratio",  {"weight": ratio**2}),
        ("sampler_ratio_not_truncated", "with old / sampler as it is",       {"weight": whole}),
    ]


def _of_masks(capture: Capture, inputs: Inputs) -> list[Mistake]:
    mask = inputs.mask
    first, last = (mask & (np.cumsum(mask, 1) == 1)), mask & (np.cumsum(mask[:, ::-1], 1)[:, ::-1] == 1)
    ended = np.broadcast_to(~mask[:, -1:], mask.shape)
    attended = capture.get("attention_mask", mask)[:, -mask.shape[1] :]
    counted = "without the policy term of the {} token, though it is counted"
    return [
        ("mask_shifted",               "with the mask one place to the right",      {"mask": moved(mask, 1, False)}),
        ("eos_left_out",               "without the last token of each answer",     {"mask": mask & ~last}),
        ("first_token_left_out",       "without the first token of each answer",    {"mask": mask & ~first}),
        ("mask_shifted",               "with the mask one place to the left",       {"mask": moved(mask, -1, False)}),
        ("padding_counted",            "with every place counted, padding too",     {"mask": np.ones_like(mask)}),
        ("attention_mask_as_mask",     "with attention_mask in place of mask",      {"mask": attended}),
        ("truncated_answers_left_out", "without the answers that fill all places",  {"mask": mask & ended}),
        ("truncated_answers_left_out", "without their policy term, though they are counted", {"weight": 1.0 * ended}),
        ("last_token_without_loss",    counted.format("last"),                      {"weight": 1.0 - last}),
        ("first_token_without_loss",   counted.format("first"),                     {"weight": 1.0 - first}),
    ]


def _of_ratios(inputs: Inputs) -> list[Mistake]:
    others = {name: x for name, x in (("sampler", inputs.sampler), ("ref", inputs.ref)) if x is not None}
    late = {"old": inputs.old} | {name: x for name, x in others.items() if name == "ref"}
    falling = np.where(np.where(inputs.mask, inputs.logprobs - inputs.old, 0) < 0, -1.0, 1.0)
    sign = np.where(inputs.advantages < 0, -1.0, 1.0)
    whatever = {"advantages": np.abs(inputs.advantages) * falling, "weight": inputs.weight * sign * falling}
    return [
        ("ratio_inverted", "with old / now as the ratio",                          {"power": -1.0}),
        ("old_ignored",    "with every ratio 1, though old_logprobs are others",   {"old": inputs.logprobs}),
        *((f"ratio_to_{name}", f"with ratios to {name}_logprobs, not to old_logprobs", {"old": other})
          for name, other in others.items()),
        *((f"{name}_logprobs_shifted", f"with {name}_logprobs one place too far to the {side}",
           {name: np.roll(x, by, 1)}) for name, x in late.items() for by, side in ((-1, "left"), (1, "right"))),
        ("clipped_on_both_sides", "with the ratio clipped whatever the sign of the advantage (no min)", whatever),
        ("max_instead_of_min", "with max(r A, clip(r) A) in place of min",
         {"advantages": -inputs.advantages, "weight": -inputs.weight}),
    ]


def _of_advantages(capture: Capture, inputs: Inputs) -> Iterator[Mistake]:
    stored, rows, generation = capture["advantages"], len(inputs.mask), Generation.of(capture)
    yield "advantages_negated", "with the advantages' sign turned round", {"advantages": -inputs.advantages}
    yield "loss_negated", "with the sign of the whole policy term turned round", {"weight": -inputs.weight}
    yield "advantages_without_sign", "with the absolute advantages", {"advantages": np.abs(inputs.advantages)}
    if stored.ndim > 1:
        return
    centred, other = stored - stored.mean(), "advantages_of_other_rows"
    first = [x[:rows] for x in [capture.get("batch_advantages", stored)] if len(x) >= rows]
    taken = [
        ("rewards_as_advantages", "with the rewards in place of the advantages", capture.get("rewards", stored)),
        ("advantages_centred_again", "with advantages less their mean over the micro-batch", centred),
        *(("advantages_whitened_again", "with advantages whitened over the micro-batch",
           centred / (stored.std(ddof=ddof) + 1e-8)) for ddof in (1, 0) if rows > ddof and np.ptp(stored)),
        *((other, "with each answer's advantage given to its neighbour", np.roll(stored, by)) for by in (1, -1)),
        (other, "with the advantages in reverse order", stored[::-1]),
        *((other, "with the first rows of batch_advantages, as before the shuffle", x) for x in first),
    ]
    places = capture["row"] if capture.has("row", "batch_rewards") else np.arange(rows)
    if generation is not None and len(generation.rewards) > places.max():
        told = ((one.settings, generation.in_file_order(one.advantages)[places]) for one in generation.conventions)
        taken += [("advantages_of_another_kind", f"with advantages of {settings}, not the stored ones", advantages)
                  for settings, advantages in told
                  if np.abs(advantages - stored).max() > 1e-3 * max(np.abs(stored).max(), 1e-6)]
    for name, said, advantages in taken:
        yield name, said, {"advantages": np.broadcast_to(advantages.reshape(rows, 1), inputs.mask.shape)}
# fmt: on
