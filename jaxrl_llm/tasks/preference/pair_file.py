"""Preference pairs from a JSONL file: chosen and rejected as strings or chat messages, with or without a prompt."""

import codecs
import collections
import dataclasses
import itertools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.ground.json_files import check_encoding, decoded
from jaxrl_llm.ground.ranges import one_of, suggestion
from jaxrl_llm.tasks.base import TooLong
from jaxrl_llm.tasks.preference.pair_rules import Pair
from jaxrl_llm.tasks.preference.pair_stream import PairEncoder
from jaxrl_llm.tasks.splits import is_test

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message]], str]


@dataclasses.dataclass(frozen=True)
class PairFile:
    """The pairs of a file, in its order.

    `uid` is the number of the line. `prompt` is the whole text before an answer, to be encoded without `prompting`.
    `skipped` counts the lines that were left out, by reason.
    """

    train: Sequence[Pair]
    test: Sequence[Pair]
    skipped: Mapping[str, int]


class _BadLine(Exception):
    """What is wrong with a line: a reason to count, what was seen, and the remedy."""

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
    good: list[Pair] = []
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error}); name a JSONL file of preference pairs") from error
    check_encoding(path, content)
    lines = content.removeprefix(codecs.BOM_UTF8).split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
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


def _split(pairs: Sequence[Pair]) -> tuple[list[Pair], list[Pair]]:
    """(train, test) by the hash that splits tasks, so that no prompt on which a policy is evaluated is trained on.

    If that leaves no test pair, the file is about the train prompts of a task, and another hash decides.
    """
    salt = "" if any(is_test(pair["prompt"]) for pair in pairs) else "pair: "
    train, test = ([pair for pair in pairs if is_test(salt + pair["prompt"]) == side] for side in (False, True))
    return train, test


def _pair(number: int, line: bytes, encoder: PairEncoder, render: Render | None) -> Pair:
    row = _row(line)
    prompt, chosen, rejected = _texts(row, encoder, render)
    if not prompt:
        raise _BadLine("empty", "it asks nothing", "give it a prompt")
    for field, text in (("chosen", chosen), ("rejected", rejected)):
        if not text.strip():
            raise _BadLine("empty", f"{field} has no text after the prompt", "give it an answer")
    verbatim = dataclasses.replace(encoder, prompting=None)
    for kind, text in (("prompt", prompt), ("chosen", chosen), ("rejected", rejected)):
        try:
            verbatim.ids(kind, text)
        except ValueError as error:
            reason = "too long" if isinstance(error, TooLong) else "unknown character"
            seen, _, remedy = str(error).rpartition("; ")
            raise _BadLine(reason, seen or remedy, remedy if seen else "correct the line") from None
    margin = row.get("margin", 0.0)
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not abs(margin) <= sys.float_info.max:
        raise _BadLine("wrong type", f"margin={margin!r} is no finite number", "give a number or leave it out")
    return Pair(uid=number, prompt=prompt, chosen=chosen, rejected=rejected, margin=float(margin))


def _row(line: bytes) -> dict[str, Any]:
    try:
        row = decoded(line.decode())
    except UnicodeDecodeError as error:
        raise _BadLine(
            "not UTF-8", f"byte {line[error.start]:#04x} at column {error.start + 1} is not UTF-8", "save it as UTF-8"
        ) from None
    except json.JSONDecodeError as error:
        raise _BadLine(
            "not JSON", f"{error.msg} at column {error.colno}", "write one JSON object on each line"
        ) from None
    except ValueError as error:
        raise _BadLine("not JSON", str(error), "write one JSON object on each line") from None
    if not isinstance(row, dict):
        raise _BadLine("not JSON", f"it holds a {type(row).__name__}", "write one JSON object on each line")
    for field in ("chosen", "rejected"):
        if row.get(field) is None:
            raise _BadLine("missing field", f"it has no {field!r}{suggestion(field, row)}", f"give {field!r}")
    if row["chosen"] == row["rejected"]:
        raise _BadLine(
            "equal", f"chosen and rejected are both {str(row['chosen'])[:40]!r}", "give two different answers"
        )
    return row


def _texts(row: Mapping[str, Any], encoder: PairEncoder, render: Render | None) -> tuple[str, str, str]:
    """(whole prompt, chosen, rejected) as text."""
    prompt, chosen, rejected = row.get("prompt"), row["chosen"], row["rejected"]
    if isinstance(chosen, str) and isinstance(rejected, str):
        if prompt is None:
            prompt, chosen, rejected = _split_text(chosen, rejected)
        if isinstance(prompt, str):
            return encoder.whole(prompt), chosen, rejected
    elif isinstance(chosen, list) and isinstance(rejected, list) and isinstance(prompt, str | list | None):
        asked, chosen, rejected = _split_messages(prompt, _messages("chosen", chosen), _messages("rejected", rejected))
        if render is None:
            raise _BadLine("chat", "it holds chat messages", "use a tokenizer with a chat template")
        return render(asked), chosen, rejected
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
    for message in given:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            shown = repr(message)[:60]
            raise _BadLine("wrong type", f"{field} holds {shown}", 'give messages {"role": "...", "content": "..."}')
    return list(given)


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
