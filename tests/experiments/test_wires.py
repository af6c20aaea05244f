"""Seconds of collectives over wires, each by hand: rings and lines of a torus, NVLink and network, slices."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from jax.sharding import Mesh

from experiments.scale.hlo_cost import Cost
from experiments.scale.wires import LINKS, Wires
from jaxrl_llm.ground.sharding import AXES


@dataclasses.dataclass(frozen=True)
class Device:
    id: int
    process_index: int = 0
    slice_index: int = 0
    coords: tuple[int, ...] = ()
    core_on_chip: int = 0


def tpus(torus, shape, slices=1, cores=1):
    """A mesh of these sizes over a torus, whose last dimension is the fastest, slice after slice."""
    each = math.prod(torus) * cores
    places = itertools.product(range(slices), *map(range, torus), range(cores))
    devices = [Device(100_000 * (s + 1) + i % each, 0, s, tuple(at), core) for i, (s, *at, core) in enumerate(places)]
    return Mesh(np.array(devices).reshape(shape), AXES)


def gpus(count, shape):
    return Mesh(np.array([Device(i, i // 8) for i in range(count)]).reshape(shape), AXES)


def _groups(groups):
    return tuple(tuple(map(int, group)) for group in groups)


def row(chip, mesh, kind, groups, sent, most=0):
    (found,) = Wires(LINKS[chip], mesh).traffic(Cost(exchanges={(kind, _groups(groups), most): (2.0, sent)}))
    assert (found.sent, found.collectives) == (sent, {kind: (2.0, sent)})
    return found.axes, found.link, pytest.approx(found.seconds)


# 100 (v5p, v7x) and 50 (v5e) GB/s a link and direction. The array of an all-gather in which a device sends (c - 1) GB
# has c GB, and an operand of c GB sends (c - 1) of them in an all-to-all.
V5P = tpus((4, 4, 4), (1, 4, 16, 1, 1))
X, YZ = np.arange(64).reshape(4, 16).T, np.arange(64).reshape(4, 16)
V5E, POD = tpus((4, 4, 1), (1, 4, 4, 1, 1)), tpus((16, 16, 1), (1, 16, 16, 1, 1))
GRID, PODS = np.arange(16).reshape(4, 4), np.arange(256).reshape(16, 16)
PAIRS = tpus((4, 4, 1), (2, 2, 4, 1, 1))  # data over x, two apart
V7X = tpus((4, 4, 4), (1, 64, 1, 2, 1), cores=2)
SINGLE, BOTH = np.arange(128).reshape(64, 2).T, np.arange(128).reshape(1, 128)


@pytest.mark.parametrize(
    ("chip", "mesh", "kind", "groups", "sent", "axes", "link", "seconds"),
    [
        ("v5p", V5P, "all-gather", X, 3e9, "fsdp", "2 ICI links", 3 / 200),
        ("v5p", V5P, "reduce-scatter", YZ, 15e9, "expert", "4 ICI links", 15 / 400),
        ("v5p", V5P, "all-reduce", [range(64)], 126e9, "fsdp expert", "6 ICI links", 126 / 600),
        ("v5e", V5E, "all-gather", GRID, 3e9, "expert", "1 ICI link", 3 / 50),  # 4 of 16 places: no ring
        ("v5e", POD, "all-gather", PODS, 15e9, "expert", "2 ICI links", 15 / 100),
        ("v5e", V5E, "all-to-all", GRID.T, 3e9, "fsdp", "1 ICI link", 4 * 4 / 4 / 50),
        ("v5e", POD, "ragged-all-to-all", PODS.T, 15e9, "fsdp", "2 ICI links", 16 * 16 / 8 / 50),
        # Two places apart on a line of 4: the pairs (0, 2) and (1, 3) meet in its middle, 1 GB of each.
        ("v5e", PAIRS, "all-gather", np.arange(16).reshape(2, 8).T, 1e9, "data", "1 ICI link", 1 / 25),
        ("v5e", POD, "collective-permute", [(15, 0), (0, 1)], 1e9, "expert", "1 ICI link", 1 / 50),  # 15 and 0 touch
        ("v5e", V5E, "collective-permute", [(3, 0), (0, 1)], 1e9, "expert", "1 ICI link", 3 / 50),
        # The two devices of a chip share its 6 links if they are in two groups, not if they are in one.
        ("v7x", V7X, "all-gather", SINGLE, 63e9, "fsdp", "6 ICI links", 63 / 300),
        ("v7x", V7X, "all-gather", BOTH, 127e9, "fsdp tensor", "6 ICI links", 127 / 600),
        ("v7x", V7X, "all-gather", SINGLE.T, 1e9, "tensor", "die to die", 1 / 600),
    ],
)
def test_on_a_torus(chip, mesh, kind, groups, sent, axes, link, seconds):
    assert row(chip, mesh, kind, groups, sent) == (tuple(axes.split()), link, seconds)


@pytest.mark.parametrize(("most", "link", "seconds"), [(0, "4", 15 / 400), (6, "4", 15 / 400), (2, "2", 15 / 200)])
def test_no_more_links_than_the_program_uses(most, link, seconds):
    """A scatter over a plane of 4 x 4, all links of which would be four; a ring uses two."""
    found = row("v5p", V5P, "reduce-scatter", YZ, 15e9, most)
    assert found == (("expert",), f"{link} ICI links", seconds)


# Four nodes of 8: 32 devices as fsdp 8 x expert 4, so fsdp has two devices in each node. 450 and 50 GB/s.
FSDP, EXPERT = np.arange(32).reshape(8, 4).T, np.arange(32).reshape(8, 4)


@pytest.mark.parametrize(
    ("kind", "groups", "sent", "axes", "link", "seconds"),
    [
        ("all-gather", EXPERT, 3e9, "expert", "NVLink", 3 / 450),
        # Of 8 GB a node gets 6 from others, by the cards of two GPUs: 3 GB each, of the 7 that each sends.
        ("all-gather", FSDP, 7e9, "fsdp", "network", 3 / 50),
        ("all-reduce", FSDP, 14e9, "fsdp", "network", 6 / 50),
        # Of an operand of 8 GB 6 go to other nodes: nothing is shared.
        ("all-to-all", FSDP, 7e9, "fsdp", "network", 6 / 50),
        ("collective-permute", [(7, 8), (0, 1)], 1e9, "fsdp expert", "network", 1 / 50),
        # All 32: the cards of 8 GPUs bring 24 of 32 GB, 60 ms; NVLink passes on 28, 62 ms.
        ("all-gather", [range(32)], 31e9, "fsdp expert", "NVLink", 28 / 450),
    ],
)
def test_within_nodes_and_between(kind, groups, sent, axes, link, seconds):
    assert row("h100", gpus(32, (1, 8, 4, 1, 1)), kind, groups, sent) == (tuple(axes.split()), link, seconds)


def test_between_slices():
    """Two slices of 4x4: the program numbers the devices of one, and hosts transfer 3 GB at 3.125 GB/s a device."""
    mesh = tpus((4, 4, 1), (2, 4, 4, 1, 1), slices=2)
    pairs = [(100_000 + i, 200_000 + i) for i in range(16)]
    assert row("v5e", mesh, "all-reduce", pairs, 3e9) == (("data",), "DCN", 3 / 3.125)
    assert row("v5e", mesh, "all-gather", GRID, 3e9) == (("expert",), "1 ICI link", 3 / 50)


def test_rows_are_by_axes_and_link():
    """Two kinds over fsdp are one row, and the longest row comes first; what sends nothing has none."""
    gather, reduce = ("all-gather", _groups(FSDP), 0), ("reduce-scatter", _groups(FSDP), 0)
    cost = Cost(exchanges={("all-gather", _groups(EXPERT), 0): (1.0, 3e9), gather: (1.0, 7e9),
                           reduce: (3.0, 14e9), ("all-reduce", ((0,),), 0): (1.0, 0.0)})  # fmt: skip
    rows = Wires(LINKS["h100"], gpus(32, (1, 8, 4, 1, 1))).traffic(cost)
    assert [(row.axes, row.sent, pytest.approx(row.seconds)) for row in rows] == [
        (("fsdp",), 21e9, 9 / 50),
        (("expert",), 3e9, 3 / 450),
    ]
    assert rows[0].collectives == {"all-gather": (1.0, 7e9), "reduce-scatter": (3.0, 14e9)}
