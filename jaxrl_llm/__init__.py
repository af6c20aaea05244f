"""Policy optimisation of language models in JAX: PPO to SAPO, on dense and mixture-of-experts transformers.

The rooms, each of which imports only from those before it: ground, config, objectives, models, tasks, records,
rollout, training, run, check, plan, report, sweep. Above them stand the commands of one run or checkpoint: main (which
is `train`), evaluation, generate, export and upcycle; `__main__` is `jaxrl-llm COMMAND`.
"""

import sys

# The process is a command of the package, `python -m jaxrl_llm.X` or the script: signals are heard before all imports.
if sys.argv[:1] == ["-m"] or "".join(sys.argv[:1]).endswith("jaxrl-llm"):
    from jaxrl_llm.ground.signals import end_at_once

    end_at_once()

import importlib
from typing import Any

__version__ = "0.1.0"

_ROOMS = ("models", "objectives", "tasks")
_NAMES = {"Engine": "rollout", "Sampling": "rollout", "score": "models", "train": "main"}  # where each is


def __getattr__(name: str) -> Any:
    """`import jaxrl_llm` imports neither JAX nor a room; the first use of one of these names does."""
    if name in _ROOMS:
        return importlib.import_module(f"jaxrl_llm.{name}")
    if name in _NAMES:
        return getattr(importlib.import_module(f"jaxrl_llm.{_NAMES[name]}"), name)
    offered = ", ".join(sorted([*_ROOMS, *_NAMES]))
    raise AttributeError(f"module 'jaxrl_llm' has no attribute {name!r}; it offers {offered}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_ROOMS, *_NAMES])
