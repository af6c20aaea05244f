"""Types of tokenizers, and two that need no file: of single characters, which tiny models learn, and of bytes."""

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

UNKNOWN = "\N{REPLACEMENT CHARACTER}"  # the text of an id that a tokenizer does not know, and of broken UTF-8


@runtime_checkable
class Tokenizer(Protocol):
    """Text to ids and back.

    Padding is a position, never a token: an array holds `pad_id` where there is no token, and lengths or masks say
    where that is. No code may look for `pad_id` to find it, since a published tokenizer uses every id.
    """

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Every id that ends an answer; the first is the one that a supervised answer ends with."""
        ...

    @property
    def pad_id(self) -> int:
        """The value that an array holds where there is no token."""
        ...

    @property
    def vocab_size(self) -> int:
        """The largest id plus 1. A model may have more rows in its embedding, never fewer."""
        ...

    @property
    def fingerprint(self) -> str:
        """Tokenizers with equal fingerprints give equal ids to every text."""
        ...

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, nothing added before or after it."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text before the first end id; an id that the tokenizer does not know becomes `UNKNOWN`."""
        ...


@runtime_checkable
class PublishedTokenizer(Tokenizer, Protocol):
    """The tokenizer of a published checkpoint, which may bring a chat template and knows how a plain text begins."""

    @property
    def template(self) -> str: ...

    def encode_plain(self, text: str) -> list[int]: ...

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str: ...


def before_end(ids: Iterable[int], end_ids: tuple[int, ...]) -> list[int]:
    """The ids before the first of `end_ids`, as Python ints; a negative one is a ValueError."""
    kept: list[int] = []
    for token in map(int, ids):
        if token in end_ids:
            break
        if token < 0:
            raise ValueError(f"token id {token} is negative; pass ids >= 0")
        kept.append(token)
    return kept


class _Plain:
    """Id 0 is padding, id 1 ends an answer, and the symbols follow."""

    end_ids = (1,)
    pad_id = 0


@dataclasses.dataclass(frozen=True)
class CharTokenizer(_Plain):
    """Maps the characters of `vocabulary`, in order, to the ids 2, 3, ..."""

    vocabulary: str

    def __post_init__(self) -> None:
        twice = sorted({c for c in self.vocabulary if self.vocabulary.count(c) > 1})
        if not self.vocabulary or twice or UNKNOWN in self.vocabulary:
            raise ValueError(
                f"vocabulary={self.vocabulary!r} must be non-empty, hold each character once (repeated: {twice}) "
                f"and not hold {UNKNOWN!r}; list every character of prompts and answers once"
            )

    @property
    def vocab_size(self) -> int:
        return len(self.vocabulary) + 2

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(self.vocabulary.encode()).hexdigest()[:16]

    def encode(self, text: str) -> list[int]:
        """The ids of `text`; a character that is not in the vocabulary is a ValueError."""
        ids = [self.vocabulary.find(c) for c in text]
        if -1 in ids:
            at = ids.index(-1)
            raise ValueError(
                f"character {text[at]!r} at position {at} of {text!r} is not in vocabulary={self.vocabulary!r}; "
                "add it to the task's vocabulary or remove it from the text"
            )
        return [i + 2 for i in ids]

    def decode(self, ids: Iterable[int]) -> str:
        """The text before the first EOS.

        An id without a character (padding, or an unused row of a larger embedding) becomes U+FFFD, so that an answer
        in which a model samples one is not right. Padding after the text is therefore the caller's to cut off.
        """
        return "".join(
            self.vocabulary[i - 2] if 2 <= i < self.vocab_size else UNKNOWN for i in before_end(ids, self.end_ids)
        )


@dataclasses.dataclass(frozen=True)
class ByteTokenizer(_Plain):
    """Maps the bytes of UTF-8 to the ids 2 to 257.

    The tokenizer of a text task if the model has none: it encodes any text and needs no training.
    """

    vocab_size = 258
    fingerprint = "bytes"

    def encode(self, text: str) -> list[int]:
        return [byte + 2 for byte in text.encode()]

    def decode(self, ids: Iterable[int]) -> str:
        """The text before the first EOS; an id without a byte becomes U+FFFD, and so does broken UTF-8."""
        kept = before_end(ids, self.end_ids)
        # 0xFF is no byte of UTF-8, so an unknown id is replaced like a broken byte.
        return bytes(i - 2 if 2 <= i < self.vocab_size else 0xFF for i in kept).decode(errors="replace")
