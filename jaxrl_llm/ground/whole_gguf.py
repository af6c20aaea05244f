"""The reader of GGUF files of the package gguf, which does not notice a file that ends before a length it states."""

from pathlib import Path
from typing import Any


def whole_gguf(path: Path) -> Any:
    """A `gguf.GGUFReader`.

    Raises:
        ValueError: the file ends inside what its header states; the package itself would go on through the stated
            length of an array, however long. Other faults of a file are exceptions of any type.
        ImportError: gguf is not installed.
    """
    from gguf import GGUFReader

    class Whole(GGUFReader):
        def _get(self, offset: Any, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
            found = super()._get(offset, dtype, count, override_order)
            if len(found) < count:
                raise ValueError(f"it ends before byte {int(offset) + int(count)}, inside a field")
            return found

    return Whole(path)
