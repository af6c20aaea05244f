"""Streams of prompts and of supervised answers, fed by Grain from the data on disk.

Import time matters for the command line: Grain and TFDS are imported by the functions that read data.
"""

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypedDict, TypeVar, runtime_checkable

import numpy as np
from jaxtyping import Bool, Integer

from jaxrl_llm.ground.by_name import ByName
from jaxrl_llm.ground.ranges import in_range, one_of, within
from jaxrl_llm.tasks.base import Example, Row, Task, bounded
from jaxrl_llm.tasks.splits import data_name

_NOT_ON_DISK = ByName({"generate": "jaxrl_llm.tasks.drawn_splits"})
_OVER_TURNS = ByName(
    {
        "begun": "jaxrl_llm.tasks.environments.reading",
        "demonstrated": "jaxrl_llm.tasks.environments.reading",
    }
)

Ids = Integer[np.ndarray, "n"]
Rows = Integer[np.ndarray, "n t"]


class Prompts(TypedDict):
    """n prompts, left-aligned in rows of task.prompt_length tokens."""

    uid: Ids  # int64, the example's index in its split
    draw: Ids  # int64, running count over the stream: example i of epoch e has draw >= e * size of the split
    tokens: Rows  # int32, padded with 0 on the right
    lengths: Ids  # int32
    prompt: list[str]
    answer: list[str]  # a right answer, which verifiers get as `gold`
    row: list[Row]  # the data's other fields


class SupervisedBatch(TypedDict):
    """n rows prompt + answer + EOS, left-aligned, of task.row_length(task.answer_length) tokens."""

    uid: Ids  # int64
    draw: Ids  # int64
    tokens: Rows  # int32, padded with 0 on the right
    loss_mask: Bool[np.ndarray, "n t"]  # the answer, EOS included
    segment_ids: Rows  # int32, 1 where there is a token, 0 on padding


_Row = TypeVar("_Row")


@runtime_checkable
class PromptStream(Protocol):
    """An endless iterator of batches; every one here is a `grain.DatasetIterator`, which Orbax can save."""

    def __next__(self) -> Any: ...

    def get_state(self) -> dict[str, Any]:
        """Return the state from which `set_state` continues with the next batch; plain JSON."""
        ...

    def set_state(self, state: dict[str, Any]) -> None: ...


def prompts(
    task: Task, split: str = "train", *, seed: int, batch_size: int, data_dir: str | Path | None = None
) -> PromptStream:
    """An endless stream of `Prompts`, in a new order every epoch; a batch may span two epochs.

    The first call for a task writes its data below `data_dir`, by default `default_data_dir()`.

    Raises:
        ValueError: an unknown split, a batch size below 1, a seed out of range, or data that cannot be written.
    """
    return batches(examples(task, split, data_dir), functools.partial(_prompt_batch, task), seed, batch_size)


def supervised(
    task: Task, split: str = "train", *, seed: int, batch_size: int, data_dir: str | Path | None = None
) -> PromptStream:
    """An endless stream of `SupervisedBatch`; errors as of `prompts`."""
    return batches(examples(task, split, data_dir), functools.partial(_supervised_batch, task), seed, batch_size)


def all_prompts(
    task: Task, split: str = "test", *, limit: int | None = None, data_dir: str | Path | None = None
) -> Prompts:
    """The first `limit` prompts of a split (default: all) as one batch, in the order on disk, which is random."""
    return _prompt_batch(task, numbered(examples(task, split, data_dir), limit))


def examples(task: Task, split: str, data_dir: str | Path | None = None) -> Sequence[Example]:
    """Random access to a split on disk, written first if it is not there; errors as of `prompts`."""
    one_of("split", split, ("train", "test"))
    from jaxrl_llm.tasks.builder import stored

    make = functools.partial(_generated, task)
    return stored(Example, "jaxrl_llm", "1.2.0", data_name(task), data_dir, make)[split]


def _generated(task: Task) -> Mapping[str, Sequence[Example]]:
    """The examples of both splits; prints how many prompts are too long."""
    splits = _NOT_ON_DISK["generate"](task)
    for name, split in splits.items():
        if split.dropped:
            print(
                f"{task.name}: dropped {split.dropped} of {split.dropped + len(split.examples)} {name} prompts, "
                f"which are longer than prompt_length={task.prompt_length} tokens",
                file=sys.stderr,
            )
    return {name: split.examples for name, split in splits.items()}


