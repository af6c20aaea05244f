"""Routing's share of the ratio against depth, sparsity and drift: the fit, what it predicts, and a point of your own.

    python -m experiments.routing_replay.scale --workdir DIR --figure OUT.png  # any run of yours beside ours
    python -m experiments.routing_replay.scale runs/sizes                      # tables: points, fit, prediction
    python -m experiments.routing_replay.scale runs/sizes --figure OUT.png --pack OUT.tar.xz

    log share = a + b log(layers) + c log(chosen / experts) + d log(KL to old)

by least squares over trajectories without the load-balance loss, of all sizes but the largest (sizes.LARGEST), which it
predicts. Intervals are percentile bootstraps that draw whole settings with their trajectories; a prediction's has the
scatter of settings about the line, too. DIR is the folder of a finished run of a mixture with log.diagnostics_every
above 0, or of several.
"""

import argparse
import dataclasses
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import NormalDist

import numpy as np
from matplotlib.figure import Figure

from experiments.routing_replay.sizes import LARGEST
from experiments.routing_replay.table_parts import Table, markdown, mean, pack, share_of_variance, unpacked
from jaxrl_llm.report.comparisons import probability
from jaxrl_llm.report.read import Run, Study, load
from jaxrl_llm.report.statistics import holm, paired_difference
from jaxrl_llm.report.style import INK, colour, panels

DRAWS = 1000
TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
NAMES = ("constant", "log layers", "log chosen / experts", "log KL")


@dataclasses.dataclass(frozen=True)
class Point:
    """Measurements of one size at one drift, over one trajectory or run."""

    setting: str  # points of one setting are drawn together
    layers: int
    experts: int
    chosen: int
    drift: float  # KL to old after the updates
    share: float  # of Var(log r)
    flips: float
    above: float  # share of tokens with |log r| > ln 2; of |routing part| > ln 2
    above_routing: float
    aim: str = ""  # the arm, which stopped at a drift
    seed: int = 0
    balance: float = 0.0  # coefficient of the load-balance loss

    @property
    def size(self) -> tuple[int, int, int]:
        return self.layers, self.experts, self.chosen

    @property
    def part(self) -> float:
        return self.chosen / self.experts

    @property
    def row(self) -> list[float]:
        return row_of(*self.size, self.drift)


def row_of(layers: int, experts: float, chosen: float, drift: float) -> list[float]:
    """The terms of the line."""
    return [1.0, float(np.log(layers)), float(np.log(chosen / experts)), float(np.log(drift))]


def point_of(runs: Sequence[Run], setting: str) -> Point | None:
    """The point of some rollouts of one setting; None where no routing was diagnosed or its share is not above 0.

    Raises:
        ValueError: config.json does not hold the size of the model, or the model has one expert or none.
    """
    share = share_of_variance(runs)[0]
    if not share > 0:
        return None
    sizes, config = [], runs[0].record.get("config", {})
    for name in ("num_hidden_layers", "num_experts", "num_experts_per_tok"):
        value = config.get("model", {}).get(name)
        if not value:
            raise ValueError(f"config.json of {runs[0].workdir} does not hold model.{name}; set it in the run's config")
        sizes.append(int(value))
    drift = mean(runs, "routing/kl_fresh")
    if not np.isfinite(drift):  # of a run that did not measure it: of small log-ratios k3 is half their variance
        drift = mean(runs, "routing/log_ratio_var") / 2
    layers, experts, chosen = sizes
    flips, above, above_routing = (
        mean(runs, f"routing/{name}") for name in ("flips_fresh", "log_ratio_above_ln2", "part_above_ln2")
    )
    balance = float(config.get("updates", {}).get("aux_coef") or 0)
    return Point(setting, layers, experts, chosen, drift, share, flips, above, above_routing, balance=balance)


def points(study: Study) -> tuple[list[Point], int]:
    """Measurements by trajectory, condition and arm of a drift, and how many have none; none of samplers' arms."""
    found, without = [], 0
    for condition in study.conditions:
        for arm in [arm for arm in study.arms if arm.startswith("KL ")]:
            runs = study.select(arm, condition)
            for seed in dict.fromkeys(run.seed for run in runs):
                point = point_of([run for run in runs if run.seed == seed], condition)
                found += [dataclasses.replace(point, aim=arm, seed=int(seed))] if point else []
                without += point is None
    return found, without


