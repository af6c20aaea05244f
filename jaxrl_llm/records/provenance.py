"""The provenance of a run: its config and the file it came from, the commit, the versions, the device, the cores."""

import dataclasses
import importlib.metadata
from collections.abc import Mapping
from typing import Any

import jax

from jaxrl_llm.config.loading import Source
from jaxrl_llm.ground.machine import usable_cores
from jaxrl_llm.records import checkout


def describe(config: Mapping[str, Any], config_hash: str, source: Source) -> dict[str, Any]:
    """What config.json records. `source` is the file whose tasks and objectives the config may name."""
    packages = ("jaxrl_llm", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    return {
        "config": dict(config),
        "config_hash": config_hash,
        "source": dataclasses.asdict(source),
        "commit": checkout.commit(),
        "versions": {name: _version(name) for name in packages},
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "cores": len(usable_cores()),
    }


def _version(package: str) -> str | None:
    return next((found.version for found in importlib.metadata.distributions(name=package)), None)
