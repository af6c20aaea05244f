"""The split of a prompt, and the name of a task's data on disk. drawn_splits.py makes the splits."""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jaxrl_llm.ground.machine import cache_folder
from jaxrl_llm.tasks.base import Draw, Row, Task, users_code

_TEST_SHARE = 8  # one prompt in this many belongs to the test split, whatever the sizes of the splits
_FINGERPRINTED = 256  # draws that enter the name of the data
SEED = 0  # of the draws
_SPELLED = str.maketrans({"+": "plus", "-": "minus", "*": "times"})  # signs are spelled out in a folder's name
_LONGEST_NAME = 120  # most characters of words in a folder's name; the digest covers the rest


def is_test(prompt: str) -> bool:
    """Return whether a prompt belongs to the test split, by a hash of its text."""
    return _digest(prompt) % _TEST_SHARE == 0


def parts(task: Task, draw: Draw) -> tuple[str, str, Row]:
    """(prompt, right answer, other fields), which are empty where the task gives none."""
    whole = (*draw, {}) if isinstance(draw, tuple) and len(draw) == 2 else draw
    if not (isinstance(whole, tuple) and len(whole) == 3 and all(map(isinstance, whole, (str, str, Mapping)))):
        raise ValueError(
            f"task {task.name!r} drew {draw!r:.80}; give texts (prompt, answer), or (prompt, answer, row) with a dict"
        )
    return whole


def default_data_dir() -> Path:
    """$XDG_CACHE_HOME/jaxrl_llm/data, or the same below ~/.cache."""
    return cache_folder() / "data"


def data_name(task: Task) -> str:
    """The name of the folder of the task's data: options and sizes in words, and a digest of the content.

    The digest follows what the task draws or the file that a data set is read from, the tokenizer, the text around
    prompts with the day that it names, and the bound if longer prompts are dropped. So stale data is never read.
    """
    options = {**task.options, "train": task.train_size, "test": task.test_size}
    words = "-".join(f"{option}_{str(value).lower().translate(_SPELLED)}" for option, value in options.items())
    words = re.sub(r"[^a-z0-9_.-]", "x", words)[:_LONGEST_NAME].rstrip(".")
    if task.source is not None:
        content: object = task.source.fingerprint()
    else:
        assert task.sample is not None
        rng = np.random.default_rng(SEED)
        with users_code(task.name, "sample"):
            content = [task.sample(rng) for _ in range(_FINGERPRINTED)]
    bound = task.prompt_length if task.source is not None or task.drop_long else None
    whole = (options, content, task.tokenizer.fingerprint, task.prompting, bound, *filter(None, [task.day]))
    return f"{task.name}-{words}-{_digest(repr(whole)) & 0xFFFFFF:06x}"


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
