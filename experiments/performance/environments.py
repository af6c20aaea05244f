"""The virtual environments of the peers, made by the first command that needs them and kept in the user's cache."""

import subprocess
import sys
from pathlib import Path

from jaxrl_llm.ground.machine import cache_folder

__all__ = ["PEERS", "python_of"]

# What pip installs, one call after the other: TRL takes the torch that is already there.
PEERS = {"trl": (("torch==2.13.0",), ("trl==1.16.0", "peft==0.21.2")), "tunix": (("google-tunix==0.1.7",),)}


def _folder(peer: str) -> Path:
    return cache_folder() / "peers" / peer


def python_of(peer: str) -> str:
    """The interpreter of a peer's environment, which is made if it is not complete.

    Raises:
      ValueError: unknown peer.
      RuntimeError: pip failed; the message holds what it said.
    """
    if peer not in PEERS:
        raise ValueError(f"peer={peer!r} is not one of {', '.join(PEERS)}; set --peers")
    folder, wanted = _folder(peer), "\n".join(" ".join(call) for call in PEERS[peer])
    python, stamp = folder / "bin" / "python", folder / ".installed"
    if stamp.is_file() and stamp.read_text() == wanted:
        return str(python)
    print(f"{peer}: making its environment in {folder} (once, some minutes)", flush=True)
    _run(peer, sys.executable, "-m", "venv", "--clear", str(folder))
    for call in PEERS[peer]:
        _run(peer, str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *call)
    stamp.write_text(wanted)
    return str(python)


def _run(peer: str, *command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{peer}: {' '.join(command[1:])} failed:\n{done.stderr[-2000:]}")