@dataclasses.dataclass(frozen=True)
class Fit:
    """Coefficients of the line, those of every bootstrap draw, and how far each setting lies from the line."""

    coefficients: np.ndarray  # [4]
    drawn: np.ndarray  # [DRAWS, 4]
    scatter: np.ndarray  # of log share, one a setting

    def interval(self, term: int) -> tuple[float, float]:
        low, high = np.percentile(self.drawn[:, term], (2.5, 97.5))
        return float(low), float(high)

    def predict(self, layers: int, experts: float, chosen: float, drift: float) -> tuple[float, float, float]:
        """The share of a size at a drift, and its 95 % interval for a new setting."""
        row = np.array(row_of(layers, experts, chosen, drift))
        logs = (self.drawn @ row)[:, None] + self.scatter
        low, high = np.percentile(np.exp(logs), (2.5, 97.5))
        return float(np.exp(self.coefficients @ row)), float(low), float(high)

    def told(self, size: tuple[int, int, int], drift: float) -> str:
        """12.3 % [4.5, 30.1]."""
        share, low, high = (100 * x for x in self.predict(*size, drift))
        return f"{share:.1f} % [{low:.1f}, {high:.1f}]"


def fit(found: Sequence[Point]) -> Fit:
    """The line through the points.

    Raises:
        ValueError: the points do not part the four terms: give several depths, sparsities and drifts.
    """
    rows, logs = np.array([point.row for point in found]).reshape(-1, 4), np.log([point.share for point in found])
    if _rank(found) < 4:
        raise ValueError(f"{len(found)} points do not part layers, sparsity and drift; run more settings of `sizes`")
    settings = [point.setting for point in found]
    members = [np.flatnonzero([setting == one for setting in settings]) for one in dict.fromkeys(settings)]
    coefficients = np.linalg.lstsq(rows, logs)[0]
    rng, drawn = np.random.default_rng(0), []
    while len(drawn) < DRAWS:
        chosen = np.concatenate([members[i] for i in rng.integers(len(members), size=len(members))])
        if np.linalg.matrix_rank(rows[chosen]) == 4:
            drawn.append(np.linalg.lstsq(rows[chosen], logs[chosen])[0])
    gaps = logs - rows @ coefficients
    return Fit(coefficients, np.array(drawn), np.array([gaps[own].mean() for own in members]))


def measured(found: Sequence[Point]) -> Table:
    """Setting, drift, trajectories, share of routing, experts changed, tokens beyond ln 2 in all and by routing."""
    rows = [["setting", "KL to old", "trajectories", "share", "experts changed", "beyond ln 2", "by routing"]]
    for setting, aim in dict.fromkeys((point.setting, point.aim) for point in found):
        own = [point for point in found if (point.setting, point.aim) == (setting, aim)]
        drift, share, flips, above, by_routing = (
            float(np.mean([getattr(point, name) for point in own]))
            for name in ("drift", "share", "flips", "above", "above_routing")
        )
        beyond = [f"{100 * x:.2f} %" for x in (above, by_routing)]
        rows.append([setting, f"{drift:.2g}", str(len(own)), f"{100 * share:.1f} %", f"{100 * flips:.1f} %", *beyond])
    return rows


def balanced(found: Sequence[Point]) -> Table:
    """Every drift's factor of the load-balance loss on the share: geometric mean over sizes with a t interval."""
    rows = [["KL to old", "sizes", "share with the loss over that without"]]
    balances = sorted({point.balance for point in found})
    for aim in dict.fromkeys(point.aim for point in found):
        logs: dict[tuple[int, int, int], list[list[float]]] = {}
        for point in found:
            if point.aim == aim:
                of_size = logs.setdefault(point.size, [[] for _ in balances])
                of_size[balances.index(point.balance)].append(float(np.log(point.share)))
        both = [(np.mean(one[-1]), np.mean(one[0])) for one in logs.values() if len(one) > 1 and all(one)]
        if len(both) > 1:
            d = paired_difference(*zip(*both, strict=True))
            factor, low, high = np.exp([d.mean, d.low, d.high])
            rows.append([aim.removeprefix("KL "), str(d.n), f"x{factor:.2f} [{low:.2f}, {high:.2f}]"])
    return rows


def samplers(study: Study) -> Table:
    """Condition; of every sampler the experts that differ from the trainer's, the k3 of their log-probs, and what R3
    leaves of it."""
    dtypes = [arm for arm in study.arms if f"{arm} + R3" in study.arms]
    rows = [["setting", *(cell for dtype in dtypes for cell in (f"{dtype}: experts that differ", "k3", "R3 leaves"))]]
    for condition in study.conditions:
        row = [condition]
        for dtype in dtypes:
            alone, replayed = (study.select(arm, condition) for arm in (dtype, f"{dtype} + R3"))
            gap, left = (mean(runs, "kl/sampler") for runs in (alone, replayed))
            row += [
                f"{100 * mean(alone, 'routing/flips_sampler_old'):.2f} %",
                f"{gap:.1e}",
                f"{100 * left / gap:.0f} %",
            ]
        rows.append(row)
    return rows


