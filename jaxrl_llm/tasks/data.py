"""Streams of prompts and of supervised answers, fed by Grain from the data on disk.

Import time matters for the command line: Grain and TFDS are imported by the functions that read data.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypedDict, TypeVar, runtime_checkable

import numpy as np
from jaxtyping import Bool, Integer

from jaxrl_llm.ground.machine import cache_folder
from jaxrl_llm.tasks.base import Example, Row, Task

__all__ = [
    "Decoded",
    "PromptBatch",
    "PromptStream",
    "SupervisedBatch",
    "SupervisedStream",
    "all_prompts",
    "batches",
    "default_data_dir",
    "examples",
    "prompts",
    "supervised",
]

Ids = Integer[np.ndarray, "n"]
Rows = Integer[np.ndarray, "n t"]


class PromptBatch(TypedDict):
    """n prompts, left-aligned in rows of task.prompt_length."""

    uid: Ids  # int64, the example's index in its split
    draw: Ids  # int64, running count over the stream: example i of epoch e has draw >= e * size of the split
    tokens: Rows  # int32, padded with 0 on the right
    lengths: Ids  # int32
    prompt: list[str]
    answer: list[str]  # a right answer, which verifiers get as `gold`
    row: list[Row]  # the data's other fields


class SupervisedBatch(TypedDict):
    """n rows prompt + answer + EOS, left-aligned, of task.prompt_length + task.answer_length tokens."""

    uid: Ids  # int64
    draw: Ids  # int64
    tokens: Rows  # int32, padded with 0 on the right
    loss_mask: Bool[np.ndarray, "n t"]  # the answer, EOS included
    segment_ids: Rows  # int32, 1 where there is a token, 0 on padding


_Batch = TypeVar("_Batch", covariant=True)
_Row = TypeVar("_Row")


@runtime_checkable
class _Stream(Protocol[_Batch]):
    """An endless iterator of batches; every one here is a `grain.DatasetIterator`, which Orbax can save."""

    def __iter__(self) -> Iterator[_Batch]: ...

    def __next__(self) -> _Batch: ...

    def get_state(self) -> dict[str, Any]:
        """What `set_state` needs to continue with the next batch; plain JSON."""
        ...

    def set_state(self, state: dict[str, Any]) -> None: ...


PromptStream = _Stream[PromptBatch]
SupervisedStream = _Stream[SupervisedBatch]


def default_data_dir() -> Path:
    """$XDG_CACHE_HOME/jaxrl_llm/data, or the same below ~/.cache."""
    return cache_folder() / "data"


def prompts(
    task: Task, split: str = "train", *, seed: int, batch_size: int, data_dir: str | Path | None = None
) -> PromptStream:
    """An endless stream of `PromptBatch`, in a new order every epoch; a batch may span two epochs.

    Args:
        task: from `make`.
        split: "train" or "test".
        seed: of the order, 0 to 2**32 - 1.
        batch_size: prompts a batch.
        data_dir: where the data is, or is written by the first call; default `default_data_dir()`.

    Raises:
        ValueError: an unknown split, a batch size below 1, a seed out of range, or data that cannot be written.
    """
    return _stream(_PromptCollate(task), task, split, seed, batch_size, data_dir)


def supervised(
    task: Task, split: str = "train", *, seed: int, batch_size: int, data_dir: str | Path | None = None
) -> SupervisedStream:
    """An endless stream of `SupervisedBatch`; arguments and errors as for `prompts`."""
    return _stream(_SupervisedCollate(task), task, split, seed, batch_size, data_dir)


def all_prompts(
    task: Task, split: str = "test", *, limit: int | None = None, data_dir: str | Path | None = None
) -> PromptBatch:
    """The first `limit` prompts of a split (default: all) as one batch, in the order on disk, which is random.

    Raises:
        ValueError: an unknown split, a limit below 1, or data that cannot be written.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit={limit} must be at least 1; leave it out to get the whole split")
    source = examples(task, split, data_dir)
    rows = [source[i] for i in range(min(len(source), limit or len(source)))]
    return _PromptCollate(task)(list(enumerate(rows)))


