"""What configs of earlier versions have or lack: a recorded run, and the hash of its config, stay what they were."""

from collections.abc import Mapping
from typing import Any

# Fields that came later, with the value that does what runs without the field did. The hash leaves them out there.
_CAME: dict[tuple[str, str], Any] = {
    ("mesh", "dcn_shape"): (),
    ("rollout", "deadline_s"): 300.0,
    ("rollout", "engine"): "jax",
    ("rollout", "lag"): 0,
    ("rollout", "launch"): "",
    ("rollout", "mesh_shape"): (),
    ("rollout", "min_p"): 0.0,
    ("rollout", "router_bias"): 0.0,
    ("rollout", "router_gates"): "same",
    ("rollout", "servers"): (),
    ("rollout", "weights_dir"): "",
    ("updates", "stop_at_kl"): 0.0,
}

# Fields that left, with the value that the hash still has for them.
_LEFT: dict[tuple[str, str], Any] = {("replay", "predictor_learning_rate"): 2e-3}

# Choices that came later, with that whose gradient they have, and whose name the hash has for both.
_ALSO = {("updates", "layout", "auto"): "padded"}

# Choices that left, with the last commit that runs them. No other choice read the fields above.
_GONE = {("replay", "mode", "PR2"): "ae394b4"}


def as_today(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The config that the file `where` records, with the fields of today; raises ValueError for a choice that left."""
    out = _copy(config)
    for (block, field, choice), commit in _GONE.items():
        if out.get(block, {}).get(field) == choice:
            raise ValueError(f"{where} has {block}.{field}={choice!r}, which is no more; open it with commit {commit}")
    for (block, field), value in _CAME.items():
        out.get(block, {}).setdefault(field, value)
    for block, field in _LEFT:
        out.get(block, {}).pop(field, None)
    return out


def as_hashed(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the fields that its hash has always been made of."""
    out = _copy(config)
    for (block, field), value in _CAME.items():
        given = out[block].get(field, value)
        if (tuple(given) if isinstance(given, list) else given) == value:
            out[block].pop(field, None)
    for (block, field, choice), earlier in _ALSO.items():
        if out[block][field] == choice:
            out[block][field] = earlier
    for (block, field), value in _LEFT.items():
        out[block].setdefault(field, value)
    return out


def _copy(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: dict(block) if isinstance(block, Mapping) else block for name, block in config.items()}
