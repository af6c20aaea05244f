"""The place of a run's checkpoints: its DIR, or a place that outlives the machine of the DIR.

DIR/checkpoints_at   the PLACE of `--checkpoints`, and a mark: what DIR/checkpoints and DIR/reference hold otherwise is
                     in PLACE/checkpoints and PLACE/reference, and the DIR keeps what is appended to line by line
PLACE                a folder, or gs://BUCKET/FOLDER, which cannot be appended to: Orbax writes there as it does locally
PLACE/used_by        the same mark, and the DIR of it: nothing is written or erased in a PLACE for another DIR
"""

import base64
import importlib.util
import os
import socket
import uuid
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etils import epath

_NAME, _USED_BY = "checkpoints_at", "used_by"
_LARGEST = 2**31  # bytes of a file that comes back


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
    place = given or _lines(named)[0]
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
    elif not named.is_file() or _lines(named)[0] != os.fspath(root):
        _write(named, os.fspath(root))


def refused(workdir: str | os.PathLike[str], root: Any, *, given: bool) -> str:
    """Why a PLACE is not the DIR's, or "". Writes nothing.

    A mark is random, so that a DIR that came from elsewhere cannot name another run's PLACE and have it erased. Where
    the user gives the PLACE, a DIR without the mark takes it over if the DIR that had it is not on this machine any
    more, as after the loss of a machine.

    Args:
      given: the user named the PLACE in the command, not the DIR alone.
    """
    named, (own, mark, theirs) = Path(workdir) / _NAME, _marks(workdir, root)
    if mark and mark == own:
        return ""
    if not given:
        return f"{named} names {root}, which is not marked as its own; give --checkpoints={root} if it is, or remove it"
    host, _, folder = theirs.partition(":")
    if theirs not in ("", _here(workdir)) and host == socket.gethostname() and Path(folder, "config.json").exists():
        return f"--checkpoints={root} is the PLACE of {folder}; give another, or go on with that --workdir"
    if not mark and ((root / "config.json").exists() or (root / "checkpoints").exists()):
        return f"--checkpoints={root} holds a run that no DIR is marked for; give an empty folder"
    return ""


def claim(workdir: str | os.PathLike[str], root: Any) -> None:
    """Mark a PLACE that is not `refused` as that of a DIR, and the DIR as that of the PLACE."""
    own, mark, _ = _marks(workdir, root)
    if not mark or mark != own:
        mark = uuid.uuid4().hex
        root.mkdir(parents=True, exist_ok=True)
        (root / _USED_BY).write_text(f"{mark}\n{_here(workdir)}\n")
        _write(Path(workdir) / _NAME, os.fspath(root), mark)


def _marks(workdir: str | os.PathLike[str], root: Any) -> tuple[str, str, str]:
    """The mark in a DIR that names this PLACE, the mark in the PLACE, and the DIR that it is of; "" for none."""
    named, used_by = Path(workdir) / _NAME, root / _USED_BY
    place, own = _lines(named) if named.is_file() else ("", "")
    mark, of = _lines(used_by) if used_by.exists() else ("", "")
    return own if place == os.fspath(root) else "", mark, of


def _here(workdir: str | os.PathLike[str]) -> str:
    return f"{socket.gethostname()}:{Path(workdir).absolute()}"


def _lines(file: Any) -> tuple[str, str]:
    first, _, second = file.read_text().strip().partition("\n")
    return first, second


def _write(named: Path, *lines: str) -> None:
    named.parent.mkdir(parents=True, exist_ok=True)
    part = named.with_name(f"{_NAME}.{os.getpid()}.part")
    part.write_text("".join(f"{line}\n" for line in lines))
    os.replace(part, named)


def packed_files(workdir: str | os.PathLike[str]) -> dict[str, str]:
    """{name: content, compressed, as text} of the files of a DIR, folders and what a kill left half-written aside."""
    return {
        path.name: base64.b64encode(zlib.compress(path.read_bytes())).decode()
        for path in sorted(Path(workdir).iterdir())
        if path.is_file() and not path.name.startswith(".") and path.suffix != ".part" and path.name != _NAME
    }


def unpack_files(workdir: str | os.PathLike[str], packed: Mapping[str, str]) -> None:
    """Write the files of `packed_files` into a DIR.

    Raises:
      ValueError: a name is none of a file in the DIR, or a file is larger than 2 GiB.
    """
    Path(workdir).mkdir(parents=True, exist_ok=True)
    for name, content in packed.items():
        if not name or name != Path(name).name or name.startswith(".") or name == _NAME:
            raise ValueError(f"a checkpoint's copy of the DIR holds {name!r}, which is no file of a DIR")
        whole = zlib.decompressobj().decompress(base64.b64decode(content), _LARGEST + 1)
        if len(whole) > _LARGEST:
            raise ValueError(f"a checkpoint's copy of {name} is larger than {_LARGEST} bytes")
        part = Path(workdir) / f"{name}.part"
        part.write_bytes(whole)
        os.replace(part, part.with_name(name))
