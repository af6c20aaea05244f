"""Where a run's checkpoints are: in its DIR, or in a place that outlives the machine of the DIR.

DIR/checkpoints_at   one line, the PLACE of `--checkpoints`: what DIR/checkpoints and DIR/reference hold otherwise is in
                     PLACE/checkpoints and PLACE/reference, and the DIR keeps what is appended to line by line
PLACE                a folder, or gs://BUCKET/FOLDER, which cannot be appended to: Orbax writes there as it does locally
"""

import base64
import importlib.util
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etils import epath

_NAME = "checkpoints_at"


def root_of(workdir: str | os.PathLike[str], given: str = "") -> Any:
    """The folder that holds `checkpoints` and `reference` of a DIR: the PLACE that is given, or that the DIR names, or
    the DIR itself; a PLACE is its own.

    Raises:
      ValueError: a PLACE has another scheme than gs. ImportError: the package that reads it is not installed.
    """
    named = Path(workdir) / _NAME
    if not given and "://" in os.fspath(workdir):
        given = os.fspath(workdir)
    if not given and not named.is_file():
        return Path(workdir)
    place = given or named.read_text().strip()
    scheme, is_url, _ = place.partition("://")
    if not is_url:
        return Path(place).absolute()
    if scheme != "gs":
        raise ValueError(
            f"--checkpoints={place} has the scheme {scheme}; give a folder that is mounted, or gs://BUCKET/FOLDER"
        )
    if importlib.util.find_spec("gcsfs") is None:
        raise ImportError(f"--checkpoints={place} needs gcsfs: pip install 'jaxrl_llm[gcs]'")
    from fsspec.config import conf

    conf["gcs"] = {"use_listings_cache": False}  # another machine may have written since
    return epath.Path(place)


def absolute(path: str | os.PathLike[str]) -> Any:
    """The path of a folder from the root; a URL is one already, which etils does not know."""
    return epath.Path(path) if "://" in os.fspath(path) else Path(path).absolute()


def is_elsewhere(workdir: str | os.PathLike[str], root: Any) -> bool:
    return os.fspath(root) not in (os.fspath(workdir), os.fspath(Path(workdir).absolute()))


def name_place(workdir: str | os.PathLike[str], root: Any) -> None:
    """Let the DIR name the PLACE of its checkpoints."""
    named = Path(workdir) / _NAME
    if not is_elsewhere(workdir, root):
        named.unlink(missing_ok=True)
    elif not named.is_file() or named.read_text().strip() != os.fspath(root):
        named.parent.mkdir(parents=True, exist_ok=True)
        part = named.with_name(f"{_NAME}.{os.getpid()}.part")
        part.write_text(f"{os.fspath(root)}\n")
        os.replace(part, named)


def packed_files(workdir: str | os.PathLike[str]) -> dict[str, str]:
    """{name: content, compressed, as text} of the files of a DIR, folders and what a kill left half-written aside."""
    return {
        path.name: base64.b64encode(zlib.compress(path.read_bytes())).decode()
        for path in sorted(Path(workdir).iterdir())
        if path.is_file() and not path.name.startswith(".") and path.suffix != ".part" and path.name != _NAME
    }


def unpack_files(workdir: str | os.PathLike[str], packed: Mapping[str, str]) -> None:
    """Write the files of `packed_files` into a DIR."""
    Path(workdir).mkdir(parents=True, exist_ok=True)
    for name, content in packed.items():
        part = Path(workdir) / f"{name}.part"
        part.write_bytes(zlib.decompress(base64.b64decode(content)))
        os.replace(part, part.with_name(name))
