"""Pairs made of a task's own examples: right preferred to wrong, shorter to longer, and labels that may be swapped."""

import dataclasses
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypedDict

import numpy as np

from jaxrl_llm.ground.ranges import one_of
from jaxrl_llm.tasks.base import Example, Task
from jaxrl_llm.tasks.data import examples, numbered
from jaxrl_llm.tasks.messages import EARLIER
from jaxrl_llm.tasks.preference.pair_config import CORRUPTIONS, PairRules
from jaxrl_llm.tasks.splits import data_name

_SPLITS = ("train", "test")
_ATTEMPTS = 200  # at a wrong answer to one prompt
_FINGERPRINTED = 64  # pairs that enter the name of the data


class Pair(TypedDict):
    """One prompt with two answers, of which one is preferred; `uid` is its index in its split, or its line."""

    uid: int
    prompt: str
    chosen: str
    rejected: str
    margin: float  # how far apart the rewards should be; 0: only their order is known


class FilePair(Pair):
    """A pair of a file. Its prompt is the whole text before an answer."""

    rendered: bool  # by a chat template; otherwise a plain text, which the tokenizer begins


def _corrupt(kind: str, rng: np.random.Generator, text: str, alphabet: str) -> str:
    """The text with one character replaced by one of the alphabet, dropped, repeated or swapped with the next."""
    if kind == "swap" and len(text) < 2:
        return text
    place = int(rng.integers(len(text) - 1 if kind == "swap" else len(text)))
    before, character, after = text[:place], text[place], text[place + 1 :]
    if kind == "replace":
        return before + alphabet[int(rng.integers(len(alphabet)))] + after
    if kind == "drop":
        return before + after
    if kind == "repeat":
        return before + character + character + after
    return before + after[0] + character + after[1:]


def pairs(task: Task, rules: PairRules, split: str = "train", *, data_dir: str | Path | None = None) -> Sequence[Pair]:
    """Random access to the pairs of a task, one for each of its examples; written first if they are not on disk.

    Raises:
        ValueError: an unknown split, rules that make no pair of an example, or data that cannot be written.
    """
    one_of("split", split, _SPLITS)
    from jaxrl_llm.tasks.builder import stored

    given = {name: examples(task, name, data_dir) for name in _SPLITS}

    def make() -> Mapping[str, Sequence[Pair]]:
        return {name: list(make_pairs(task, rules, list(source), name)) for name, source in given.items()}

    return stored(Pair, "jaxrl_llm_pairs", "1.0.0", _name(task, rules, given["test"]), data_dir, make)[split]


def _name(task: Task, rules: PairRules, examples: Sequence[Example]) -> str:
    """The name of the folder of the pairs: the rules in words, and a digest of the task's data and the first pairs.

    Pairs that other code made are thus never read.
    """
    few = [row for _, row in numbered(examples, _FINGERPRINTED)]
    content = repr((data_name(task), task.answer_length, rules, list(make_pairs(task, rules, few, "test"))))
    words = "-".join(f"{key}_{value}" for key, value in dataclasses.asdict(rules).items())
    digest = hashlib.blake2b(content.encode(), digest_size=4).hexdigest()
    return f"{task.name}-{re.sub(r'[^a-z0-9_.-]', 'x', words)}-{digest}"


def make_pairs(task: Task, rules: PairRules, examples: Sequence[Example], split: str) -> Iterator[Pair]:
    """One pair of every example, the same on every machine; a pair does not depend on the others.

    Raises:
        ValueError: the corruption finds no wrong answer to an example, or no longer one of equal reward.
    """
    alphabet = "".join(sorted({character for example in examples for character in example["answer"]}))
    for example in examples:
        if EARLIER in example["row"]:
            raise ValueError(
                f"pairs of a task have prompts without earlier messages, unlike {example['prompt']!r:.60}; set "
                "preference.file to a file of pairs"
            )
        rng = np.random.default_rng([rules.seed, _SPLITS.index(split), example["uid"]])
        swapped, alike = rng.random() < rules.label_noise, rng.random() < rules.equal_share
        judge = _Judge(task, example)
        if alike:
            better, worse = _equally_correct(rng, judge, rules, alphabet)
        else:
            better, worse = example["answer"], _wrong(rng, judge, rules, alphabet)
        chosen, rejected = (worse, better) if swapped else (better, worse)
        yield Pair(uid=example["uid"], prompt=example["prompt"], chosen=chosen, rejected=rejected, margin=0.0)


@dataclasses.dataclass(frozen=True)
class _Judge:
    """The task's verdict on the answers to one prompt."""

    task: Task
    example: Example

    def reward(self, answer: str) -> float:
        return self.task.verify(self.example["prompt"], answer, self.example["answer"], self.example["row"])

    def fits(self, answer: str) -> bool:
        """Return whether the task's tokenizer can write the answer, and its end, within the task's bound."""
        try:
            return bool(answer) and len(self.task.ids_of_answer(answer)) <= self.task.answer_length
        except ValueError:  # a character that no answer of this task has
            return False


def _wrong(rng: np.random.Generator, judge: _Judge, rules: PairRules, alphabet: str) -> str:
    answer = judge.example["answer"]
    right = judge.reward(answer)
    kinds = CORRUPTIONS if rules.corruption == "any" else (rules.corruption,)
    for _ in range(_ATTEMPTS):
        wrong = _corrupt(kinds[int(rng.integers(len(kinds)))], rng, answer, alphabet)
        if judge.fits(wrong) and judge.reward(wrong) < right:
            return wrong
    raise ValueError(
        f"preference.corruption={rules.corruption!r} makes no wrong answer of {answer!r} to "
        f"{judge.example['prompt']!r} in {_ATTEMPTS} attempts; set preference.corruption='any', or raise the task's "
        "answer_length"
    )


def _equally_correct(rng: np.random.Generator, judge: _Judge, rules: PairRules, alphabet: str) -> tuple[str, str]:
    """(shorter, longer) of equal reward: both right if brackets change nothing, else both wrong."""
    answer = judge.example["answer"]
    bracketed = f"({answer})"
    if judge.fits(bracketed) and judge.reward(bracketed) == judge.reward(answer):
        return answer, bracketed
    wrong = ""
    for _ in range(_ATTEMPTS):
        wrong = _wrong(rng, judge, rules, alphabet)
        for shorter in (wrong, wrong[:-1]):  # the second in case the first fills the task's bound
            longer = _corrupt("repeat", rng, shorter, alphabet) if shorter else ""
            if judge.fits(longer) and judge.reward(shorter) == judge.reward(longer) == judge.reward(wrong):
                return shorter, longer
    raise ValueError(
        f"preference.equal_share={rules.equal_share} has no longer answer to {judge.example['prompt']!r} that is as "
        f"wrong as {wrong!r} and within the task's answer_length; set preference.corruption='any', or raise the "
        "task's answer_length"
    )
