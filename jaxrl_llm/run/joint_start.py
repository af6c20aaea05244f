"""A comparison of what several processes must have in common, before the first of them makes anything."""

import os
from collections.abc import Mapping
from typing import Any

import jax

from jaxrl_llm.ground import processes
from jaxrl_llm.ground.by_name import ByName
from jaxrl_llm.run.settings import Settings

_OF_SEVERAL = ByName({"described": "jaxrl_llm.run.joint_facts"})


def check(
    config: Mapping[str, Any], settings: Settings, workdir: str | os.PathLike[str], *, restart: bool = False
) -> None:
    """A collective, the first after `start_up.join`.

    Raises:
      ValueError: in every process, with the first thing that is not the same in all of them and its values.
    """
    if jax.distributed.is_initialized():
        limit = settings.processes.start_timeout_s
        processes.require_same(_OF_SEVERAL["described"](config, settings, workdir, restart=restart), limit)
