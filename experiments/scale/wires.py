"""Over which wires a collective goes, and how long it takes them at least.

Devices stand in units: slices of TPUs, or nodes of GPUs. Within a unit bytes go over the links of a torus, or over
NVLink; between units over each device's share of the network. V bytes are the whole array of an all-gather or a
reduce-scatter, twice that of an all-reduce, and a device's operand of an all-to-all. n = m k devices exchange, k in
each of m units. A device sends, and its slowest stage bounds the collective:

                        between units      within one
all-gather and the like V (m - 1) / (m k)  V (k - 1) / k   parts of k go between units, each over its device's network
all-to-all              V (n - k) / n      V (k - 1) / n   to every other device its n-th part

On a torus an all-gather uses all dimensions that its devices span at once, with two links where they close a ring and
one on a line, but no more links than its program says (`hlo.links_used`). An all-to-all is bound by its longest
dimension: over c places a link carries V c / 8 on a ring, and V c / 4 in the middle of a line. Devices s hops apart
share their links with the s - 1 groups between them, and a permutation over d hops with d - 1 others. Source:
jax-ml.github.io/scaling-book, "Sharded Matrices" and "How to Think About GPUs". Rings: v5e and v6e on an axis of 16,
the others where all axes are multiples of 4 (cloud.google.com/tpu/docs). All of it without latency; collectives follow
one another.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from experiments.scale.hlo import SLICE
from experiments.scale.hlo_cost import Cost


@dataclasses.dataclass(frozen=True)
class Links:
    """The wires of one JAX device; bytes/s are of one direction."""

    link: float  # bytes/s of one link of a TPU's torus, or of all NVLinks of a GPU
    beyond: float  # bytes/s of a device's share of the network between slices, or between nodes of 8 GPUs
    torus: int  # its dimensions; 0: GPUs, all of a node side by side


# TPUs: cloud.google.com/tpu/docs, a page each; "Gbps" there is of all links of a chip in one direction, `link` is that
# over 4 (v5e, v6e) or 6 links. Between slices: the network cards of a host over its chips, v5e 2 x 100 and v6e 4 x 200
# Gb/s for 8; v4 and v5p 25 GB/s for 4, jax-ml.github.io/scaling-book/tpus. A TPU7x chip is two devices with half each.
# GPUs: NVIDIA's data sheets of SXM modules and, for the network, of DGX: a card of 400 Gb/s a GPU, on A100 of 200.
LINKS = {
    "v4": Links(50e9, 6.25e9, 3),
    "v5e": Links(50e9, 3.125e9, 2),
    "v5p": Links(100e9, 6.25e9, 3),
    "v6e": Links(100e9, 12.5e9, 2),
    "v7x": Links(100e9, 6.25e9, 3),
    "a100": Links(300e9, 25e9, 0),
    "h100": Links(450e9, 50e9, 0),
    "h200": Links(450e9, 50e9, 0),
    "b200": Links(900e9, 50e9, 0),
}
_DIE_TO_DIE = 6  # the two devices of a TPU7x chip, in links of its torus (cloud.google.com/tpu/docs/tpu7x)


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes that a device sends over some axes of the mesh (several: one collective over all of them)."""

    axes: tuple[str, ...]
    link: str  # that takes longest
    sent: float
    seconds: float
    collectives: dict[str, tuple[float, float]]  # {kind: (how many, bytes sent)}