def batches(source: Sequence[_Row], collate: Callable[..., Any], seed: int, batch_size: int) -> Any:
    """An endless stream of what `collate` makes of numbered rows, in a new order every epoch."""
    in_range("batch_size", batch_size, least=1)
    within("seed", seed, 0, 2**32 - 1)
    import grain

    # `repeat()` without a number has sys.maxsize rows, and of batches of one more than Python can count.
    dataset = grain.MapDataset.source(source).shuffle(seed=seed).repeat(2**62 // len(source))
    dataset = dataset.map_with_index(lambda draw, row: (draw, row)).batch(batch_size, batch_fn=collate)
    # A batch is read in milliseconds, so threads that read ahead would cost more than they save.
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))


def numbered(source: Sequence[_Row], limit: int | None) -> list[tuple[int, _Row]]:
    """(place, row) of the first `limit` rows; None: of all."""
    if limit is not None:
        in_range("limit", limit, "leave it out to get all", least=1)
    return [(i, source[i]) for i in range(min(len(source), limit or len(source)))]


def _prompt_batch(task: Task, numbered: Sequence[tuple[int, Example]]) -> Prompts:
    draws, rows = zip(*numbered, strict=True)
    if task.environment is not None:  # where it cannot begin with a row, the episodes of that end by themselves
        rows = [row if why else new for row, (new, why) in zip(rows, _OVER_TURNS["begun"](task, rows), strict=True)]
    ids = _prompt_ids(task, rows)
    return Prompts(
        uid=np.array([row["uid"] for row in rows], np.int64),
        draw=np.array(draws, np.int64),
        tokens=_left_aligned(ids, task.prompt_length, task.tokenizer.pad_id),
        lengths=np.array([len(one) for one in ids], np.int32),
        prompt=[row["prompt"] for row in rows],
        answer=[row["answer"] for row in rows],
        row=[row["row"] for row in rows],
    )


def _prompt_ids(task: Task, rows: Sequence[Example]) -> list[list[int]]:
    asked = [(row["prompt"], task.ids_of_prompt(row["prompt"], row["row"])) for row in rows]
    return [bounded("prompt", prompt, ids, task.prompt_length) for prompt, ids in asked]


def _supervised_batch(task: Task, numbered: Sequence[tuple[int, Example]]) -> SupervisedBatch:
    draws, rows = zip(*numbered, strict=True)
    length = task.row_length(task.answer_length)
    numbers = {"uid": np.array([row["uid"] for row in rows], np.int64), "draw": np.array(draws, np.int64)}
    if task.environment is not None:
        ids, learnt = _OVER_TURNS["demonstrated"](task, rows, length)
        return SupervisedBatch(**numbers, **_learnt_rows(ids, learnt, length, task.tokenizer.pad_id))
    prompts = _prompt_ids(task, rows)
    answers = [bounded("answer", row["answer"], task.ids_of_answer(row["answer"]), task.answer_length) for row in rows]
    return SupervisedBatch(**numbers, **answered_rows(prompts, answers, length, task.tokenizer.pad_id))


def answered_rows(
    prompts: Sequence[list[int]], answers: Sequence[list[int]], length: int, pad_id: int
) -> dict[str, Any]:
    """tokens, loss_mask and segment_ids of `SupervisedBatch`, from the ids of every prompt and of its answer."""
    pairs = list(zip(prompts, answers, strict=True))
    learnt = [[0] * len(prompt) + [1] * len(answer) for prompt, answer in pairs]
    return _learnt_rows([prompt + answer for prompt, answer in pairs], learnt, length, pad_id)


def _learnt_rows(ids: Sequence[list[int]], learnt: Sequence[list[int]], length: int, pad_id: int) -> dict[str, Any]:
    return {
        "tokens": _left_aligned(ids, length, pad_id),
        "loss_mask": _left_aligned(learnt, length, 0) == 1,
        "segment_ids": _left_aligned([[1] * len(one) for one in ids], length, 0),
    }


def _left_aligned(rows: Sequence[list[int]], length: int, pad_id: int) -> Rows:
    tokens = np.full((len(rows), length), pad_id, np.int32)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = ids
    return tokens
