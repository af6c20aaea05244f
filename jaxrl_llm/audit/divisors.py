"""The divisors that a loss of answers can have, by name: averages, accumulation, and the mistakes around them."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxrl_llm.audit.capture import Capture, Fault
from jaxrl_llm.audit.recomputed import Inputs
from jaxrl_llm.objectives.aggregation import AGGREGATIONS

BY_SEQUENCE, BY_TOKEN = "sequence_mean_token_mean", "token_mean"  # the two kinds of weights that tokens can have


@dataclasses.dataclass(frozen=True)
class Divisor:
    """A number that the weighted sum over tokens is divided by, and the aggregation that this amounts to."""

    value: float
    aggregation: str
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    fault: Fault | None = None


def steps_of(capture: Capture) -> list[int]:
    """Accumulation steps that the generation batch allows, the likeliest first."""
    if capture.has("accumulation"):
        return [max(int(capture["accumulation"]), 1)]
    rows = capture.mask.shape[0]
    whole = len(capture.get("batch_rewards", capture.mask)) // rows
    return [n for n in range(whole, 0, -1) if whole % n == 0] or [1]


def _answers(inputs: Inputs) -> list[tuple[int, dict[str, Any]]]:
    """The answers with a token that counts, and all answers where those are more."""
    rows, occupied = len(inputs.mask), int(inputs.mask.any(1).sum())
    return [(occupied, {})] + ([(rows, {"empty_answers": "counted"})] if rows > occupied else [])


def named(capture: Capture, inputs: Inputs, weights: str) -> list[Divisor]:
    """Divisors for tokens weighted by 1 / |y| (`BY_SEQUENCE`) or alike (`BY_TOKEN`), usual ones first."""
    tokens, steps, by_token = float(inputs.mask.sum()), steps_of(capture), weights == BY_TOKEN
    several, out = max(steps) > 1, []
    for n in steps:
        divided, fault = {"accumulation": n} if several else {}, None
        if n < steps[0]:
            said = (
                f"the generation batch is {steps[0]} micro-batches, and the loss of this one is an average of its own"
            )
            fault = "loss_not_divided_by_accumulation", f"{said}; right only if each micro-batch is an optimizer step"
        if by_token:
            own = divided | ({"tokens_of": "micro-batch"} if several else {})
            out.append(Divisor(tokens * n, BY_TOKEN, own, fault))
        kind = "sequence_mean_token_sum" if by_token else BY_SEQUENCE
        out += [Divisor(float(k * n), kind, said | divided, fault) for k, said in _answers(inputs)]
        if by_token and several and capture.has("batch_tokens"):
            out.append(Divisor(float(capture["batch_tokens"]) * n / steps[0], BY_TOKEN, divided, fault))
    return [*out, Divisor(1.0, "token_sum")] if by_token else out


def mistaken(capture: Capture, inputs: Inputs, weights: str) -> Iterator[Divisor]:
    """Divisors that are mistakes, with the fault that each is evidence of."""
    steps = steps_of(capture)
    for (name, said), value in _miscounted(capture, inputs).items() if weights == BY_TOKEN else ():
        fault = name, f"reproduced with {said} as the divisor"
        yield from (Divisor(value * n, BY_TOKEN, {}, fault) for n in steps if value > 0)
    usual = named(capture, inputs, weights)[0]
    more = f"divided by accumulation steps that the generation batch does not have ({steps[0]})"
    scaled = {float(n): f"1/{n} of the recipe's: {more}" for n in (2, 3, 4, 8, 16, 32)}
    scaled |= {1 / n: f"{n} times the recipe's" for n in (2, 4, 8)}
    for factor, said in scaled.items():
        fault = "loss_scaled", f"loss and gradient are {said}"
        yield dataclasses.replace(usual, value=usual.value * factor, fault=fault)


def _miscounted(capture: Capture, inputs: Inputs) -> dict[Fault, float]:
    tokens, answers = float(inputs.mask.sum()), _answers(inputs)[0][0]
    out = {
        ("eos_left_out_of_the_count", "the tokens without the last one of each answer"): tokens - answers,
        ("one_token_too_many_counted", "the tokens with one more for each answer"): tokens + answers,
    }
    if capture.has("attention_mask"):
        attended = capture["attention_mask"]
        out["prompt_counted", "the tokens of prompts and answers"] = float(attended.sum())
        out["prompt_and_padding_counted", "all places of prompts and answers"] = float(attended.size)
    if capture.has("batch_tokens"):
        said = "the tokens of the generation batch, times the accumulation steps"
        out["tokens_of_the_generation_batch", said] = float(capture["batch_tokens"]) * steps_of(capture)[0]
    return out


def constant(capture: Capture, inputs: Inputs, value: float) -> Iterator[Divisor]:
    """Divisors by answers times a constant length of at least the places of an answer, close to this value."""
    for n in steps_of(capture):
        for answers, said in _answers(inputs):
            length = round(value / (answers * n))
            if length >= inputs.mask.shape[1] and abs(length * answers * n / value - 1) < 1e-3:
                own = {"max_length": length} | ({"accumulation": n} if n > 1 else {}) | said
                yield Divisor(float(length * answers * n), "constant", own)


def weights_of(name: str, inputs: Inputs, batch: Any) -> np.ndarray:
    """The weight of every token under `BY_SEQUENCE` or `BY_TOKEN`, 0 where masked."""
    return np.where(inputs.mask, np.asarray(AGGREGATIONS[name]().weights(batch)), 0.0)
