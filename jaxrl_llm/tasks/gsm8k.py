"""GSM8K, grade school mathematics: 7473 questions to train on and 1319 to test. Source: arXiv 2110.14168."""

import re
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

from jaxrl_llm.ground.machine import cache_folder
from jaxrl_llm.tasks.base import Draw, Source, Task
from jaxrl_llm.tasks.data_files import digest, read_draws
from jaxrl_llm.tasks.jsonl import task_of_files

_URL = "https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data/"
_PATIENCE = 20.0  # seconds for the server's answer


def gsm8k(
    *,
    folder: str = "",
    verifier: str = "numeric",
    prompt_length: int = 256,
    answer_length: int = 512,
    time_limit: float = 5.0,
) -> Task:
    """Solve word problems of school arithmetic; the splits are the published ones.

    The right answer is the number after `####`, its derivation is `row["solution"]`.
    """

    def files() -> dict[str, Path]:
        place = Path(folder) if folder else cache_folder() / "downloads" / "gsm8k"
        paths = {split: place / f"{split}.jsonl" for split in ("train", "test")}
        for file in paths.values():
            if not folder and not file.exists():
                _download(file)
        return paths

    def read() -> Mapping[str, Iterator[Draw]]:
        return {split: read_draws(file, _convert) for split, file in files().items()}

    source = Source(read, lambda: digest(*files().values()))
    return task_of_files("gsm8k", source, verifier, prompt_length, answer_length, time_limit)


def _convert(row: dict) -> Draw:
    for field in ("question", "answer"):
        if not isinstance(row[field], str):
            raise TypeError(f"field {field!r} must be text, not {type(row[field]).__name__}")
    solution, marked, gold = row["answer"].rpartition("####")
    if not marked:
        raise ValueError("its answer has no ####")
    worked = re.sub(r"<<[^>]*>>", "", solution).strip()  # annotations for a calculator, which does not exist here
    return row["question"], gold.strip().replace(",", ""), {"solution": worked}


def _download(file: Path) -> None:
    """Download a file once; it is written whole or not at all."""
    try:
        with urllib.request.urlopen(_URL + file.name, timeout=_PATIENCE) as answer:
            content = answer.read()
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")
        part.write_bytes(content)
        part.replace(file)
    except (urllib.error.URLError, OSError) as error:
        raise ValueError(
            f"GSM8K cannot be downloaded from {_URL} ({error}); put train.jsonl and test.jsonl from there into a "
            "folder and set task.options.folder"
        ) from error
