"""How a rollout is cut: nothing is lost or doubled, minibatches ignore lengths, shapes are few."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.ground.masking import bucket
from jaxrl_llm.training.indexing import take
from jaxrl_llm.training.layout import epochs_of, lay_out, minibatches, sequence_ids
from jaxrl_llm.training.micro_batches import padded
from tests.reference import tiny_training as tiny

TIME = 12


def config(**changes):
    return dataclasses.replace(tiny.UPDATES, **changes)


@hypothesis.given(
    lengths=st.lists(st.integers(1, TIME), min_size=8, max_size=8),
    chosen=st.sampled_from([(0, 1, 2, 3, 4, 5, 6, 7), (6, 1, 3), (5,)]),
    layout=st.sampled_from(["padded", "packed"]),
    micro=st.sampled_from([0, 1, 2, 3]),
    buckets=st.sampled_from([1, 3]),
)
def test_every_token_stands_in_exactly_one_place(lengths, chosen, layout, micro, buckets):
    lengths = np.array(lengths)
    cut = lay_out(
        np.array(chosen), lengths, TIME, config(layout=layout, micro_batch_rows=micro, length_buckets=buckets)
    )
    index, segments = np.asarray(cut.index), np.asarray(cut.segment_ids)
    expected = [row * TIME + column for row in sorted(chosen) for column in range(lengths[row])]
    assert sorted(index[index >= 0]) == expected
    np.testing.assert_array_equal(index >= 0, segments > 0)
    assert cut.used * index.shape[1] >= len(set(zip(*np.nonzero(segments)[:2], strict=True)))
    assert not segments[int(cut.used) :].any()
    assert segments[int(cut.used) - 1].any()
    for lane, row in zip(segments.reshape(-1, index.shape[-1]), index.reshape(-1, index.shape[-1]), strict=True):
        for segment in set(lane) - {0}:  # one answer a segment, its tokens side by side and in order
            places = np.flatnonzero(lane == segment)
            np.testing.assert_array_equal(np.diff(places), 1)
            np.testing.assert_array_equal(np.diff(row[places]), 1)
            assert row[places[0]] % TIME == 0
        if layout == "padded":
            assert set(lane) <= {0, 1}


@pytest.mark.parametrize(("multiple", "width"), [(1, 12), (6, 12), (8, 16)])
def test_rows_that_devices_share_are_padded(multiple, width):
    cut = lay_out(np.arange(4), np.array([3, 9, 4, 5]), TIME, config())
    wide = padded(cut, multiple)
    assert wide.index.shape == wide.segment_ids.shape == (1, 4, width)
    for array, before, filler in ((wide.index, cut.index, -1), (wide.segment_ids, cut.segment_ids, 0)):
        np.testing.assert_array_equal(array[..., :TIME], before)
        assert np.all(array[..., TIME:] == filler)


def test_padded_and_packed_hold_the_same_content():
    """By hand: lengths 3, 9, 4, 5 in rows of 12 pack as 9+3 and 5+4."""
    lengths = np.array([3, 9, 4, 5])
    packed = lay_out(np.arange(4), lengths, TIME, config(layout="packed"))
    tokens = np.arange(4 * TIME, dtype=np.int32).reshape(4, TIME)
    place = jax.jit(lambda layout: take(jnp.asarray(tokens), layout, 0))
    lanes = np.asarray(place(packed))
    np.testing.assert_array_equal(lanes[0], [*range(12, 21), 0, 1, 2])
    np.testing.assert_array_equal(lanes[1], [*range(36, 41), *range(24, 28), 0, 0, 0])
    np.testing.assert_array_equal(packed.segment_ids[0, :2], [[1] * 9 + [2] * 3, [1] * 5 + [2] * 4 + [0] * 3])
    assert packed.used == 1
    assert not lanes[2:].any()
    padded = lay_out(np.arange(4), lengths, TIME, config())
    rows = np.asarray(place(padded))
    for row in range(4):
        np.testing.assert_array_equal(rows[row, : lengths[row]], tokens[row, : lengths[row]])


def test_packing_leaves_micro_batches_unused_but_keeps_the_shape():
    lengths = np.full(8, 3)
    cut = lay_out(np.arange(8), lengths, TIME, config(layout="packed", micro_batch_rows=2))
    assert cut.index.shape == (4, 2, TIME)
    assert cut.used == 1  # four answers a row, two rows


@pytest.mark.parametrize(
    ("longest", "buckets", "width"),
    [(12, 1, 12), (1, 1, 12), (5, 3, 8), (4, 3, 4), (9, 3, 12), (0, 3, 4), (12, 5, 12), (10, 5, 12), (9, 5, 9)],
)
def test_rows_are_cut_to_one_of_few_widths(longest, buckets, width):
    assert bucket(longest, TIME, buckets) == width
    assert len({bucket(n, TIME, buckets) for n in range(1, TIME + 1)}) <= buckets


def test_the_width_is_that_of_the_whole_rollout():
    """All minibatches of a step share one shape, whichever rows they got."""
    lengths = np.array([2, 2, 7, 2])
    widths = {lay_out(np.array([row]), lengths, TIME, config(length_buckets=3)).index.shape[2] for row in range(4)}
    assert widths == {8}


@pytest.mark.parametrize("shuffle", ["answers", "groups"])
def test_minibatches_are_a_keyed_permutation(shuffle):
    cut = config(minibatches=4, shuffle=shuffle)
    draw = lambda seed: minibatches(np.random.default_rng(seed), 32, 4, cut)  # noqa: E731
    first = draw(0)
    assert [len(rows) for rows in first] == [8] * 4
    assert sorted(np.concatenate(first)) == list(range(32))
    np.testing.assert_array_equal(np.concatenate(first), np.concatenate(draw(0)))
    assert (np.concatenate(first) != np.concatenate(draw(1))).any()
    groups_whole = all(len(set(rows.reshape(-1, 4)[i] // 4)) == 1 for rows in first for i in range(2))
    assert groups_whole == (shuffle == "groups")


def test_every_epoch_of_every_step_has_its_own_permutation():
    """Keyed by seed, step and epoch: whoever draws it again gets the same."""
    mask = np.ones((8, TIME), bool)

    def orders(seed, step):
        cut = epochs_of(mask, mask, 4, TIME, config(minibatches=2, epochs=2), seed=seed, step=step)
        return [tuple(row for layout in epoch for row in layout.index[:, :, 0].ravel() // TIME) for epoch in cut]

    drawn = [*orders(0, 1), *orders(0, 2), *orders(1, 1)]
    assert all(sorted(order) == list(range(8)) for order in drawn)
    assert len(set(drawn)) == 6
    assert orders(0, 1) == drawn[:2]


def test_sequence_ids_are_rows_of_the_rollout():
    """Rows of 12 tokens: a place that holds token 25 belongs to row 2; padding counts as row 0."""
    np.testing.assert_array_equal(
        sequence_ids(jnp.array([[24, 25, 0, 11], [13, -1, -1, -1]]), 12), [[2, 2, 0, 0], [1, 0, 0, 0]]
    )


@hypothesis.given(
    lengths=st.lists(st.integers(1, TIME), min_size=16, max_size=16),
    layout=st.sampled_from(["padded", "packed"]),
    micro=st.sampled_from([2, 4, 6, 0]),
)
def test_pairs_are_never_parted(lengths, layout, micro):
    """Both rows of a pair stand in one micro-batch, every token once, in the micro-batches that padded rows take."""
    lengths, order = np.array(lengths), np.arange(16).reshape(8, 2)[[3, 1, 7, 0, 2, 6, 5, 4]].ravel()
    cut = lay_out(order, lengths, TIME, config(layout=layout, micro_batch_rows=micro), together=2)
    index = np.asarray(cut.index)
    assert sorted(index[index >= 0]) == [row * TIME + column for row in range(16) for column in range(lengths[row])]
    pairs = [set(part[part >= 0] // TIME // 2) for part in index]
    assert sum(map(len, pairs)) == 8
    assert index.shape[0] == -(-16 // (micro or 16))
    assert (index[int(cut.used) :] < 0).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"minibatches": 0}, r"updates\.minibatches=0"),
        ({"epochs": 0}, r"updates\.epochs=0"),
        ({"length_buckets": 0}, r"updates\.length_buckets=0"),
        ({"micro_batch_rows": -1}, r"updates\.micro_batch_rows=-1"),
        ({"aux_coef": -0.1}, r"updates\.aux_coef=-0\.1"),
        ({"layout": "ragged"}, "updates.layout='ragged' is unknown; use one of auto, padded, packed, shared"),
        ({"shuffle": "lengths"}, "updates.shuffle='lengths' is unknown; use one of answers, groups"),
    ],
)
def test_bad_values_name_their_field(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)
