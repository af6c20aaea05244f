"""The checkout that the package runs from: its commit, and what it has changed since. Imports no JAX."""

import subprocess
from pathlib import Path


def commit() -> str | None:
    """The checkout's commit, with + when tracked files have changes; None outside a checkout."""
    found = _git("rev-parse", "HEAD")
    return found and found.strip() + ("+" if changed() else "")


def changed() -> list[str]:
    """The tracked files that differ from the commit; none outside a checkout."""
    return (_git("diff", "--name-only", "HEAD") or "").splitlines()


def changes() -> str:
    """Return the patch from the commit to the checkout; empty if nothing changed or there is no checkout."""
    return _git("diff", "--binary", "HEAD") or ""


def _git(*arguments: str) -> str | None:
    """Return what git prints about the checkout of this file; None without git or a checkout."""
    try:
        here = Path(__file__).parent
        return subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
