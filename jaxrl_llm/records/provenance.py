"""The provenance of a run: its config and the file it came from, the commit, the versions, the device, the cores."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from jaxrl_llm.config.about import version_of
from jaxrl_llm.config.loading import Source
from jaxrl_llm.ground import hub
from jaxrl_llm.ground.machine import usable_cores
from jaxrl_llm.records import checkout, own_code


def describe(config: Mapping[str, Any], config_hash: str, source: Source) -> dict[str, Any]:
    """What config.json records; notes the code of the run as this user's own.

    source: the file whose tasks and objectives the config may name.
    """
    fetched = hub.revisions()
    return {
        "config": dict(config),
        "config_hash": config_hash,
        "source": dataclasses.asdict(source),
        "code": own_code.noted(source.file, config["task"]["options"]),
        "commit": checkout.commit(),
        "versions": versions(),
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "cores": len(usable_cores()),
        **({"fetched": fetched} if fetched else {}),
    }


def versions() -> dict[str, str | None]:
    """Of the packages that a run's numbers depend on."""
    packages = ("jaxrl_llm", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    return {name: version_of(name) for name in packages}
