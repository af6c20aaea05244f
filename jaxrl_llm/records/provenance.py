"""The provenance of a run: its config and the file it came from, the commit, the versions, the device, the cores."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from jaxrl_llm.config.about import version_of
from jaxrl_llm.config.loading import Source
from jaxrl_llm.ground import hub_names
from jaxrl_llm.ground.machine import usable_cores
from jaxrl_llm.records import checkout, own_code
from jaxrl_llm.records.recorded import FORMAT


def describe(config: Mapping[str, Any], config_hash: str, source: Source | None) -> dict[str, Any]:
    """Return what config.json records, and note the run's code as this user's own.

    source: the file whose tasks and objectives the config may name; None of a config that was made in Python.
    """
    fetched = dict(hub_names.REVISIONS)
    return {
        "format": FORMAT,
        "config": dict(config),
        "config_hash": config_hash,
        **({"source": dataclasses.asdict(source)} if source else {}),
        "code": own_code.noted(source.file if source else "", own_code.naming(config)),
        "commit": checkout.commit(),
        "versions": versions(),
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "cores": len(usable_cores()),
        **({"fetched": fetched} if fetched else {}),
    }


def versions() -> dict[str, str | None]:
    """Return the versions of the packages that a run's numbers depend on."""
    packages = ("jaxrl_llm", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    return {name: version_of(name) for name in packages}
