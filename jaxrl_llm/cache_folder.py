"""Where the package keeps what it can regenerate: data, warm starts and compiled programs."""

import os
from pathlib import Path

__all__ = ["cache_folder"]


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/jaxrl_llm, or the same below ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxrl_llm"
