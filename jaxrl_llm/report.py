"""Turn the DIR of a run, of several runs or of a sweep into tables, figures and one page.

    python -m jaxrl_llm.report DIR

prints the table and writes DIR/report.md, DIR/report.html (one file, figures inlined) and DIR/figures/*.png. It
only reads logs: a sweep that is half finished gives a page too, which says what is missing.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxrl_llm.reporting.figures import PLOTS, outcome_by_condition
from jaxrl_llm.reporting.page import Page, text_table
from jaxrl_llm.reporting.read import Run, Study, load
from jaxrl_llm.reporting.statistics import MINIMUM_SEEDS
from jaxrl_llm.reporting.tables import OUTCOMES, arm_table, config_table, difference_table, verdicts

__all__ = ["main", "write_report"]

_SAMPLES = 3  # answers shown an arm, from the first and from the last logged step


def write_report(folder: str | Path) -> str:
    """Write the page of a folder and return the text that belongs on the terminal.

    Raises:
        FileNotFoundError: there is no run in the folder.
    """
    folder = Path(folder)
    study = load(folder)
    page = Page(folder)
    printed: list[str] = []
    name = folder.resolve().name
    page.heading(study.question or (f"Run {name}" if len(study.runs) == 1 else f"Runs of {name}"), level=1)
    _completeness(page, study, printed)
    header, rows = config_table(study)
    if rows:
        page.text("What the arms differ in:")
        page.table(header, rows)
    for condition in study.conditions:
        if condition:
            page.heading(condition)
            printed.append(f"\n{condition}")
        _condition(page, study, condition, printed)
    if len(study.conditions) > 1:
        page.heading("Across conditions")
        for number, outcome in enumerate(OUTCOMES):
            figure = outcome_by_condition(study, outcome.measure, outcome.name)
            caption = f"{outcome.name}: a dot a seed, a line through the means."
            page.picture(figure, f"conditions_{number}", outcome.name, caption)
    _samples(page, study)
    _origin(page, study)
    markdown, html = page.write()
    printed.append(f"\nwrote {markdown}, {html} and {folder / 'figures'}")
    return "\n".join(printed)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m jaxrl_llm.report", description="Tables, figures and a page of finished or running runs."
    )
    parser.add_argument("dir", help="the DIR of a run, of several runs or of a sweep")
    try:
        print(write_report(parser.parse_args(arguments).dir))
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _completeness(page: Page, study: Study, printed: list[str]) -> None:
    done = sum(run.finished for run in study.runs)
    line = f"{done} of {len(study.runs)} runs finished."
    page.text(line)
    missing = [f"{_label(run)}: {run.status}" for run in study.runs if not run.finished]
    if missing:
        page.text("Missing from what follows, or only in part there:")
        page.bullets(missing)
        printed += [line, *(f"  {one}" for one in missing), ""]


def _condition(page: Page, study: Study, condition: str, printed: list[str]) -> None:
    header, rows = arm_table(study, condition)
    page.table(header, rows)
    printed.append(text_table(header, rows))
    header, rows = difference_table(study, condition)
    if rows:
        page.text(
            f"Differences to {study.baseline}, pair by pair (two runs of one seed share start, prompts and sampling "
            "keys). The verdict rests on the t interval: undecided when it includes zero, no verdict under "
            f"{MINIMUM_SEEDS} pairs. Each row stands for itself; nothing is corrected for the number of rows."
        )
        page.table(header, rows)
        page.bullets(verdicts(study, condition))
        printed += ["", text_table(header, rows)]
    absent = []
    suffix = f"_{study.conditions.index(condition)}" if len(study.conditions) > 1 else ""
    for plot in PLOTS:
        if any(study.has(key, condition) for key in plot.needs):
            page.heading(plot.heading, level=3)
            page.picture(plot.draw(study, condition), plot.stem + suffix, plot.heading, plot.caption)
        else:
            absent.append(f"{plot.heading} (needs {' or '.join(plot.needs)})")
    if absent:
        page.text(f"Left out, because no run logged their metrics: {'; '.join(absent)}.")


def _samples(page: Page, study: Study) -> None:
    shown = [run for arm in study.arms for run in study.runs if run.arm == arm and run.samples]
    first = list({run.arm: run for run in reversed(shown)}.values())[::-1]
    if first:
        page.heading("Samples")
    for run in first:
        steps = sorted({row["step"] for row in run.samples})
        lines = []
        for step in dict.fromkeys((steps[0], steps[-1])):
            rows = [row for row in run.samples if row["step"] == step][:_SAMPLES]
            lines += [f"after rollout {step}"] + [f"  {json.dumps(_short(row), ensure_ascii=False)}" for row in rows]
        page.text(_label(run))
        page.code("\n".join(lines))


def _short(row: dict[str, object]) -> dict[str, object]:
    return {k: v for k, v in row.items() if k != "step" and not isinstance(v, list | dict)}


def _origin(page: Page, study: Study) -> None:
    page.heading("Where this comes from")
    for key in ("commit", "versions", "device", "cores"):
        found = list(dict.fromkeys(json.dumps(run.record[key]) for run in study.runs if key in run.record))
        if found:
            page.text(f"{key}: {'; '.join(found)}")
    recorded = next((run for run in study.runs if run.record), None)
    if recorded is not None:
        page.text(f"Configuration of {_label(recorded)}:")
        page.code(json.dumps(recorded.record.get("config", recorded.record), indent=1))


def _label(run: Run) -> str:
    return ", ".join(part for part in (run.arm, run.condition, f"seed {run.seed}" if run.seed else "") if part)


if __name__ == "__main__":
    sys.exit(main())
