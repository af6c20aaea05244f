"""The start of all runs on preferences: one warm start a seed, so that their ends can be compared."""

from typing import Any

from jaxrl_llm.sweep import each, zipped

__all__ = ["SEEDS", "START", "named", "own_answers", "seeds"]

SEEDS = (0, 1, 2, 3, 4, 6, 7, 8, 9, 10)  # two batches of five; 5 was the pilot's
OWN = "runs/preferences/own/{seed}.jsonl"  # where own_pairs.py writes
START: dict[str, Any] = {
    "task.options": {"digits": 6, "train_size": 4096, "test_size": 512},
    "model.num_experts": 0,
    "model.num_hidden_layers": 2,
    "warm_start.steps": 400,
    "warm_start.target_pass_rate": 0.4,
    "checkpoint.every": 10_000,
    "log.diagnostics_every": 0,
    "evaluation.prompts": 256,
}


def named(arms: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"arm": name, **fields} for name, fields in arms.items()]


def seeds() -> list[dict[str, Any]]:
    """A seed changes the warm start too: another seed is another policy, pairs and prompts."""
    return zipped(each("seed", SEEDS), each("warm_start.seed", SEEDS))


def own_answers() -> list[dict[str, Any]]:
    """Every seed with the pairs of its own start's answers."""
    return zipped(seeds(), each("preference.file", [OWN.format(seed=seed) for seed in SEEDS]))