def examples(task: Task, split: str, data_dir: str | Path | None = None) -> Sequence[Example]:
    """Random access to a split on disk, written first if it is not there; arguments and errors as for `prompts`."""
    if split not in ("train", "test"):
        raise ValueError(f"unknown split {split!r}; choose 'train' or 'test'")
    import tensorflow_datasets as tfds

    from jaxrl_llm.tasks import builder

    folder = builder.prepare(task, default_data_dir() if data_dir is None else Path(data_dir))
    reader: Any = tfds.builder_from_directory(folder)
    return Decoded(reader.as_data_source(split), _example)


def _stream(collate: Any, task: Task, split: str, seed: int, batch_size: int, data_dir: str | Path | None) -> Any:
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1; choose a positive batch_size")
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed} must lie in 0..{2**32 - 1}; choose a seed in that range")
    return batches(examples(task, split, data_dir), collate, seed, batch_size)


def batches(source: Sequence[_Row], collate: Callable[..., Any], seed: int, batch_size: int) -> Any:
    """An endless stream of what `collate` makes of numbered rows, in a new order every epoch."""
    import grain

    dataset = grain.MapDataset.source(source).shuffle(seed=seed).repeat()
    dataset = dataset.map_with_index(_numbered).batch(batch_size, batch_fn=collate)
    # A batch is read in milliseconds, so threads that read ahead would cost more than they save.
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))


def _numbered(draw: int, row: _Row) -> tuple[int, _Row]:
    return draw, row


class Decoded(Sequence[_Row]):
    """A TFDS data source as rows in our form: `read` turns one of its records, where text is bytes, into a row."""

    def __init__(self, source: Any, read: Callable[[Any], _Row]):
        self._source, self._read = source, read

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of a split of {len(self)}; choose one in 0..{len(self) - 1}")
        return self._read(self._source[index])


def _example(record: Any) -> Example:
    prompt, answer, rest = (record[field].decode() for field in ("prompt", "answer", "row"))
    return Example(uid=int(record["uid"]), prompt=prompt, answer=answer, row=json.loads(rest))


@dataclasses.dataclass(frozen=True)
class _PromptCollate:
    task: Task

    def __call__(self, numbered: Sequence[tuple[int, Example]]) -> PromptBatch:
        rows = [_encode(self.task, "prompt", example["prompt"]) for _, example in numbered]
        return PromptBatch(
            uid=np.array([example["uid"] for _, example in numbered], np.int64),
            draw=np.array([draw for draw, _ in numbered], np.int64),
            tokens=_left_aligned(rows, self.task.prompt_length, self.task.tokenizer.pad_id),
            lengths=np.array([len(row) for row in rows], np.int32),
            prompt=[example["prompt"] for _, example in numbered],
            answer=[example["answer"] for _, example in numbered],
            row=[example["row"] for _, example in numbered],
        )


@dataclasses.dataclass(frozen=True)
class _SupervisedCollate:
    task: Task

    def __call__(self, numbered: Sequence[tuple[int, Example]]) -> SupervisedBatch:
        prompts = [_encode(self.task, "prompt", example["prompt"]) for _, example in numbered]
        answers = [_encode(self.task, "answer", example["answer"]) for _, example in numbered]
        length = self.task.prompt_length + self.task.answer_length
        position = np.arange(length)[None, :]
        start = np.array([len(a) for a in prompts])[:, None]
        end = np.array([len(a) + len(g) for a, g in zip(prompts, answers, strict=True)])[:, None]
        return SupervisedBatch(
            uid=np.array([example["uid"] for _, example in numbered], np.int64),
            draw=np.array([draw for draw, _ in numbered], np.int64),
            tokens=_left_aligned(
                [a + g for a, g in zip(prompts, answers, strict=True)], length, self.task.tokenizer.pad_id
            ),
            loss_mask=(position >= start) & (position < end),
            segment_ids=(position < end).astype(np.int32),
        )


def _encode(task: Task, kind: str, text: str) -> list[int]:
    ids = task.ids_of_answer(text) if kind == "answer" else task.ids_of_prompt(text)
    room = getattr(task, f"{kind}_length")
    if len(ids) > room:
        field = " (in a run: rollout.max_prompt_length; 0 is the task's own bound)" if kind == "prompt" else ""
        raise ValueError(
            f"the {kind} {text!r} has {len(ids)} tokens, over {kind}_length={room}; raise {kind}_length{field}"
        )
    return ids


def _left_aligned(rows: list[list[int]], length: int, pad_id: int) -> Rows:
    tokens = np.full((len(rows), length), pad_id, np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    return tokens
