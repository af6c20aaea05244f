"""The tokens of a capture scored by the checkpoint that sampled them, held against the log-probs that were stored."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import models
from jaxrl_llm.audit.batch_faults import APART, gap, moved
from jaxrl_llm.audit.capture import Capture, Fault
from jaxrl_llm.models import scoring

_TEMPERATURES = (1.0, 0.6, 0.7, 0.8, 0.9, 0.5, 0.4, 0.3, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.8, 2.0)
_STORED = ("logprobs", "old_logprobs", "sampler_logprobs")


@dataclasses.dataclass(frozen=True)
class Match:
    """How stored log-probs come closest to the model's: at a temperature, moved by some places.

    gap: mean distance in nats a token.
    """

    temperature: float
    places: int
    gap: float

    @property
    def found(self) -> bool:
        return self.gap <= APART

    def __str__(self) -> str:
        place = f", moved by {self.places} place" if self.places else ""
        words = f"the model's at temperature {self.temperature:g}{place}" if self.found else "not the model's"
        return f"{words} ({self.gap:.1e} nats a token apart)"


def scorer(capture: Capture, folder: Path) -> Callable[[float], np.ndarray]:
    """The log-probs of the answers' tokens, [b t], by temperature: one forward, and a head for every temperature."""
    if not capture.has("tokens"):
        raise ValueError("--model scores tokens, and the capture has none; save tokens and attention_mask")
    ids, mask = np.asarray(capture["tokens"], np.int32), capture.mask
    model, params = models.load_pretrained(folder, dtype="float32")
    if ids.max() >= model.config.vocab_size:
        raise ValueError(
            f"token {ids.max()} of the capture is not among the {model.config.vocab_size} of {folder}; "
            "give the checkpoint that sampled the answers"
        )
    # Without attention_mask: all of the prompt, and an answer up to its last token that counts.
    answers = np.cumsum(mask[:, ::-1], 1)[:, ::-1] > 0
    prompts = np.ones((len(ids), ids.shape[1] - mask.shape[1]), bool)
    attended = capture.get("attention_mask", np.concatenate([prompts, answers], 1))
    tokens, segment_ids = jnp.asarray(np.maximum(ids, 0)), jnp.asarray(attended, jnp.int32)
    hidden = scoring.score(model, params, tokens, segment_ids).hidden
    head, states = model.head(params).astype(hidden.dtype), hidden.reshape(-1, hidden.shape[-1])

    def at(temperature: float) -> np.ndarray:
        divisor = temperature * model.config.logits_scaling
        logprobs = scoring.selected_logprobs(states, head, scoring.following(tokens).reshape(-1), temperature=divisor)[
            0
        ]
        aligned = scoring.align(logprobs.reshape(tokens.shape), segment_ids)
        return np.asarray(aligned[:, -mask.shape[1] :], np.float64)

    return at


def matches(capture: Capture, folder: Path) -> dict[str, Match]:
    """{stored log-probs: their match}.

    Raises:
      FileNotFoundError, ValueError: the folder is no checkpoint, or not one of these tokens; the capture has no tokens.
    """
    out: dict[str, Match] = {}
    with jax.enable_x64(False):
        score = scorer(capture, folder)
        for temperature in dict.fromkeys((float(capture.get("temperature", 1.0)), *_TEMPERATURES)):
            logprobs = score(temperature)
            for name, places in itertools.product(filter(capture.has, _STORED), (0, 1, -1)):
                match = Match(temperature, places, gap(moved(capture[name], places), logprobs, capture.mask))
                out[name] = min(match, out.get(name, match), key=lambda one: one.gap)
            if all(match.gap < APART / 10 for match in out.values()):
                break
    return out


def faults(capture: Capture, found: dict[str, Match]) -> Iterator[Fault]:
    """The faults that matches show; the checkpoint is the policy that sampled, as is that of the first update."""
    sampled, old = (found.get(name) for name in ("sampler_logprobs", "old_logprobs"))
    wanted = capture.get("temperature", sampled.temperature if sampled and sampled.found else None)
    for name, match in found.items():
        if match.found and match.places:
            yield f"{name}_shifted", f"{name} are the model's once moved by {match.places} place"
        elif match.found and name != "sampler_logprobs" and wanted and abs(match.temperature - wanted) > 0.05:
            said = f"{name} are the model's at temperature {match.temperature:g}"
            yield "temperature_missing", f"{said}, and the answers were sampled at {wanted:g}"
    if old and not old.found and np.array_equal(capture.old[capture.mask], capture["logprobs"][capture.mask]):
        said = f"are {old.gap:.3g} nats a token from the model's at any temperature: they are of a later policy"
        yield "old_equals_now", f"old log-probs equal those of now to the bit, and {said}"
    if not any(match.found for match in found.values()):
        name, nearest = min(found.items(), key=lambda one: one[1].gap)
        said = f"the nearest, {name}, are {nearest.gap:.3g} nats a token apart"
        yield "model_of_no_logprobs", f"no stored log-probs are the model's; {said}"


def scored(capture: Capture, folder: Path) -> tuple[list[Fault], list[str]]:
    """Faults, and a line for every stored array. Raises as `matches`."""
    found = matches(capture, folder)
    return list(faults(capture, found)), [f"{name}: {match}" for name, match in found.items()]
