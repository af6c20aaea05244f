"""Preference pairs of a run: those of a JSONL file, whose answers are strings or chat messages, or made of a task."""

import collections
import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.ground.ranges import one_of, suggestion
from jaxrl_llm.tasks.base import Task, TooLong
from jaxrl_llm.tasks.data_files import digest, json_lines, json_row
from jaxrl_llm.tasks.messages import Message, message
from jaxrl_llm.tasks.preference.pair_batches import PairEncoder
from jaxrl_llm.tasks.preference.pair_config import PreferenceConfig
from jaxrl_llm.tasks.preference.pair_rules import FilePair, Pair, pairs
from jaxrl_llm.tasks.splits import is_test
from jaxrl_llm.tasks.tokenizers.plain_tokenizers import PublishedTokenizer

Render = Callable[[Sequence[Message]], str]


@dataclasses.dataclass(frozen=True)
class PairFile:
    """The pairs of a file, in its order.

    `uid` is the number of the line. `skipped` counts the lines that were left out, by reason.
    """

    train: Sequence[FilePair]
    test: Sequence[FilePair]
    skipped: Mapping[str, int]


class _BadLine(Exception):
    """A line that is no pair: a reason to count, what was seen, and the remedy."""

    def __init__(self, reason: str, seen: str, remedy: str):
        super().__init__(f"{seen}; {remedy}")
        self.reason = reason


def read_pairs(path: str | Path, encoder: PairEncoder, *, render: Render | None = None, bad: str = "raise") -> PairFile:
    """The pairs of a JSONL file, one object a line.

    A line has `chosen` and `rejected`: both strings, or both lists of messages {"role", "content"}. It may have a
    `prompt` of the same kind. If not, the prompt is what both begin with: of strings, up to the start of the word in
    which they differ (a space before it goes to the answers); of messages, all but the last. A string prompt next to
    messages is a message of the user. `margin` is a number, 0 if left out. Other fields and empty lines are ignored.

    A hash of the prompt holds out one prompt in eight: the same file gives the same splits, and no prompt is in both.

    Args:
        encoder: a pair that it cannot encode, or that is too long for it, is bad. It puts its prompting around prompts
            that are strings.
        render: messages to the text that the model answers, as the chat template of a tokenizer does it.
        bad: "raise" at the first bad line, or "skip" bad lines and count them.

    Raises:
        ValueError: a bad line (the message has its number and the remedy), no file, or no good line.
    """
    one_of("bad", bad, ("raise", "skip"))
    path, skipped = Path(path), collections.Counter()
    good: list[FilePair] = []
    try:
        lines = list(json_lines(path))
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error}); name a JSONL file of preference pairs") from error
    for number, line in lines:
        try:
            pair = _pair(number, line, encoder, render)
        except _BadLine as error:
            if bad == "raise":
                skip = 'bad="skip" (in a run preference.bad_lines=skip)'
                raise ValueError(f"{path}, line {number}: {error}, or set {skip} to leave such lines out") from None
            skipped[error.reason] += 1
        else:
            good.append(pair)
    train, test = _split(good)
    if not train:
        counts = ", ".join(f"{reason} {count}" for reason, count in skipped.items()) or "nothing"
        raise ValueError(f"{path} has no pair to train on (skipped: {counts}); give it good lines")
    return PairFile(train=train, test=test, skipped=dict(skipped))


def _split(pairs: Sequence[FilePair]) -> tuple[list[FilePair], list[FilePair]]:
    """(train, test) by the hash that splits tasks, so that no prompt on which a policy is evaluated is trained on.

    If that leaves no test pair, the file is about the train prompts of a task, and another hash decides.
    """
    salt = "" if any(is_test(pair["prompt"]) for pair in pairs) else "pair: "
    train, test = ([pair for pair in pairs if is_test(salt + pair["prompt"]) == side] for side in (False, True))
    return train, test


def _pair(number: int, line: str, encoder: PairEncoder, render: Render | None) -> FilePair:
    row = _row(line)
    prompt, chosen, rejected, rendered = _texts(row, encoder, render)
    if not prompt:
        raise _BadLine("empty", "it asks nothing", "give it a prompt")
    for field, text in (("chosen", chosen), ("rejected", rejected)):
        if not text.strip():
            raise _BadLine("empty", f"{field} has no text after the prompt", "give it an answer")
    pair = FilePair(uid=number, prompt=prompt, chosen=chosen, rejected=rejected, margin=0.0, rendered=rendered)
    for field in ("prompt", "chosen", "rejected"):
        try:
            encoder.ids(field, pair)
        except ValueError as error:
            reason = "too long" if isinstance(error, TooLong) else "unknown character"
            seen, _, remedy = str(error).rpartition("; ")
            raise _BadLine(reason, seen or remedy, remedy if seen else "correct the line") from None
    margin = row.get("margin", 0.0)
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not abs(margin) <= sys.float_info.max:
        raise _BadLine("wrong type", f"margin={margin!r} is no finite number", "give a number or leave it out")
    pair["margin"] = float(margin)
    return pair


def _row(line: str) -> dict[str, Any]:
    try:
        row = json_row(line)
    except (TypeError, ValueError) as error:
        raise _BadLine("not JSON", str(error), "write one JSON object in UTF-8 on each line") from None
    for field in ("chosen", "rejected"):
        if row.get(field) is None:
            raise _BadLine("missing field", f"it has no {field!r}{suggestion(field, row)}", f"give {field!r}")
    if row["chosen"] == row["rejected"]:
        raise _BadLine("equal", f"both answers are {str(row['chosen'])[:40]!r}", "give two different answers")
    return row


