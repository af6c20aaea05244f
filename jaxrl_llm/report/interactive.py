"""One page on which a point of a curve says its step, arm and seed, and what the run answered there."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.ground.terminal import visible
from jaxrl_llm.report.figures import PANELS
from jaxrl_llm.report.page import environment
from jaxrl_llm.report.read import Run, Study
from jaxrl_llm.report.samples import answered
from jaxrl_llm.report.style import colour

HOW_TO_GET_IT = "for the interactive page, pip install 'jaxrl_llm[report]'"
_SAMPLES, _LENGTH = 3, 400  # shown of each split at a step; characters of each text


def write_interactive(study: Study, path: Path, title: str) -> bool:
    """Write the page, which needs no other file and no network; False where plotly is not installed.

    What models and folders are called or wrote becomes text on it and never HTML.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        return False
    data = _data(study)
    text = environment().get_template("interactive.html.j2").render(title=title, data=data, plotly=get_plotlyjs())
    path.write_text(text, encoding="utf-8")
    return True


def _data(study: Study) -> dict[str, Any]:
    """Return the data that the page's script draws: the metrics that some run has, and every run with its samples."""
    panels = [curve for curve in PANELS if any(curve.key in row for run in study.runs for row in run.rows)]
    metrics = [{"key": curve.key, "name": study.named(curve.key), "scale": curve.scale} for curve in panels]
    runs = [
        {
            "arm": visible(run.arm),
            "seed": visible(run.seed),
            "condition": visible(run.condition),
            "colour": colour(study.arms, run.arm),
            "series": {curve.key: series for curve in panels if (series := _series(run, curve.key))},
            "samples": _samples(run),
        }
        for run in study.runs
    ]
    return {"metrics": metrics, "runs": runs, "conditions": [visible(one) for one in study.conditions]}


def _series(run: Run, key: str) -> dict[str, list[float]] | None:
    steps, values = run.series(key)
    if values.ndim != 1:
        return None
    known = np.isfinite(values)
    if not known.any():
        return None
    return {"x": steps[known].tolist(), "y": [float(f"{value:.5g}") for value in values[known]]}


def _samples(run: Run) -> dict[int, list[Mapping[str, Any]]]:
    """{step: a few prompts with answer and reward}."""

    def place(row: Mapping[str, Any]) -> tuple[int, str]:
        return row["step"], "held-out" if row.get("split") == "test" else "training"

    shown: dict[int, list[Mapping[str, Any]]] = {}
    for (step, split), rows in itertools.groupby(sorted(run.samples, key=place), place):
        for row in itertools.islice(rows, _SAMPLES):
            answer, reward = answered(row)
            texts = {name: visible(text)[:_LENGTH] for name, text in (("prompt", row["prompt"]), ("answer", answer))}
            shown.setdefault(step, []).append({"split": split, "reward": f"{reward:g}", **texts})
    return shown
