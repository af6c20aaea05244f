"""How a rollout is cut: minibatches independent of length, and micro-batches that do not change the gradient.

A `Layout` maps every place [micro-batch, row, time] of one optimizer step to a token of the rollout.
`padded` gives each answer a row of its own, `packed` lets several answers share one; attention, positions and
per-answer sums follow segment_ids, so both give the same gradient. `shared` gives each group a row: its prompt once, as
segment 1, then its answers, which all continue it (`Model.apply(rows="shared")`). The gradient is again the same,
and a prompt is computed once instead of G times, but attention runs over the whole row (except in long rows on a CPU of
few cores, which leave out the blocks of pairs that no answer sees), so this pays for answers that are not much longer
than their prompt. `auto` is one of them (`run/auto_layout.py`), and padded where nobody has asked
which. Runs on the host, from lengths only.
"""

import dataclasses
from typing import NamedTuple

import flax.struct
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.ground.array_typing import Array, Int
from jaxrl_llm.ground.declared import Block, declared
from jaxrl_llm.ground.masking import bucket


@dataclasses.dataclass(frozen=True)
class UpdateConfig(Block, prefix="updates."):
    """N = minibatches x epochs optimizer steps per rollout."""

    minibatches: int = declared(4, "into which a rollout is split", least=1)
    epochs: int = declared(1, "walks over the minibatches", least=1)
    micro_batch_rows: int = declared(0, "rows per forward and backward; 0: the whole minibatch", least=0)
    layout: str = declared(
        "auto",
        among={
            "auto": "cheapest",
            "padded": "",
            "packed": "answers share rows",
            "shared": "a prompt a group",
        },
    )
    length_buckets: int = declared(1, "number of lengths to which padded rows are cut; each compiles once", least=1)
    shuffle: str = declared("answers", "what stays whole when minibatches are drawn", among=("answers", "groups"))
    aux_coef: float = declared(0.0, "weight of the load-balance loss; 0: off", least=0)
    router_bias_rate: float = declared(
        0.0, "step of a gate's bias towards an even load (supervised); 0: frozen", least=0
    )
    stop_at_kl: float = declared(
        0.0, "kl/old of an update beyond which a rollout's others are left out; 0: off", least=0
    )

    def check(self) -> None:
        if self.stop_at_kl and self.updates_per_rollout == 1:
            raise ValueError(
                f"updates.stop_at_kl={self.stop_at_kl} leaves nothing out of one update a rollout; set it to 0, or "
                "updates.minibatches to at least 2"
            )

    @property
    def updates_per_rollout(self) -> int:
        return self.minibatches * self.epochs


class Layout(flax.struct.PyTreeNode):
    """index: row * time + column of the rollout's token at each place, -1 = padding; used: micro-batches in use."""

    index: Int[Array | np.ndarray, "m r t"]
    segment_ids: Int[Array | np.ndarray, "m r t"]
    used: Int[Array | np.ndarray, ""]


class Groups(NamedTuple):
    """The groups of a rollout."""

    size: int  # answers to a prompt
    answer_length: int  # most tokens of one
    starts: Int[np.ndarray, "b"]  # the first column of each row's answer


def groups_of(loss_mask: np.ndarray, lengths: np.ndarray, size: int, answer_length: int) -> Groups:
    """From [b t] masks: a fully masked answer starts where the others of its group do.

    In a group without a loss the prompt is taken to end with its shortest row; nothing reads the scores there.
    """
    first = np.where(loss_mask.any(1), loss_mask.argmax(1), lengths)
    return Groups(size, answer_length, np.repeat(first.reshape(-1, size).min(1), size))


