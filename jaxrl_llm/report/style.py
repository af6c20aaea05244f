"""The style of all figures: colours and dashes that tell arms apart, direct labels, plain axes."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

INK = "#2b2b2b"
_BASELINE = "#6b6b6b"
_GAP = 0.085  # the least distance of two labels, as a share of the height of the axes
# The palette of Okabe and Ito (2008) without yellow, which vanishes on white; then brown and olive.
_PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7A4B2A", "#808000")
# From the solid baseline to the shortest dashes, in drawing order: curves that coincide show through each other.
_DASHES = ("solid", (0, (7, 2)), (0, (4, 2)), (0, (2.5, 2)), (0, (1, 1.5)), (0, (7, 2, 1, 2)), (0, (4, 2, 1, 2)))
_MARKERS = "os^DvPX"


def colour(arms: Sequence[str], arm: str) -> str:
    """The baseline (the first arm) is grey, so that the arms under test carry the colour; a single arm is blue."""
    place = list(arms).index(arm)
    if place == 0 and len(arms) > 1:
        return _BASELINE
    return _PALETTE[max(place - 1, 0) % len(_PALETTE)]


def line(arms: Sequence[str], arm: str) -> dict[str, Any]:
    """Colour, dashes and marker of an arm's line, for `Axes.plot`; the baseline is wider and shows below others."""
    place = list(arms).index(arm) % len(_DASHES)
    width, size = (3.6, 6.0) if place == 0 and len(arms) > 1 else (2.0, 3.5)
    look = {"color": colour(arms, arm), "linestyle": _DASHES[place], "marker": _MARKERS[place]}
    return look | {"linewidth": width, "markersize": size}


def panels(titles: Sequence[str], *, columns: int, height: float = 2.9, along: str = "") -> tuple[Figure, list[Axes]]:
    """A grid of axes, one a title, with light horizontal grid lines and no frame; `along` names every x axis."""
    columns = min(columns, len(titles))
    rows = -(-len(titles) // columns)
    size = (11.0 if columns > 1 else 7.0, height * rows)
    figure = Figure(figsize=size, dpi=110, layout=ConstrainedLayoutEngine(h_pad=0.11, w_pad=0.06))
    axes = list(np.atleast_1d(figure.subplots(rows, columns)).flat)
    for spare in axes[len(titles) :]:
        spare.remove()
    for ax, title in zip(axes, titles, strict=False):
        ax.set_title(title, loc="left", fontsize=10.5, color=INK, fontweight="bold")
        ax.set_xlabel(along, fontsize=8.5, color=INK)
        ax.spines[["top", "right"]].set_visible(False)
        ax.spines[["left", "bottom"]].set_color("#b0b0b0")
        ax.tick_params(which="both", colors=INK, labelsize=8.5, length=3, color="#b0b0b0")
        ax.grid(axis="y", color="#e6e6e6", linewidth=0.8)
        ax.set_axisbelow(True)
    return figure, axes[: len(titles)]


def name_places(ax: Axes, names: Sequence[str]) -> None:
    """Write names below the places 0, 1, ... of the x axis, slanted if they would run into each other."""
    slanted = {"rotation": 25, "ha": "right", "rotation_mode": "anchor"} if sum(map(len, names)) > 64 else {}
    ax.set_xticks(range(len(names)), names, **slanted)


def label_ends(ax: Axes, ends: Sequence[tuple[float, str, str]]) -> None:
    """Write the names of lines that end at (y, name, colour) to the right of the axes; names that overlap move apart.

    A y that is not finite, or not on a logarithmic axis, has no label.
    """
    low, high = ax.get_ylim()
    log = ax.get_yscale() == "log"
    places = []
    for y, name, ink in ends:
        if np.isfinite(y) and (y > 0 or not log):
            share = (np.log(y / low) / np.log(high / low)) if log else (y - low) / (high - low)
            places.append([float(np.clip(share, 0, 1)), name, ink])
    places.sort(key=lambda place: place[0])
    for _ in range(100):  # neighbours push each other apart, inside the axes
        for below, above in pairwise(places):
            push = max(_GAP - (above[0] - below[0]), 0) / 2
            below[0], above[0] = max(below[0] - push, 0), min(above[0] + push, 1)
    for share, name, ink in places:
        where = {"xy": (1.0, share), "xycoords": "axes fraction", "xytext": (4, 0), "textcoords": "offset points"}
        ax.annotate(name, **where, color=ink, fontsize=8.5, fontweight="bold", va="center", annotation_clip=False)
