"""A verifier of the user's own, named by its place: "package.module:function" or "file.py:function"."""

import dataclasses
import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from jaxrl_llm.config.loading import one_line


@dataclasses.dataclass(frozen=True)
class UserVerifier:
    """A function of (prompt, answer, gold, row) named by its place: "package.module:function" or "file.py:function"."""

    spec: str

    def load(self) -> None:
        """Import it, so that a mistake shows at the start."""
        _function(self.spec)

    def __call__(self, prompt: str, answer: str, gold: str, row: Mapping[str, Any]) -> float:
        return _function(self.spec)(prompt, answer, gold, row)


@functools.cache
def _function(spec: str) -> Callable[..., float]:
    place, _, name = spec.rpartition(":")
    if not name.isidentifier():
        raise ValueError(f"verifier={spec!r} names no function; write package.module:function or file.py:function")
    try:
        if place.endswith(".py"):
            module_spec = importlib.util.spec_from_file_location(f"verifier_{Path(place).stem}", place)
            assert module_spec is not None
            assert module_spec.loader is not None
            module = importlib.util.module_from_spec(module_spec)
            sys.modules[module_spec.name] = module
            with one_line(Path(place)):
                module_spec.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
    except (Exception, SystemExit) as error:  # of the user's own code
        kind = "" if isinstance(error, ValueError | ImportError | OSError) else f"{type(error).__name__}: "
        raise ValueError(
            f"verifier={spec!r} cannot be imported ({kind}{error}); correct it, or name a module or an existing file"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(
            f"verifier={spec!r}: {place} has no function {name!r}; name one of (prompt, answer, gold, row)"
        )
    return cast(Callable[..., float], function)
