"""The TFDS builder that every task shares, and the lock under which it writes.

Importing this module imports tensorflow_datasets (but never TensorFlow), so only data.py does, and only when needed.
"""

import contextlib
import dataclasses
import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import tensorflow_datasets as tfds
from absl import logging

from jaxrl_llm.tasks.base import Example, Task
from jaxrl_llm.tasks.splits import Split, data_name, generate

__all__ = ["TaskBuilder", "TaskConfig", "prepare", "written"]


@dataclasses.dataclass(kw_only=True)
class TaskConfig(tfds.core.BuilderConfig):
    """One task's examples; `name` is `data_name(task)`."""

    splits: dict[str, Split]


class TaskBuilder(tfds.core.GeneratorBasedBuilder):
    """Examples {uid, prompt, answer, row} of the task in the config, in their order; `row` is JSON."""

    name = "jaxrl_llm"
    VERSION = tfds.core.Version("1.1.0")

    def _info(self) -> tfds.core.DatasetInfo:
        features = {
            "uid": np.int64,
            "prompt": tfds.features.Text(),
            "answer": tfds.features.Text(),
            "row": tfds.features.Text(),
        }
        return tfds.core.DatasetInfo(
            builder=self, features=tfds.features.FeaturesDict(features), disable_shuffling=True
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator[tuple[int, dict[str, Any]]]]:
        del dl_manager  # nothing is downloaded here
        assert isinstance(self.builder_config, TaskConfig)
        return {name: self._generate_examples(split.examples) for name, split in self.builder_config.splits.items()}

    def _generate_examples(self, examples: list[Example]) -> Iterator[tuple[int, dict[str, Any]]]:
        for example in examples:
            yield example["uid"], {**example, "row": json.dumps(example["row"])}


def prepare(task: Task, data_dir: Path) -> Path:
    """The folder that holds the task's data, written first if it is not there; safe in several processes at once.

    Raises:
        ValueError: see `generate`; or data_dir cannot be written.
    """
    return written(TaskBuilder, data_name(task), data_dir, lambda name: TaskConfig(name=name, splits=_splits(task)))


def _splits(task: Task) -> dict[str, Split]:
    """The examples of both splits; says how many prompts are too long."""
    splits = generate(task)
    for split_name, split in splits.items():
        if split.dropped:
            print(
                f"{task.name}: dropped {split.dropped} of {split.dropped + len(split.examples)} {split_name} prompts, "
                f"which are longer than prompt_length={task.prompt_length} tokens",
                file=sys.stderr,
            )
    return splits


def written(
    builder: type[tfds.core.GeneratorBasedBuilder], name: str, data_dir: Path, config: Callable[[str], Any]
) -> Path:
    """The folder of the data set `name`, written first if it is not there; safe in several processes at once.

    Args:
        config: from the name to the builder's configuration, which holds the data; called where they are written.

    Raises:
        ValueError: what `config` raises; or data_dir cannot be written.
    """
    folder = data_dir / builder.name / name / str(builder.VERSION)
    if folder.exists():  # TFDS renames the finished folder into place
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(folder.parent / "lock"):
            if not folder.exists():
                _write_quietly(builder, config(name), data_dir)
    except OSError as error:
        raise ValueError(f"data_dir={str(data_dir)!r} cannot be written ({error}); name a writable folder") from error
    return folder


def _write_quietly(builder: Callable[..., tfds.core.DatasetBuilder], config: Any, data_dir: Path) -> None:
    """Write a data set without the six lines that TFDS prints and logs about it."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            builder(config=config, data_dir=data_dir, file_format="array_record").download_and_prepare()
    finally:
        logging.set_verbosity(verbosity)
