"""The examples of a task: drawn deterministically, without a common prompt in train and test."""

import hashlib
import itertools
import re

import numpy as np

from jaxrl_llm.tasks.base import Example, Task

__all__ = ["data_name", "generate"]

_TEST_SHARE = 8  # one prompt in this many belongs to the test split, whatever the sizes of the splits
_PATIENCE = 20_000  # draws in a row without a new example before the space counts as exhausted
_FINGERPRINTED = 256  # draws that enter the name of the data
_SEED = 0
_SPELLED = str.maketrans({"+": "plus", "-": "minus", "*": "times"})  # signs have no place in a folder's name


def generate(task: Task) -> dict[str, list[Example]]:
    """The train and the test split, the same on every machine.

    A hash of the prompt decides its split, so that a prompt of the test split is in no train split of the same task,
    at any size. No prompt appears twice.

    Raises:
        ValueError: the task has too few different prompts, or draws an example that it could not be trained on.
    """
    rng = np.random.default_rng(_SEED)
    wanted = {"train": task.train_size, "test": task.test_size}
    splits: dict[str, list[Example]] = {split: [] for split in wanted}
    seen: set[str] = set()
    useless = 0
    while any(len(splits[split]) < size for split, size in wanted.items()):
        prompt, answer = task.sample(rng)
        split = "test" if _digest(prompt) % _TEST_SHARE == 0 else "train"
        if prompt in seen or len(splits[split]) == wanted[split]:
            useless += 1
            if useless == _PATIENCE:
                raise _exhausted(task, {split: len(examples) for split, examples in splits.items()})
            continue
        useless = 0
        seen.add(prompt)
        _check(task, prompt, answer)
        splits[split].append(Example(uid=len(splits[split]), prompt=prompt, answer=answer))
    return splits


def data_name(task: Task) -> str:
    """The folder of the task's data: its options and sizes in words, and a digest of its first draws.

    The digest changes with the task's code and with numpy's generators, so that stale data is never read.
    """
    options = {**task.options, "train": task.train_size, "test": task.test_size}
    words = "-".join(f"{option}_{str(value).lower().translate(_SPELLED)}" for option, value in options.items())
    rng = np.random.default_rng(_SEED)
    draws = list(itertools.islice(iter(lambda: task.sample(rng), None), _FINGERPRINTED))
    return f"{task.name}-{re.sub(r'[^a-z0-9_.-]', 'x', words)}-{_digest(repr((options, draws))) & 0xFFFFFF:06x}"


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _check(task: Task, prompt: str, answer: str) -> None:
    for kind, text, room in ("prompt", prompt, task.prompt_length), ("answer", answer, task.answer_length - 1):
        if len(task.tokenizer.encode(text)) > room:
            field = " (in a run rollout.max_prompt_length; 0 is the task's own bound)" if kind == "prompt" else ""
            bound = f"{getattr(task, f'{kind}_length')}{' with EOS' if kind == 'answer' else ''}"
            raise ValueError(
                f"task {task.name!r} drew the {kind} {text!r} of {len(text)} tokens, but {kind}_length={bound}; "
                f"raise {kind}_length{field}"
            )
    if task.verify(prompt, answer) != 1.0:
        raise ValueError(
            f"task {task.name!r} drew the answer {answer!r} to {prompt!r}, which its own verify scores "
            f"{task.verify(prompt, answer)}; correct sample or verify"
        )


def _exhausted(task: Task, found: dict[str, int]) -> ValueError:
    short = next(split for split, size in found.items() if size < getattr(task, f"{split}_size"))
    return ValueError(
        f"{short}_size={getattr(task, f'{short}_size')} is more than task {task.name!r} with {dict(task.options)} "
        f"holds: {found[short]} different {short} prompts were found; set {short}_size <= {found[short]} "
        "or choose options with more prompts"
    )
