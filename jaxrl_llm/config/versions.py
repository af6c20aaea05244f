"""Fields that a config of an earlier version lacks, or has beyond today's. The run and its hash stay what they were."""

from collections.abc import Mapping
from typing import Any

__all__ = ["as_hashed", "as_today"]

# block, field: what runs without the field did. At that value it stays out of the hash.
_CAME: dict[tuple[str, str], Any] = {("rollout", "mesh_shape"): ()}

# block, field: (the value at which the field did nothing, which stays in the hash; the choice that read it, and the
# last commit with that choice).
_LEFT: dict[tuple[str, str], tuple[Any, tuple[str, str], str]] = {
    ("replay", "predictor_learning_rate"): (2e-3, ("mode", "PR2"), "ae394b4"),
}


def as_today(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A config that `where` records, with the fields of today.

    Raises:
        ValueError: it makes a choice that is no more.
    """
    out = {key: dict(value) if isinstance(value, Mapping) else value for key, value in config.items()}
    for (block, field), value in _CAME.items():
        out[block].setdefault(field, value)
    for (block, field), (_, (choice, gone), commit) in _LEFT.items():
        if out[block].get(choice) == gone:
            raise ValueError(f"{where} has {block}.{choice}={gone!r}, which is no more; open it with commit {commit}")
        out[block].pop(field, None)
    return out


def as_hashed(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config with the fields that its hash has always been made of."""
    out = {key: dict(value) if isinstance(value, Mapping) else value for key, value in config.items()}
    for (block, field), value in _CAME.items():
        if tuple(out[block].get(field, value)) == value:
            out[block].pop(field, None)
    for (block, field), (value, _, _) in _LEFT.items():
        out[block].setdefault(field, value)
    return out
