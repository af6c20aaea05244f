"""Which code the opening of a DIR may run: what its user has trained with, from outside the DIR and unchanged.

A DIR may come from others, and config.json with it. It names code in three places: the file of its config, which may
register tasks and objectives, verifiers among the options of its task, and the functions of its rewards. Every start of
a run records their digests in config.json, which says what the run was made with, and leaves a note of each file and
its content in the user's cache folder, which nothing in a DIR can do.
"""

import contextlib
import hashlib
import itertools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.ground.machine import cache_folder

REMEDY = "read it, and if you trust it, give --trust-code"


def naming(config: Mapping[str, Any]) -> list[Any]:
    """The parts of a run's config that may name verifiers and reward functions."""
    return [config["task"].get("options"), config.get("rewards", {}).get("functions")]


def noted(source: str, options: Any) -> dict[str, str]:
    """{file: digest} of the code that a run is made with, each noted as this user's own.

    source: the file of its config. options: what may name verifiers, see `naming`.
    """
    found = {}
    for path in [Path(source).resolve(), *verifier_files(options)]:
        if path.is_file():
            found[str(path)] = digest = _digest(path)
            with contextlib.suppress(OSError):  # without a cache folder the file is not known later
                _note(path, digest).parent.mkdir(parents=True, exist_ok=True)
                _note(path, digest).touch()
    return found


def check(workdir: str | os.PathLike[str], files: Sequence[Path], recorded: Any, remedy: str = REMEDY) -> None:
    """Raises ValueError for the first of these files that the opening of a DIR may not run, with the reason.

    files: resolved. recorded: what config.json has of `noted`, if anything.
    """
    recorded = recorded if isinstance(recorded, Mapping) else {}
    for path in files:
        if path.is_relative_to(Path(workdir).resolve()):
            why = "it lies inside the DIR"
        elif not path.is_file():
            raise ValueError(f"{workdir}/config.json names {path}, which is not there; run from the folder of training")
        elif str(path) not in recorded:
            why = "config.json has no digest of it"
        elif recorded[str(path)] != (digest := _digest(path)):
            why = "it has changed since the run recorded it"
        elif not _note(path, digest).exists():
            why = "you have not trained with it on this machine"
        else:
            continue
        raise ValueError(f"{path} is code that {workdir}/config.json names, and it does not run: {why}; {remedy}")


def verifier_files(options: Any) -> list[Path]:
    """The files, resolved, that the verifiers among these options run when they are imported."""
    return [file.resolve() for text in _texts(options) if ":" in text for file in _code_files(text)]


def _code_files(spec: str) -> list[Path]:
    """Return the files that a verifier of this name would run, without running any; none if it names no function."""
    place, _, name = spec.rpartition(":")
    if not place or not name.isidentifier():
        return []
    if place.endswith(".py"):
        return [Path(place)]
    files, inside = [], None
    for module in itertools.accumulate(place.split("."), "{}.{}".format):  # a package runs before its modules
        found = next(filter(None, (finder.find_spec(module, inside) for finder in sys.meta_path)), None)
        if found is None:
            break
        files += [Path(found.origin)] if found.origin is not None else []
        inside = found.submodule_search_locations
        if inside is None:
            break
    return files


def _texts(value: Any) -> Iterator[str]:
    """Every text in nested options: a task of the user's own may name its verifier anywhere."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts(list(value.values()))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _texts(one)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _note(path: Path, digest: str) -> Path:
    return cache_folder() / "own_code" / hashlib.sha256(f"{digest} {path}".encode()).hexdigest()
