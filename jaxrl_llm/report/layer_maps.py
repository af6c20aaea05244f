"""Heat maps of what is measured in every MoE layer: one map an arm, layers upwards, one colour scale for all."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from jaxrl_llm.report.curves import aligned, mean
from jaxrl_llm.report.read import Study
from jaxrl_llm.report.style import INK, panels

__all__ = ["FLIPS", "LOAD", "flip_map", "load_map"]

FLIPS, LOAD = "routing/flips_old_current_by_update", "routing/load_max_by_layer"


def flip_map(study: Study, condition: str) -> Figure:
    """Experts that differ from the old policy's, by layer and update within a rollout; mean over rollouts and seeds."""
    maps = {}
    for arm in study.arms:
        runs = [mean(run.series(FLIPS)[1]) for run in study.select(arm, condition) if run.series(FLIPS)[1].ndim == 3]
        runs = [one for one in runs if one.shape == runs[0].shape]
        if runs:
            values = 100 * mean(np.stack(runs))
            maps[arm] = range(1, len(values) + 1), values
    return _draw(maps, along="update within the rollout", label="% of experts changed", low=0.0)


def load_map(study: Study, condition: str) -> Figure:
    """The load of the busiest expert as a multiple of an even load, by layer and rollout; mean over seeds."""
    maps = {}
    for arm in study.arms:
        steps, values = aligned(study.select(arm, condition), LOAD, axes=2)
        if len(steps):
            maps[arm] = [int(step) for step in steps], mean(values)
    return _draw(maps, along="rollout", label="load of the busiest expert", low=1.0)


def _draw(maps: Mapping[str, tuple[Sequence[int], np.ndarray]], *, along: str, label: str, low: float) -> Figure:
    """Maps by arm: the numbers along the x axis and values [x, layer]; `low` is the darkest colour."""
    figure, axes = panels(list(maps), columns=4, height=2.4)
    high = float(np.nanmax(np.concatenate([values.ravel() for _, values in maps.values()])))
    colours = {"cmap": "cividis", "vmin": low, "vmax": high if high > low else low + 1}
    for ax, (numbers, values) in zip(axes, maps.values(), strict=True):
        ax.imshow(values.T, aspect="auto", origin="lower", interpolation="none", **colours)
        ax.grid(False)
        ax.set_xlabel(along, fontsize=8.5, color=INK)
        ax.set_ylabel("MoE layer", fontsize=8.5, color=INK)
        ax.set_yticks(range(values.shape[1]))
        places = range(0, len(numbers), -(-len(numbers) // 8))
        ax.set_xticks(places, [str(numbers[place]) for place in places])
    bar = figure.colorbar(axes[0].images[0], ax=axes, shrink=0.9, pad=0.01)
    bar.set_label(label, fontsize=8.5, color=INK)
    bar.ax.tick_params(labelsize=8.5)
    return figure