def batches(found: Sequence[Point]) -> dict[str, list[Point]]:
    """The points of the first seed and of those that ran after it, where each gives a line, and of all."""
    seeds, parts = sorted({point.seed for point in found}), {}
    if len(seeds) > 1:
        first, later = ([point for point in found if (point.seed > seeds[0]) == after] for after in (False, True))
        if all(_rank(_of_line(some)) == 4 for some in (first, later)):
            parts = {f"seed {seeds[0]}": first, f"seeds {seeds[1]} to {seeds[-1]}": later}
    return {**parts, "all": list(found)}


def coefficients(found: Sequence[Point]) -> Table:
    """Slopes of each batch's line and of all, and the factor of the share where a term's quantity is doubled; of all
    also the p of each term (normal, by the spread of the draws), corrected for the three."""
    rows = [["trajectories", *NAMES]]
    for name, some in batches(found).items():
        line = line_of(some)
        ends = [(line.coefficients[i], *line.interval(i)) for i in range(4)]
        rows.append([name, *(f"{middle:.2f} [{low:.2f}, {high:.2f}]" for middle, low, high in ends)])
        twice = [f"x{2**middle:.2f} [{2**low:.2f}, {2**high:.2f}]" for middle, low, high in ends[1:]]
        rows.append(["of twice as much", "", *twice])
    spreads = np.abs(line.coefficients[1:]) / np.std(line.drawn[:, 1:], axis=0)
    corrected = holm([2 * NormalDist().cdf(-spread) for spread in spreads])
    return [*rows, ["corrected p", "", *map(probability, corrected)]]


def predicted(found: Sequence[Point]) -> Table:
    """Predictions by each batch's line for the largest size at each drift, with what was measured of it, if it was."""
    parts = batches(found)
    lines = {name: line_of(some) for name, some in parts.items()}
    rows = [
        [
            "layers, experts, chosen",
            "KL to old",
            *(f"predicted by {name}" for name in lines),
            *map("measured, {}".format, parts),
        ]
    ]
    for aim in dict.fromkeys(point.aim for point in found):
        of_aim = [point for point in found if point.aim == aim and not point.balance]
        outcome = [point for point in of_aim if point.size == LARGEST]
        drift = float(np.exp(np.mean([np.log(point.drift) for point in outcome or of_aim])))
        told = [line.told(LARGEST, drift) for line in lines.values()]
        seen = [_mean_share([point for point in outcome if point in some]) for some in parts.values()]
        rows.append([", ".join(map(str, LARGEST)), f"{drift:.2g}", *told, *seen])
    return rows


def _mean_share(outcome: Sequence[Point]) -> str:
    """With the number of its trajectories."""
    if not outcome:
        return "not yet run"
    return f"{100 * np.mean([point.share for point in outcome]):.1f} % ({len(outcome)})"


def _of_points(make: Callable[[Sequence[Point]], Table]) -> Callable[[Study], Table]:
    return lambda study: make(points(study)[0])


TABLES: Mapping[str, Callable[[Study], Table]] = {
    "log share = a + b log layers + c log (chosen / experts) + d log KL, over trajectories of all but the largest size "
    "without the load-balance loss; intervals over settings.": _of_points(coefficients),
    "What that line says of the largest size, which it has not seen.": _of_points(predicted),
    "What was measured, at three drifts.": _of_points(measured),
    "The load-balance loss (0.01), over sizes that have both.": _of_points(balanced),
    "Samplers in other precisions, and what R3 leaves of their k3.": samplers,
}


def line_of(found: Sequence[Point]) -> Fit:
    """The line through all sizes but the largest, without the load-balance loss; raises as `fit`."""
    return fit(_of_line(found))


def _of_line(found: Sequence[Point]) -> list[Point]:
    return [point for point in found if point.size != LARGEST and not point.balance]


def _rank(found: Sequence[Point]) -> int:
    return int(np.linalg.matrix_rank(np.array([point.row for point in found]).reshape(-1, 4)))


