"""The variants of a sweep file: what makes each, what it decides in one line, and parts of it by its conditions."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from jaxrl_llm.sweep import Sweep

Variants = Mapping[str, tuple[Callable[[], Sweep], str]]


def variant_of(variants: Variants, variant: str) -> Sweep:
    """The sweep of NAME or NAME@PART,PART: of the runs those whose labels have these parts, "dense" of "dense, lr 1".

    A seed is a part too, "seed 3".

    Raises:
        ValueError: there is no such variant, or no run with such parts.
    """
    name, _, part = variant.partition("@")
    if name not in variants:
        raise ValueError(f"unknown variant {name!r}; it has {', '.join(variants)}")
    make, decides = variants[name]
    whole, words = make(), part.split(",") if part else []
    runs = [run for run in whole.runs if set(words) <= _parts(run)]
    if not runs:
        known = sorted({part for run in whole.runs for part in _parts(run)})
        raise ValueError(f"{variant} has no run; the parts of {name} are {', '.join(known)}")
    return replace(whole, question=decides, runs=runs)


def _parts(run: Mapping[str, Any]) -> set[str]:
    return {*run.get("condition", "").split(", "), f"seed {run['seed']}"}
