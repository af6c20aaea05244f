"""Values by name, each imported at its first use: what a run does not use is not read."""

import importlib
from collections.abc import Iterator, Mapping
from typing import Any


class ByName(Mapping[str, Any]):
    """{name: value}, each value imported at its first use from the place "module" or "module:attribute".

    A place without an attribute has the value under the same name. tests/test_floors.py reads the places as imports,
    and tests/test_by_name.py imports every one of them.
    """

    def __init__(self, places: Mapping[str, str]):
        self.places = dict(places)

    def __getitem__(self, name: str) -> Any:
        module, _, attribute = self.places[name].partition(":")
        return getattr(importlib.import_module(module), attribute or name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)

    def attribute(self, name: str) -> Any:
        """Return the value as a module's `__getattr__` does.

        Raises:
          AttributeError: no such name.
        """
        if name not in self.places:
            raise AttributeError(f"no {name!r} here; there are {', '.join(self.places)}")
        return self[name]
