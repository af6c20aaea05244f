"""Policy optimisation of language models in JAX: PPO to SAPO, on dense and mixture-of-experts transformers."""

import importlib
from typing import Any

__version__ = "0.1.0"

_ROOMS = ("models", "objectives", "tasks")


def __getattr__(name: str) -> Any:
    """`import jaxrl_llm; jaxrl_llm.objectives` imports the subpackage on first access."""
    if name in _ROOMS:
        return importlib.import_module(f"jaxrl_llm.{name}")
    raise AttributeError(f"module 'jaxrl_llm' has no attribute {name!r}; it offers {', '.join(_ROOMS)}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_ROOMS])
