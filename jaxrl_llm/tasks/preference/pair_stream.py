"""Batches and streams of preference pairs from any source of them, fed by Grain.

Rows 2 i and 2 i + 1 of a batch are the chosen and the rejected answer of pair i, each after its prompt.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, TypedDict

import numpy as np
from jaxtyping import Bool, Float, Integer

from jaxrl_llm.tasks.base import Prompting, Task, bounded
from jaxrl_llm.tasks.data import SupervisedBatch, answered_rows, batches, numbered
from jaxrl_llm.tasks.preference.pair_rules import Pair
from jaxrl_llm.tasks.tokenizers.plain_tokenizers import Tokenizer

Ids = Integer[np.ndarray, "p"]
Rows = Integer[np.ndarray, "n t"]


class PairBatch(TypedDict):
    """p pairs as n = 2 p rows of prompt + answer + EOS, left-aligned: chosen, rejected, chosen, rejected, ..."""

    uid: Ids  # int64, of the pair
    draw: Ids  # int64, running count over the stream
    tokens: Rows  # int32, padded on the right
    loss_mask: Bool[np.ndarray, "n t"]  # the answer, EOS included
    segment_ids: Rows  # int32, 1 where there is a token, 0 on padding
    margins: Float[np.ndarray, "p"]  # float32
    prompt: list[str]
    chosen: list[str]
    rejected: list[str]


@dataclasses.dataclass(frozen=True)
class PairEncoder:
    """Text to rows of tokens."""

    tokenizer: Tokenizer
    prompt_length: int  # most tokens of a prompt
    answer_length: int  # most tokens of an answer, EOS included
    prompting: Prompting | None = dataclasses.field(default_factory=Prompting)  # None: prompts are whole texts already

    @classmethod
    def of(cls, task: Task) -> "PairEncoder":
        return cls(task.tokenizer, task.prompt_length, task.answer_length, task.prompting)

    def ids(self, kind: str, text: str) -> list[int]:
        """The ids of a prompt, or of an answer (chosen or rejected) with EOS.

        Raises:
            TooLong: over the bound.
            ValueError: the text has a character that the tokenizer does not know.
        """
        if kind == "prompt":
            return bounded(kind, text, self.tokenizer.encode(self.whole(text)), self.prompt_length)
        return bounded(kind, text, [*self.tokenizer.encode(text), self.tokenizer.end_ids[0]], self.answer_length)

    def whole(self, prompt: str) -> str:
        """The prompt with what stands around it."""
        return prompt if self.prompting is None else self.prompting.text(self.tokenizer, prompt)

    def rows(self, given: Sequence[Pair]) -> dict[str, Any]:
        """tokens, loss_mask and segment_ids of `PairBatch`."""
        prompts = [ids for pair in given for ids in [self.ids("prompt", pair["prompt"])] * 2]
        answers = [self.ids(side, pair[side]) for pair in given for side in ("chosen", "rejected")]
        return answered_rows(prompts, answers, self.prompt_length + self.answer_length, self.tokenizer.pad_id)

    def __call__(self, numbered: Sequence[tuple[int, Pair]]) -> PairBatch:
        """The batch of pairs, each given after its place in the stream."""
        given = [pair for _, pair in numbered]
        return PairBatch(
            uid=np.array([pair["uid"] for pair in given], np.int64),
            draw=np.array([draw for draw, _ in numbered], np.int64),
            margins=np.array([pair["margin"] for pair in given], np.float32),
            prompt=[pair["prompt"] for pair in given],
            chosen=[pair["chosen"] for pair in given],
            rejected=[pair["rejected"] for pair in given],
            **self.rows(given),
        )

    def chosen(self, numbered: Sequence[tuple[int, Pair]]) -> SupervisedBatch:
        """The chosen answers alone, to imitate them."""
        batch = self(numbered)
        rows = {name: batch[name][::2] for name in ("tokens", "loss_mask", "segment_ids")}
        return SupervisedBatch(uid=batch["uid"], draw=batch["draw"], **rows)


def pair_stream(source: Sequence[Pair], encoder: PairEncoder, *, seed: int, batch_size: int) -> Any:
    """An endless stream of `PairBatch`, in a new order every epoch; a `grain.DatasetIterator` with an exact state.

    Raises:
        ValueError: no pair, a batch size below 1, or a seed out of range; from the stream, a text that is too long.
    """
    return batches(_not_empty(source), encoder, seed, batch_size)


def all_pairs(source: Sequence[Pair], encoder: PairEncoder, *, limit: int | None = None) -> PairBatch:
    """The first `limit` pairs (default: all) as one batch, in their order; errors as of `pair_stream`."""
    return encoder(numbered(_not_empty(source), limit))


def _not_empty(source: Sequence[Pair]) -> Sequence[Pair]:
    if not len(source):
        raise ValueError("source holds no pair; look at what its reader skipped")
    return source