def _texts(row: Mapping[str, Any], encoder: PairEncoder, render: Render | None) -> tuple[str, str, str, bool]:
    """(whole prompt, chosen, rejected) as text, and whether a chat template rendered the prompt."""
    prompt, chosen, rejected = row.get("prompt"), row["chosen"], row["rejected"]
    if isinstance(chosen, str) and isinstance(rejected, str):
        if prompt is None:
            prompt, chosen, rejected = _split_text(chosen, rejected)
        if isinstance(prompt, str):
            return encoder.prompting.text(encoder.tokenizer, prompt), chosen, rejected, encoder.prompting.chat
    elif isinstance(chosen, list) and isinstance(rejected, list) and isinstance(prompt, str | list | None):
        asked, chosen, rejected = _split_messages(prompt, _messages("chosen", chosen), _messages("rejected", rejected))
        if render is None:
            raise _BadLine("chat", "it holds chat messages", "use a tokenizer with a chat template")
        return render(asked), chosen, rejected, True
    kinds = {field: type(row.get(field)).__name__ for field in ("prompt", "chosen", "rejected")}
    raise _BadLine("wrong type", f"it has the types {kinds}", "give all as strings, or all as lists of messages")


def _split_text(chosen: str, rejected: str) -> tuple[str, str, str]:
    """The common beginning, back to the start of a word: '3+4=7' and '3+4=77' share '3+4='."""
    cut = _shared(chosen, rejected)
    while cut and chosen[cut - 1].isalnum():
        cut -= 1
    if cut and chosen[cut - 1] == " ":  # tokenizers of published models keep a space with the word after it
        cut -= 1
    if not cut:
        raise _BadLine("missing field", "chosen and rejected do not begin alike", "give 'prompt'")
    return chosen[:cut], chosen[cut:], rejected[cut:]


def _messages(field: str, given: Sequence[Any]) -> list[Message]:
    try:
        return [message(field, one) for one in given]
    except TypeError as error:
        raise _BadLine("wrong type", str(error), "correct the message") from None


def _split_messages(prompt: Any, chosen: list[Message], rejected: list[Message]) -> tuple[list[Message], str, str]:
    """(messages of the prompt, chosen text, rejected text)."""
    shared = _shared(chosen, rejected)
    if not shared and isinstance(prompt, str):
        asked: list[Message] = [{"role": "user", "content": prompt}]
    elif not shared:
        asked = _messages("prompt", prompt or [])
    elif isinstance(prompt, list):
        raise _BadLine("wrong type", "chosen and rejected repeat the prompt", "leave 'prompt' out")
    else:
        asked = chosen[:shared]
    for field, given in (("chosen", chosen), ("rejected", rejected)):
        if len(given) == shared:
            raise _BadLine("empty", f"{field} has no message after the prompt", "give it an answer")
        if len(given) > shared + 1 or given[shared]["role"] != "assistant":
            roles = [message["role"] for message in given[shared:]]
            raise _BadLine("wrong type", f"{field} answers with the roles {roles}", "end it with one assistant message")
    if not asked:
        raise _BadLine("missing field", "chosen and rejected share no message", "give 'prompt'")
    return asked, chosen[shared]["content"], rejected[shared]["content"]


def _shared(left: Sequence[Any], right: Sequence[Any]) -> int:
    """How many items both begin with."""
    return sum(1 for _ in itertools.takewhile(lambda two: two[0] == two[1], zip(left, right, strict=False)))


@dataclasses.dataclass(frozen=True)
class PairSplits:
    """Pairs without a common prompt, their encoder, and one line on where they come from and what was left out."""

    train: Sequence[Pair]
    test: Sequence[Pair]
    encoder: PairEncoder
    source: str


def read_splits(config: PreferenceConfig, task: Task, encoder: PairEncoder, data_dir: str | None) -> PairSplits:
    """The pairs of both splits; a task's pairs are written first if they are not on disk.

    Raises:
        ValueError: see `pairs` and `read_pairs`; or no pair is held out.
    """
    if not config.file:
        clean = dataclasses.replace(config.rules(), label_noise=0.0)
        train = pairs(task, config.rules(), "train", data_dir=data_dir)
        test = pairs(task, clean, "test", data_dir=data_dir)
        return PairSplits(train, test, encoder, f"{len(train)} pairs of {task.name}, {len(test)} held out")
    tokenizer = encoder.tokenizer
    render = None
    if isinstance(tokenizer, PublishedTokenizer) and tokenizer.template:
        render = functools.partial(tokenizer.chat, **encoder.prompting.chat_options)
    own = read_pairs(Path(config.file).expanduser(), encoder, render=render, bad=config.bad_lines)
    if not own.test:
        raise ValueError(
            f"preference.file={config.file!r} has no held-out pair among {len(own.train)}: one prompt in eight is "
            "held out; give it more prompts"
        )
    skipped = ", ".join(f"{reason} {count}" for reason, count in own.skipped.items())
    said = f"{len(own.train)} pairs of {config.file}, {len(own.test)} held out"
    return PairSplits(own.train, own.test, encoder, said + (f"; lines left out: {skipped}" if skipped else ""))


def file_identity(path: str) -> str:
    """A digest of the file's content, or the path itself if there is no such file."""
    file = Path(path).expanduser()
    return digest(file) if file.is_file() else path
