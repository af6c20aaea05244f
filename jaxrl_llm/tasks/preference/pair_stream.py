"""Streams of preference pairs, fed by Grain: of a task's own pairs on disk, or of any other source of pairs.

Rows 2 i and 2 i + 1 of a batch are the chosen and the rejected answer of pair i, each after its prompt.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
from jaxtyping import Bool, Float, Integer

from jaxrl_llm.ground.ranges import at_least, one_of, within
from jaxrl_llm.tasks.base import Task
from jaxrl_llm.tasks.data import Decoded, SupervisedBatch, batches, default_data_dir, examples
from jaxrl_llm.tasks.preference.pair_rules import Pair, PairRules
from jaxrl_llm.tasks.prompting import Prompting
from jaxrl_llm.tasks.tokenizers.tokenizer import Tokenizer

__all__ = ["PairBatch", "PairEncoder", "TooLong", "all_pairs", "pair_stream", "pairs"]

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


class TooLong(ValueError):
    """A prompt or an answer has more tokens than its bound."""


@dataclasses.dataclass(frozen=True)
class PairEncoder:
    """Text to rows of tokens.

    Args:
        tokenizer: of the model.
        prompt_length: most tokens of a prompt.
        answer_length: most tokens of an answer, EOS included.
        prompting: the text around every prompt; None: prompts are whole texts already.
    """

    tokenizer: Tokenizer
    prompt_length: int
    answer_length: int
    prompting: Prompting | None = dataclasses.field(default_factory=Prompting)

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
            ids = self.tokenizer.encode(self.whole(text))
        else:
            ids = [*self.tokenizer.encode(text), self.tokenizer.end_ids[0]]
        name = "prompt_length" if kind == "prompt" else "answer_length"
        field = "rollout.max_prompt_length" if kind == "prompt" else "rollout.max_new_tokens"
        if len(ids) > getattr(self, name):
            shown = text if len(text) <= 60 else text[:57] + "..."
            raise TooLong(
                f"the {kind} {shown!r} has {len(ids)} tokens{'' if kind == 'prompt' else ' with EOS'}, over {name}="
                f"{getattr(self, name)}; raise {name} (in a run {field})"
            )
        return ids

    def whole(self, prompt: str) -> str:
        """The prompt with what stands around it."""
        return prompt if self.prompting is None else self.prompting.text(self.tokenizer, prompt)

    def rows(self, given: Sequence[Pair]) -> dict[str, Any]:
        """tokens, loss_mask and segment_ids of `PairBatch`."""
        sides = [(self.ids("prompt", pair["prompt"]), self.ids(kind, pair[kind])) for pair in given for kind in _SIDES]
        length = self.prompt_length + self.answer_length
        tokens = np.full((len(sides), length), self.tokenizer.pad_id, np.int32)
        for row, (prompt, answer) in zip(tokens, sides, strict=True):
            row[: len(prompt) + len(answer)] = prompt + answer
        position = np.arange(length)[None, :]
        start = np.array([len(prompt) for prompt, _ in sides])[:, None]
        end = start + np.array([len(answer) for _, answer in sides])[:, None]
        return {
            "tokens": tokens,
            "loss_mask": (position >= start) & (position < end),
            "segment_ids": (position < end).astype(np.int32),
        }

    def __call__(self, numbered: Sequence[tuple[int, Pair]]) -> PairBatch:
        """The batch of pairs that are numbered by their place in a stream."""
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
        both = self(numbered)
        return SupervisedBatch(
            uid=both["uid"],
            draw=both["draw"],
            tokens=both["tokens"][::2],
            loss_mask=both["loss_mask"][::2],
            segment_ids=both["segment_ids"][::2],
        )


_SIDES = ("chosen", "rejected")


def pairs(task: Task, rules: PairRules, split: str = "train", *, data_dir: str | Path | None = None) -> Sequence[Pair]:
    """Random access to the pairs of a task, one for each of its examples; written first if they are not on disk.

    Args:
        split: "train" or "test"; no prompt is in both, as in the task itself.
        data_dir: where the data is, or is written; default `default_data_dir()`.

    Raises:
        ValueError: an unknown split, rules that make no pair of an example, or data that cannot be written.
    """
    one_of("split", split, ("train", "test"))
    import tensorflow_datasets as tfds

    from jaxrl_llm.tasks.preference import pair_builder

    given = {name: examples(task, name, data_dir) for name in ("train", "test")}
    folder = pair_builder.prepare(task, rules, given, default_data_dir() if data_dir is None else Path(data_dir))
    reader: Any = tfds.builder_from_directory(folder)
    return Decoded(reader.as_data_source(split), _pair)


def pair_stream(source: Sequence[Pair], encoder: PairEncoder, *, seed: int, batch_size: int) -> Any:
    """An endless stream of `PairBatch`, in a new order every epoch; a `grain.DatasetIterator` with an exact state.

    Args:
        source: from `pairs` or `read_pairs`.
        seed: of the order, 0 to 2**32 - 1.
        batch_size: pairs a batch, which gets twice as many rows.

    Raises:
        ValueError: no pair, a batch size below 1, or a seed out of range; on the way, an answer that is too long.
    """
    at_least("batch_size", batch_size, 1)
    within("seed", seed, 0.0, 2.0**32 - 1)
    if not len(source):
        raise ValueError("source holds no pair; look at what its reader skipped")
    return batches(source, encoder, seed, batch_size)


def all_pairs(source: Sequence[Pair], encoder: PairEncoder, *, limit: int | None = None) -> PairBatch:
    """The first `limit` pairs (default: all) as one batch, in their order.

    Raises:
        ValueError: a limit below 1, no pair, or an answer that is too long.
    """
    if limit is not None:
        at_least("limit", limit, 1, "leave it out to get all pairs")
    if not len(source):
        raise ValueError("source holds no pair; look at what its reader skipped")
    return encoder([(i, source[i]) for i in range(min(len(source), limit or len(source)))])


def _pair(record: Any) -> Pair:
    prompt, chosen, rejected = (record[key].decode() for key in ("prompt", "chosen", "rejected"))
    return Pair(uid=int(record["uid"]), prompt=prompt, chosen=chosen, rejected=rejected, margin=float(record["margin"]))
