"""Batches and streams of preference pairs from any source of them, fed by Grain.

Rows 2 i and 2 i + 1 of a batch are the chosen and the rejected answer of pair i, each after its prompt.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from jaxrl_llm.tasks.base import Prompting, Task, bounded
from jaxrl_llm.tasks.data import SupervisedBatch, answered_rows, batches, numbered
from jaxrl_llm.tasks.preference.pair_rules import FilePair, Pair
from jaxrl_llm.tasks.tokenizers.plain_tokenizers import Tokenizer


class PairBatch(SupervisedBatch):
    """p pairs as n = 2 p rows: chosen, rejected, chosen, rejected, ...; `uid` and `draw` are of the pairs."""

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
    prompting: Prompting = dataclasses.field(default_factory=Prompting)

    @classmethod
    def of(cls, task: Task) -> "PairEncoder":
        return cls(task.tokenizer, task.prompt_length, task.answer_length, task.prompting)

    def ids(self, field: Literal["prompt", "chosen", "rejected"], pair: Pair | FilePair) -> list[int]:
        """The ids of a pair's prompt, or of one of its answers with EOS. The prompt of a file is a whole text already.

        Raises:
            TooLong: over the bound.
            ValueError: the text has a character that the tokenizer does not know.
        """
        text = pair[field]
        if field != "prompt":
            return bounded(field, text, [*self.tokenizer.encode(text), self.tokenizer.end_ids[0]], self.answer_length)
        rendered = pair.get("rendered")
        read = self.prompting.ids if rendered is None else Prompting(chat=rendered).encode
        return bounded(field, text, read(self.tokenizer, text), self.prompt_length)

    def rows(self, given: Sequence[Pair]) -> dict[str, Any]:
        """tokens, loss_mask and segment_ids of `PairBatch`."""
        prompts = [ids for pair in given for ids in [self.ids("prompt", pair)] * 2]
        answers = [self.ids(side, pair) for pair in given for side in ("chosen", "rejected")]
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