class Wires:
    """The wires between the devices of a mesh, whose order is that of the program's devices."""

    def __init__(self, links: Links, mesh: Mesh):
        self.links, self.mesh = links, mesh
        devices = list(mesh.devices.flat)
        self._unit = [device.process_index if links.torus == 0 else _slice(device) for device in devices]
        self._at = [(*device.coords, device.core_on_chip) if links.torus else () for device in devices]
        # A program for slices of TPUs numbers the devices of one, in the mesh's order, and its hosts those of all.
        self._first = [place for place, unit in enumerate(self._unit) if unit == self._unit[0] or links.torus == 0]
        self._named = {device.id: place for place, device in enumerate(devices)}
        self._sizes = [max(along) + 1 for along in zip(*self._at, strict=True)]
        cubes = all(size % 4 == 0 for size in self._sizes[:-1])
        self._rings = [size == 16 if links.torus == 2 else cubes for size in self._sizes]

    def traffic(self, cost: Cost) -> list[Traffic]:
        """By axes and link, the longest first."""
        found: dict[tuple[tuple[str, ...], str], tuple[float, Cost]] = {}
        for (kind, groups, links), (count, sent) in cost.exchanges.items():
            if sent:
                places = [[self._place(number) for number in group] for group in groups]
                seconds, link = max(self._bound(kind, group, sent, links) for group in places)
                key = self._axes(places), link
                before, others = found.get(key, (0.0, Cost()))
                found[key] = before + seconds, others + Cost(exchanges={(kind, (), 0): (count, sent)})
        rows = (Traffic(*key, of.sent, seconds, of.collectives) for key, (seconds, of) in found.items())
        return sorted(rows, key=lambda row: -row.seconds)

    def _place(self, number: int) -> int:
        return self._first[number] if number < SLICE else self._named[number]

    def _axes(self, groups: Sequence[Sequence[int]]) -> tuple[str, ...]:
        """The axes of the mesh along which the devices of a group differ."""
        at = [np.unravel_index(group, self.mesh.devices.shape) for group in groups]
        differ = [any(len(set(one[axis])) > 1 for one in at) for axis in range(len(self.mesh.axis_names))]
        return tuple(name for name, does in zip(self.mesh.axis_names, differ, strict=True) if does)

    def _bound(self, kind: str, group: Sequence[int], sent: float, most: int) -> tuple[float, str]:
        """(seconds, the link) of the slowest stage of one group of devices."""
        n, m = len(group), len({self._unit[place] for place in group})
        k, whole = n / m, sent * n / (n - 1)
        if kind == "collective-permute":
            between, within = (sent, 0.0) if m > 1 else (0.0, sent)
        elif kind.endswith("all-to-all"):
            between, within = whole * (n - k) / n, whole * (k - 1) / n
        else:
            between, within = whole * (m - 1) / n, whole * (k - 1) / k
        stages = [(between / self.links.beyond, "DCN" if self.links.torus else "network")]
        if not self.links.torus:
            stages.append((within / self.links.link, "NVLink"))
        elif within:
            here = [place for place in group if self._unit[place] == self._unit[group[0]]]
            stages.append(self._on_torus(kind, [self._at[place] for place in here], within, most))
        return max(stages)

    def _on_torus(self, kind: str, at: Sequence[tuple[int, ...]], within: float, most: int) -> tuple[float, str]:
        """Seconds and slowest link of devices of one slice, each of which sends `within` bytes to the others over at
        most so many links (0: all that there are)."""
        *axes, cores = ([min(along), max(along), len(set(along))] for along in zip(*at, strict=True))
        spans = [
            (places, (last - first) // (places - 1), size, ring)
            for (first, last, places), size, ring in zip(axes, self._sizes, self._rings, strict=False)
            if places > 1
        ]
        if not spans:
            return within / (_DIE_TO_DIE * self.links.link), "die to die"
        # The devices of a chip share its links, whether they are of one group or of two.
        link = self.links.link / (self._sizes[-1] / cores[2])
        if kind == "collective-permute":
            hops = (min(gap, size - gap) if ring else gap for places, gap, size, ring in spans)
            return within * max(hops) / link, "1 ICI link"
        links = [2 if ring and places * gap >= size else 1 for places, gap, size, ring in spans]
        used = min(sum(links), most or sum(links))
        label = f"{used} ICI link{'s' * (used > 1)}"
        if not kind.endswith("all-to-all"):
            return within / link / min(used, sum(n / gap for n, (_, gap, *_) in zip(links, spans, strict=True))), label
        one = cores[2] * within * len(at) / (len(at) - 1)  # what the devices of a chip give to those of the slice
        loads = (one * (c**2 // 4) / c * gap / n for n, (c, gap, *_) in zip(links, spans, strict=True))
        return max(loads) / link, label


def _slice(device: Any) -> int:
    return getattr(device, "slice_index", None) or 0