def minibatches(rng: np.random.Generator, rows: int, group_size: int, config: UpdateConfig) -> list[np.ndarray]:
    """A permutation of answers, or of whole groups, cut into equal minibatches.

    Args:
      rng: decides the permutation.
      rows: answers of the rollout.

    Returns:
      `config.minibatches` arrays of rows of the rollout, [rows / minibatches] each.
    """
    if config.shuffle == "groups":
        order = rng.permutation(rows // group_size)[:, None] * group_size + np.arange(group_size)
    else:
        order = rng.permutation(rows)
    return list(order.reshape(config.minibatches, -1))


def epochs_of(
    segment_ids: np.ndarray,
    loss_mask: np.ndarray,
    group_size: int,
    answer_length: int,
    config: UpdateConfig,
    *,
    seed: int,
    step: int,
    together: int = 1,
) -> list[list[Layout]]:
    """The micro-batches of every minibatch, by epoch; each epoch of each step has a permutation of its own.

    Args:
      segment_ids: [b t], 0 on padding. loss_mask: [b t], the answers' tokens.
      answer_length: most tokens of an answer.
      seed, step: with the epoch the key of a permutation.
      together: as for `lay_out`.

    Returns:
      A list an epoch of one `Layout` a minibatch, all of equal shape unless `length_buckets` has several.
    """
    held, masks = np.asarray(segment_ids) != 0, np.asarray(loss_mask)
    lengths = held.sum(1)
    groups = groups_of(masks, lengths, group_size, answer_length)
    return [
        [
            lay_out(rows, lengths, held.shape[1], config, groups, together)
            for rows in minibatches(np.random.default_rng([seed, step, epoch]), len(held), group_size, config)
        ]
        for epoch in range(config.epochs)
    ]


def lay_out(
    rows: np.ndarray,
    lengths: np.ndarray,
    time: int,
    config: UpdateConfig,
    groups: Groups | None = None,
    together: int = 1,
) -> Layout:
    """The micro-batches of one minibatch.

    Args:
      rows: rollout rows of the minibatch, with layout=shared whole groups side by side.
      lengths: [b] tokens (prompt and answer) of every rollout row; `time` is the rollout's row length.
      groups: for layout=shared.
      together: so many rows side by side are never parted over micro-batches, whose rows it divides: 2 for pairs.
    """
    answers_a_row, width = 1, time
    per_micro = config.micro_batch_rows or len(rows)
    if config.layout == "shared":
        assert groups is not None
        answers_a_row, widest = groups.size, time + (groups.size - 1) * groups.answer_length
        bins = [_sharing(group, groups.starts, lengths) for group in rows.reshape(-1, groups.size).tolist()]
        width = bucket(max(sum(stop - start for _, start, stop in row) for row in bins), widest, config.length_buckets)
    else:
        if config.layout == "packed":
            joined = _first_fit(rows.reshape(-1, together).tolist(), lengths.tolist(), time, per_micro)
        else:
            width, joined = bucket(int(lengths.max()), time, config.length_buckets), [[row] for row in rows.tolist()]
        bins = [[(row, 0, int(lengths[row])) for row in members] for members in joined]
    per_micro //= answers_a_row
    micro = -(-(len(rows) // answers_a_row) // per_micro)
    index = np.full((micro * per_micro, width), -1, np.int32)
    segments = np.zeros_like(index)
    for place, members in enumerate(bins):
        at = 0
        for segment, (row, start, stop) in enumerate(members, start=1):
            end = at + stop - start
            index[place, at:end] = row * time + np.arange(start, stop)
            segments[place, at:end] = segment
            at = end
    shape, used = (micro, per_micro, width), np.asarray(-(-len(bins) // per_micro), np.int32)
    return Layout(index.reshape(shape), segments.reshape(shape), used)


def _sharing(rows: list[int], starts: np.ndarray, lengths: np.ndarray) -> list[tuple[int, int, int]]:
    """(row, first column, last + 1) of every part of a group's row: the prompt, then each answer."""
    prompt = int(starts[rows[0]])
    return [(rows[0], 0, prompt), *((row, prompt, int(lengths[row])) for row in rows)]


def _first_fit(units: list[list[int]], lengths: list[int], width: int, per_micro: int) -> list[list[int]]:
    """First-fit decreasing bin packing: at most 11/9 of the fewest rows (Johnson 1973).

    The rows of a unit go to one micro-batch of `per_micro` bins, the first with room for all of them.
    """
    micro = -(-sum(map(len, units)) // per_micro)
    free = [[width] * per_micro for _ in range(micro)]
    bins: list[list[int]] = [[] for _ in range(micro * per_micro)]

    def places(unit: list[int], free: list[int]) -> list[int] | None:
        """A bin of this micro-batch for each row of the unit, None where they do not all fit."""
        left, found = list(free), []
        for row in unit:
            place = next((i for i, room in enumerate(left) if room >= lengths[row]), None)
            if place is None:
                return None
            left[place] -= lengths[row]
            found.append(place)
        return found

    for unit in sorted(units, key=lambda unit: (-sum(lengths[row] for row in unit), unit)):
        first, found = next((m, found) for m in range(micro) if (found := places(unit, free[m])) is not None)
        for row, place in zip(unit, found, strict=True):
            bins[first * per_micro + place].append(row)
            free[first][place] -= lengths[row]
    return bins[: max(i for i, members in enumerate(bins, start=1) if members)]


def sequence_ids(index: Int[Array, "*places"], time: int) -> Int[Array, "*places"]:
    """The row of the rollout that each place's token comes from, whatever shares its row here; 0 on padding."""
    return jnp.maximum(index, 0) // time
