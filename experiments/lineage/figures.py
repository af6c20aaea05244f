"""The figures and the table of docs/lineage.md, from a DIR of the sweep.

python -m experiments.lineage.figures runs/lineage
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxrl_llm.objectives.aggregation import AGGREGATIONS, Aggregation, Constant
from jaxrl_llm.objectives.batch import Batch
from jaxrl_llm.report.curves import Curve, aligned, mean
from jaxrl_llm.report.read import CLIPPED, Run, Study, load
from jaxrl_llm.report.statistics import paired_difference
from jaxrl_llm.report.style import INK, colour, label_ends, line, panels

__all__ = ["FIGURES", "draw", "table", "token_weights"]

_LAST = 5  # rollouts that the table averages
_EXPLAINED, _RARE = "variance that the critic explains", "gradient weight, rare tokens with A > 0"

FIGURES: dict[str, Sequence[tuple[str, Curve]]] = {
    "critic": (
        ("6 tokens", Curve("value/explained_variance", f"{_EXPLAINED}, 6 tokens")),
        ("21 tokens", Curve("value/explained_variance", f"{_EXPLAINED}, 21 tokens")),
        ("6 tokens", Curve("reward/mean", "training reward, 6 tokens")),
        ("21 tokens", Curve("reward/mean", "training reward, 21 tokens")),
    ),
    "clip_higher": (
        ("countdown", Curve("entropy", "entropy (nats per token)")),
        ("countdown", Curve("gradient_weight/positive_rare", _RARE)),
        ("countdown", Curve("gradient_weight/positive", "gradient weight, all tokens with A > 0")),
        ("countdown", Curve("eval/pass_at_k", "held-out, one of four samples right")),
    ),
    "groups": (
        (
            "countdown",
            Curve("reward/zero_advantage_groups", "sampled groups whose rewards are all alike", percent=True),
        ),
        ("countdown", Curve("rollout/groups_generated", "groups sampled for a batch of 32")),
    ),
    "mixture": (
        ("mixture", Curve("ratio/token_var", "variance of the token ratio", scale="log")),
        ("mixture", Curve("ratio/sequence_var", "variance of the sequence ratio", scale="log")),
        ("mixture", Curve("routing/flips_old_current", "experts changed, old to current", percent=True)),
        ("mixture", Curve("eval/pass_at_1", "held-out, sampled")),
    ),
    "gate": (
        ("mixture", Curve(CLIPPED, "tokens without gradient", percent=True)),
        ("mixture", Curve("gradient_weight/positive", "gradient weight, A > 0")),
        ("mixture", Curve("gradient_weight/negative", "gradient weight, A < 0")),
        ("mixture", Curve("reward/mean", "training reward")),
    ),
}


def draw(study: Study, panel: Sequence[tuple[str, Curve]]) -> Figure:
    """One panel a condition and metric; one line an arm, the mean over seeds, with every seed behind it."""
    figure, axes = panels([curve.title for _, curve in panel], columns=2)
    for ax, (condition, curve) in zip(axes, panel, strict=True):
        arms, ends = [arm for arm in study.arms if study.select(arm, condition)], []
        for arm in arms:
            steps, values = aligned(study.select(arm, condition), curve.key)
            if not np.isfinite(values).any():
                continue
            look, middle = line(arms, arm), mean(values)
            ax.plot(steps, values.T, color=look["color"], alpha=0.2, linewidth=0.8)
            ax.plot(steps, middle, markevery=max(len(steps) // 6, 1), **look)
            ends.append((float(middle[np.isfinite(middle)][-1]), arm, look["color"]))
        _axes(ax, curve)
        label_ends(ax, ends)
    return figure


def _axes(ax: Axes, curve: Curve) -> None:
    ax.set_yscale(curve.scale)
    if curve.percent:
        ax.yaxis.set_major_formatter(lambda y, _: f"{100 * y:.3g} %")
    ax.set_xlabel("rollout", fontsize=8.5, color=INK)


def token_weights(lengths: Sequence[int], longest: int) -> dict[str, np.ndarray]:
    """{aggregation: the weight of one token of each answer in the loss}, of a minibatch of answers of these lengths."""
    mask = jnp.arange(longest)[None] < jnp.asarray(lengths)[:, None]
    zeros = jnp.zeros(mask.shape)
    batch = Batch.of(logprobs=zeros, old_logprobs=zeros, advantages=zeros[:, 0], mask=mask)
    parts: dict[str, Aggregation] = {
        "sequence mean (GRPO)": AGGREGATIONS["sequence_mean_token_mean"](),
        "token mean (DAPO)": AGGREGATIONS["token_mean"](),
        "constant (Dr. GRPO)": Constant(max_length=longest),
    }
    tokens, answers = jnp.sum(mask, dtype=jnp.float32), jnp.asarray(float(len(lengths)))
    return {name: np.asarray(part.weights(batch)[:, 0] / part.count(tokens, answers)) for name, part in parts.items()}


def _lengths(study: Study) -> Figure:
    """The weight of a token against the length of its answer, on the answers of the last rollout of every run."""
    runs = study.select(study.baseline, "countdown")
    sampled = [[row for row in run.samples if "length" in row] for run in runs]  # the others are held-out answers
    rows = [row for own in sampled for row in own if row["step"] == own[-1]["step"]]
    lengths = np.asarray([row["length"] for row in rows])
    figure, (left, right) = panels(["weight of a token in the loss (relative)", "answers"], columns=2)
    weights = token_weights(lengths.tolist(), int(max(lengths)))
    sizes, ends = np.unique(lengths), []
    for name, values in weights.items():
        look = line(list(weights), name)
        relative = [values[lengths == size][0] / np.average(values, weights=lengths) for size in sizes]
        left.plot(sizes, relative, **look)
        ends.append((float(relative[-1]), name, look["color"]))
    label_ends(left, ends)
    for place, (name, wanted) in enumerate({"wrong": 0.0, "right": 1.0}.items()):
        counts = [np.sum((lengths == size) & ([row["reward"] == wanted for row in rows])) for size in sizes]
        right.bar(sizes + 0.4 * place - 0.2, counts, width=0.38, label=name, color=colour(["wrong", "right"], name))
    right.legend(frameon=False, labelcolor=INK, fontsize=8.5)
    for ax in (left, right):
        ax.set_xlabel("tokens of the answer", fontsize=8.5, color=INK)
    return figure


def table(study: Study) -> str:
    """Markdown: the mean of the last rollouts of every arm, and its paired difference to the baseline of the panel."""
    lines = [
        "| figure | condition | metric | arm | mean | difference [95 %] | seeds |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, panel in FIGURES.items():
        for condition, curve in panel:
            arms = [arm for arm in study.arms if study.select(arm, condition)]
            for arm in arms:
                values, base = (_ends(study.select(a, condition), curve) for a in (arm, arms[0]))
                if not np.isfinite(list(values.values())).any():
                    continue
                seeds = [seed for seed in values if seed in base]
                d = paired_difference([values[s] for s in seeds], [base[s] for s in seeds])
                known = arm != arms[0] and np.isfinite(d.low)
                difference = f"{d.mean:+.3g} [{d.low:+.3g}, {d.high:+.3g}]" if known else ""
                cells = (name, condition, curve.title, arm, f"{np.nanmean(list(values.values())):.3g}", difference)
                lines.append(f"| {' | '.join(cells)} | {len(values)} |")
    return "\n".join(lines)


def _ends(runs: Sequence[Run], curve: Curve) -> dict[str, float]:
    """{seed: mean over the last rollouts}; of an evaluation, the last."""
    return {run.seed: run.average(curve.key, 1 if curve.key.startswith("eval/") else _LAST) for run in runs if run.rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workdir", help="DIR of the sweep")
    parser.add_argument("--to", type=Path, help="folder for the figures; default: DIR/figures")
    given = parser.parse_args()
    study, folder = load(given.workdir), given.to or Path(given.workdir) / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {name: draw(study, panel) for name, panel in FIGURES.items()} | {"length": _lengths(study)}
    for name, figure in drawn.items():
        figure.savefig(folder / f"{name}.png")
        print(f"wrote {folder / name}.png")
    print(table(study))


if __name__ == "__main__":
    main()
