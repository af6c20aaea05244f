"""Data sets on disk in the layout of TFDS: written once, under a lock, then read at random.

Importing this file imports tensorflow_datasets (never TensorFlow), which takes seconds. So it is imported by the
functions that read data.
"""

import contextlib
import functools
import io
import json
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import filelock
import numpy as np
import tensorflow_datasets as tfds
from absl import logging

from jaxrl_llm.tasks.splits import default_data_dir

_Row = TypeVar("_Row", bound=Mapping[str, Any])


def stored(
    row: Callable[..., _Row],
    dataset: str,
    version: str,
    name: str,
    data_dir: str | Path | None,
    make: Callable[[], Mapping[str, Iterable[_Row]]],
) -> Mapping[str, Sequence[_Row]]:
    """The splits of a data set, of what `make` gives if it is not on disk; safe in several processes at once.

    Args:
        row: the TypedDict of a row, with fields of type int, float, str, or a mapping, which is stored as JSON.
        dataset, version: TFDS's name and version of this kind of data set; another `row` needs another version.
        name: of this data set among those of its kind.

    Raises:
        ValueError: what `make` raises; or data_dir cannot be written.
    """
    kinds = typing.get_type_hints(row)
    data_dir = default_data_dir() if data_dir is None else Path(data_dir)
    folder = data_dir / dataset / name / version
    try:
        if not folder.exists():  # TFDS renames the finished folder into place
            folder.parent.mkdir(parents=True, exist_ok=True)
            with filelock.FileLock(folder.parent / "lock"):
                if not folder.exists():
                    splits = make()  # it may print
                    with _quiet():
                        _Builder(dataset, version, name, data_dir, kinds, splits).download_and_prepare()
    except OSError as error:
        raise ValueError(f"data_dir={str(data_dir)!r} cannot be written ({error}); name a writable folder") from error
    # Not `builder_from_directory`, which imports whatever module the folder's features.json names.
    with _quiet():
        sources: Any = _Builder(dataset, version, name, data_dir, kinds, {}).as_data_source()
    return {split: _Rows(source, kinds) for split, source in sources.items()}


class _Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    def __init__(
        self, dataset: str, version: str, name: str, data_dir: Path, kinds: Mapping[str, Any], splits: Mapping[str, Any]
    ):
        self.name = dataset  # pyright: ignore[reportAttributeAccessIssue] (TFDS's own adhoc builder does so)
        self.VERSION = tfds.core.Version(version)
        self._kinds, self._splits = kinds, splits
        super().__init__(config=tfds.core.BuilderConfig(name=name), data_dir=data_dir, file_format="array_record")

    def _info(self) -> tfds.core.DatasetInfo:
        numbers = {int: np.int64, float: np.float32}
        fields = {field: numbers.get(kind, tfds.features.Text()) for field, kind in self._kinds.items()}
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(fields), disable_shuffling=True)

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator[tuple[int, dict[str, Any]]]]:
        del dl_manager  # nothing is downloaded here
        return {split: self._generate_examples(rows) for split, rows in self._splits.items()}

    def _generate_examples(self, rows: Iterable[Mapping[str, Any]]) -> Iterator[tuple[int, dict[str, Any]]]:
        for row in rows:
            yield row["uid"], {k: _json(v) if isinstance(v, Mapping) else v for k, v in row.items()}


# Scalars and arrays of numpy are written as numbers and lists.
_json = functools.partial(json.dumps, default=lambda value: getattr(value, "tolist", value.__str__)())


class _Rows(Sequence[Any]):
    """The records of a TFDS data source, where text is bytes, as rows."""

    def __init__(self, source: Any, kinds: Mapping[str, Any]):
        self._source, self._kinds = source, kinds

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: Any) -> Any:
        record = self._source[range(len(self))[index]]
        return {field: _READ.get(kind, json.loads)(record[field]) for field, kind in self._kinds.items()}


_READ: Mapping[Any, Callable[[Any], Any]] = {int: int, float: float, str: bytes.decode}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Drop the lines that TFDS prints about a data set."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)
