"""Questions and answers from files of one's own, or from a data set on the hub."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.tasks import gold_fields, golds, messages
from jaxrl_llm.tasks.base import Draw, Source, Task
from jaxrl_llm.tasks.data_files import digest, files_of, read_draws
from jaxrl_llm.tasks.splits import is_test
from jaxrl_llm.tasks.tokenizers.plain_tokenizers import ByteTokenizer
from jaxrl_llm.tasks.verifiers import verifier as named_verifier


def jsonl(
    *,
    path: str = "",
    test_path: str = "",
    prompt_field: str = "prompt",
    answer_field: str = "answer",
    verifier: str = "exact",
    prompt_length: int = 256,
    answer_length: int = 256,
    time_limit: float = 5.0,
) -> Task:
    """Rows with a prompt, its right answer, and whatever else the verifier reads as `row`.

    `path` is a file of JSON Lines, parquet or arrow, a folder of them, or OWNER/NAME of a data set on the hub. Without
    `test_path` and names that say which files are the test split, one prompt in eight is, by a hash of its text.

    A prompt is a text, or a list of messages {"role", "content"}: what is asked is the last one of the user, those
    before it are `row["earlier_messages"]`. An answer after it is the right one, unless the row has `answer_field`.
    Fields may lie in objects: `reward_model.ground_truth`. Of a list any is a right answer, the first one the target of
    supervised training, the others `row["other_right_answers"]`.
    """
    if not path:
        raise ValueError(
            "jsonl.path is empty; set task.options.path to a file with one JSON object a line, a parquet file, a "
            "folder of them, or OWNER/NAME of a data set on the hub"
        )

    def files() -> dict[str, list[Path]]:
        found = files_of(path)
        if test_path:
            other = files_of(test_path)
            found["test"] = other["test"] or other["train"]
        if not found["train"]:
            raise ValueError(
                f"{path} holds files of the test split alone; name the one to train on train.jsonl or such"
            )
        return found

    def read() -> Mapping[str, Iterator[Draw]]:
        found = files()
        if found["test"]:
            return {split: _draws(some, convert) for split, some in found.items()}
        return {
            "train": (draw for draw in _draws(found["train"], convert) if not is_test(_text(draw))),
            "test": (draw for draw in _draws(found["train"], convert) if is_test(_text(draw))),
        }

    def fingerprint() -> str:
        found = files()
        content, counts = digest(*found["train"], *found["test"]), [len(some) for some in found.values()]
        return content if counts == [1, bool(test_path)] else f"{content} {counts}"

    def convert(row: dict) -> Draw:
        field = "messages" if prompt_field == "prompt" and "prompt" not in row and "messages" in row else prompt_field
        prompt, earlier, own = gold_fields.at(row, field), [], None
        if isinstance(prompt, list):
            prompt, earlier, own = messages.split(field, prompt)
        if not isinstance(prompt, str):
            raise TypeError(f"field {field!r} must be text or a list of messages, not {type(prompt).__name__}")
        if not prompt:
            raise ValueError(f"field {field!r} asks nothing")
        row.pop(field, None)
        inside = own is not None and answer_field.partition(".")[0] not in row
        given = own if inside else gold_fields.at(row, answer_field)
        gold, *more = gold_fields.texts(answer_field, given, verifier)
        row.pop(answer_field, None)
        also = {messages.EARLIER: earlier, golds.OTHERS: more}
        return prompt, gold, row | {name: value for name, value in also.items() if value}

    return dataclasses.replace(
        task_of_files("jsonl", Source(read, fingerprint), verifier, prompt_length, answer_length, time_limit),
        asks=f"Answer the prompts of {path}",
    )


def _draws(files: Sequence[Path], convert: Callable[[dict[str, Any]], Draw]) -> Iterator[Draw]:
    return itertools.chain.from_iterable(read_draws(file, convert) for file in files)


def _text(draw: Draw) -> str:
    return messages.whole(draw[0], draw[2] if len(draw) == 3 else {})


def task_of_files(
    name: str, source: Source, verifier: str, prompt_length: int, answer_length: int, time_limit: float
) -> Task:
    """A task of text with the verifier of that name; its splits are as large as the files."""
    verify, isolated = named_verifier(verifier)
    return Task(
        name=name,
        prompt_length=prompt_length,
        answer_length=answer_length,
        tokenizer=ByteTokenizer(),
        verify=golds.AnyRight(verify),
        isolated=isolated,
        time_limit=time_limit,
        source=source,
        train_size=0,
        test_size=0,
    )