def figure(line: Fit, found: Sequence[Point], own: Sequence[Point] = ()) -> Figure:
    """The share against depth at each drift, a colour a sparsity: dots trajectories, lines the fit, in black what it
    predicts of the largest size, whose trajectories are stars; your own points are crosses, at the nearest drift."""
    drifts = {
        aim: float(np.exp(np.mean([np.log(point.drift) for point in found if point.aim == aim])))
        for aim in dict.fromkeys(point.aim for point in found)
    }
    titles = [f"routing's share of Var(log r), KL {drift:.2g}" for drift in drifts.values()]
    drawn, axes = panels(titles, columns=len(drifts), height=4.2, along="layers")
    parts = sorted({point.part for point in found}, reverse=True)
    depths = sorted({point.layers for point in found})
    # a tick too close to another would be printed over it
    shown = depths + [p.layers for p in own if all(abs(np.log(p.layers / depth)) > 0.2 for depth in depths)]
    for ax, (aim, drift) in zip(axes, drifts.items(), strict=True):
        for place, part in enumerate(parts):
            ink, aside = colour(["", *map(str, parts)], str(part)), 1.04 ** (place - (len(parts) - 1) / 2)
            some = [point for point in found if (point.aim, point.part) == (aim, part)]
            for mark, size, largest in (("o", 4, False), ("*", 9, True)):
                here = [(p.layers * aside, p.share) for p in some if (p.size == LARGEST) == largest]
                ax.plot(*zip(*here, strict=True) if here else ([], []), mark, color=ink, markersize=size, alpha=0.7)
            given = [line.predict(depth, 1, part, drift)[0] for depth in depths]
            ax.plot(depths, given, color=ink, linewidth=1.2, label=f"1 of {1 / part:g} experts chosen")
        given, low, high = line.predict(*LARGEST, drift)
        told = "predicted of {} layers, {} experts, top-{}".format(*LARGEST)
        ax.errorbar(1.2 * LARGEST[0], given, [[given - low], [high - given]], fmt="D", color=INK, ms=5, label=told)
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.sharey(axes[0])
        ax.set_xticks(shown, [str(depth) for depth in shown])
        ax.set_yticks(TICKS, [f"{100 * tick:g} %" for tick in TICKS])
        ax.minorticks_off()
    for point in own:
        ax = axes[int(np.argmin([abs(np.log(point.drift / drift)) for drift in drifts.values()]))]
        ax.plot(point.layers, point.share, "x", color=INK, markersize=9, markeredgewidth=2)
        place = {"xytext": (-8, 0), "textcoords": "offset points", "ha": "right", "va": "center"}
        ax.annotate(point.setting, (point.layers, point.share), fontsize=8.5, **place)
    drawn.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return drawn


def users(study: Study) -> list[Point]:
    """A point a run.

    Raises:
        ValueError: no run diagnosed its routing.
    """
    found = [point_of([run], run.label) for run in study.runs]
    known = [point for point in found if point is not None]
    if not known:
        raise ValueError(
            f"no run in {study.runs[0].workdir.parent} has routing/share_of_variance; run a mixture with "
            "log.diagnostics_every=1"
        )
    return known


def beside(line: Fit, own: Sequence[Point]) -> Table:
    """Rows of runs that are not in the fit: drift, share, and the share by the fit."""
    rows = [["run", "KL to old", "share measured", "share by the fit"]]
    for p in own:
        rows.append([p.setting, f"{p.drift:.2g}", f"{100 * p.share:.1f} %", line.told(p.size, p.drift)])
    return rows


def anchored(study: Study, anchor: Study) -> Table:
    """`beside` of each run and of all runs of a learning rate together."""
    return beside(line_of(points(study)[0]), [*users(anchor), *by_condition(anchor)])


def by_condition(study: Study) -> list[Point]:
    together = [point_of(study.select(study.baseline, one), f"all at {one}") for one in study.conditions]
    return [point for point in together if point is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dir", type=Path, nargs="?", help="the DIR of the sweep `sizes`; default: its committed data")
    parser.add_argument("--workdir", type=Path, action="append", default=[], help="a run of your own, to be drawn too")
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--pack", type=Path)
    given = parser.parse_args()
    if given.dir is None and given.pack:
        parser.error("--pack packs a DIR; name it")
    with tempfile.TemporaryDirectory() as name:
        archive = Path(__file__).with_name("results") / "sizes.tar.xz"
        tell(load(given.dir) if given.dir else unpacked(archive, "sizes", Path(name)), given, parser)


def tell(study: Study, given: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Print the tables, and draw and pack what was asked for."""
    found, without = points(study)
    try:
        line = line_of(found)
        own = [point for folder in given.workdir for point in users(load(folder))]
    except (ValueError, OSError) as error:
        parser.error(str(error))
    tables = [make(study) for make in TABLES.values()]
    tables += [beside(line, own)] if own else []
    print("\n".join(markdown(table) for table in tables), end="")
    if without:
        print(
            f"\n{without} trajectories have no share above 0, so no logarithm, and are left out: the fit is biased up"
        )
    if given.figure:
        figure(line, found, own).savefig(given.figure)
    if given.pack:
        pack(given.dir, given.pack, "branches.jsonl")


if __name__ == "__main__":
    main()
