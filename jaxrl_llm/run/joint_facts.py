"""The texts that must be equal in all processes of a run.

These are versions, code, config, data and the checkpoint that a resume starts from. Devices, cores, time limits, where
logs go, and paths of what is known by its content may differ.
"""

import hashlib
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jaxrl_llm import tasks
from jaxrl_llm.config import loading
from jaxrl_llm.records import own_code, provenance
from jaxrl_llm.records.recorded import newest_checkpoint
from jaxrl_llm.run.settings import Settings, identity_fields

_FREE = ("processes.", "log.wandb")
_NUMERICS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl", "jax_threefry_partitionable")


def described(
    config: Mapping[str, Any], settings: Settings, workdir: str | os.PathLike[str], *, restart: bool = False
) -> dict[str, str]:
    """{what: a short text that is equal where it is the same}; with `restart` no checkpoint counts."""
    found = {f"version of {name}": str(version) for name, version in provenance.versions().items()}
    found["version of Python"] = platform.python_version()
    found |= {name: str(getattr(jax.config, name)) for name in _NUMERICS}
    found |= {f"code of {name}": digest for name, digest in _code().items()}
    fields = loading.flat(config) | loading.flat(identity_fields(config))  # of a checkpoint its content, not its path
    for name, value in sorted(fields.items()):
        if not name.startswith(_FREE):
            found[f"config.{name}"] = str(value)
    for path in own_code.verifier_files(own_code.naming(config)):
        found[f"code of {path.name}"] = _digest(path)
    found["data of the task"] = tasks.data_name(settings.task)
    found["newest checkpoint"] = "none, with --restart" if restart else newest_checkpoint(workdir)
    return found


def _code() -> dict[str, str]:
    """{file: digest} of the package, and of the configs and users' files that are loaded."""
    package = Path(provenance.__file__).parents[1]
    files = {str(path.relative_to(package.parent)): [path] for path in sorted(package.rglob("*.py"))}
    for name, module in sorted(sys.modules.items()):
        path = getattr(module, "__file__", None) or name.removeprefix("file:")
        if name.startswith("file:") or (name.startswith("configs.") and path):
            files.setdefault(Path(path).name, []).append(Path(path))  # where they lie may differ
    return {name: " ".join(_digest(path) for path in paths if path.is_file()) for name, paths in files.items()}


def _digest(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=6).hexdigest()
