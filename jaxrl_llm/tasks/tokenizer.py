"""A tokenizer of single characters: small enough that a model of a few hundred thousand parameters can learn a task."""

import dataclasses
from collections.abc import Iterable
from typing import ClassVar

__all__ = ["CharTokenizer"]

_NO_CHARACTER = "\N{REPLACEMENT CHARACTER}"


@dataclasses.dataclass(frozen=True)
class CharTokenizer:
    """Maps the characters of `vocabulary`, in order, to the ids 2, 3, ...; id 0 is padding and id 1 ends an answer.

    Args:
        vocabulary: the characters of the task, each once.

    Raises:
        ValueError: a character appears twice, or the vocabulary is empty.
    """

    vocabulary: str
    pad_id: ClassVar[int] = 0
    eos_id: ClassVar[int] = 1

    def __post_init__(self) -> None:
        twice = sorted({c for c in self.vocabulary if self.vocabulary.count(c) > 1})
        if not self.vocabulary or twice or _NO_CHARACTER in self.vocabulary:
            raise ValueError(
                f"vocabulary={self.vocabulary!r} must be non-empty, hold each character once (repeated: {twice}) "
                f"and not hold {_NO_CHARACTER!r}; list every character of prompts and answers once"
            )

    @property
    def vocab_size(self) -> int:
        """Number of ids: the characters, padding and EOS."""
        return len(self.vocabulary) + 2

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without EOS.

        Raises:
            ValueError: a character is not in the vocabulary.
        """
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

        An id without a character (padding, or an unused row of a larger embedding) becomes U+FFFD rather than
        nothing: a model that samples one inside an answer must not be taken for right. Padding after the text is
        therefore for the caller to cut off.

        Raises:
            ValueError: an id is negative.
        """
        text = []
        for i in map(int, ids):
            if i == self.eos_id:
                break
            if i < 0:
                raise ValueError(f"token id {i} is negative; pass ids >= 0 (0 is padding, 1 is EOS)")
            text.append(self.vocabulary[i - 2] if 2 <= i < self.vocab_size else _NO_CHARACTER)
        return "".join(text)
