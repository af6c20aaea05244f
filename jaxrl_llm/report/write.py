"""Turn the runs of a DIR, or of several, into a page: report.md, report.html, interactive.html, figures/ and tables/.

Only logs are read, so the page of a sweep that is still running says what is missing.
"""

import json
import math
from pathlib import Path

from jaxrl_llm.ground.terminal import visible, wrapped
from jaxrl_llm.records.run_log import shown_answer
from jaxrl_llm.records.watch import PAGE
from jaxrl_llm.report.comparisons import OUTCOMES, findings
from jaxrl_llm.report.figures import PLOTS
from jaxrl_llm.report.interactive import HOW_TO_GET_IT, write_interactive
from jaxrl_llm.report.outcome_figures import differences_by_condition, outcome_by_condition
from jaxrl_llm.report.page import Page, text_table
from jaxrl_llm.report.read import Study, load
from jaxrl_llm.report.samples import (
    answered,
    changes,
    failures,
    first_sampled,
    last_answers,
    pick,
    side_by_side,
    tally,
)
from jaxrl_llm.report.statistics import LEVEL, MINIMUM_SEEDS
from jaxrl_llm.report.tables import arm_table, batch_table, config_table, difference_table, resolved, routing_table

_SAMPLES = 4  # a run: held-out prompts that are shown, and failures
_ASKED = 2  # answers that say what is asked
_BATCHES = (
    "The same differences apart for each commit that the arm's runs were made at, with the seeds. The last column is "
    "the p of Welch's t test that the commits have one mean: where it is small, the result did not replicate."
)
_ROUTING = (
    "What the changed selection of experts explains of the variance of the log-ratio, on whole rollouts after their "
    "last update, scored without replay. Weighted by variance, since single shares are heavy-tailed; the last columns "
    "are the shares of tokens whose ratio the routing alone moves beyond the usual clip, and doubles or halves."
)


def write_report(folder: str | Path, width: int | None = None) -> str:
    """Write the page of a folder and return what belongs on the terminal, with tables of at most `width` characters.

    Raises:
        FileNotFoundError: there is no run in the folder.
    """
    study, name = load(folder), Path(folder).resolve().name
    title = study.question or (f"Run {name}" if len(study.runs) == 1 else f"Runs of {name}")
    return write_page(study, Path(folder), "report", title, width)


def write_page(study: Study, folder: Path, stem: str, title: str, width: int | None = None) -> str:
    """Write STEM.md, STEM.html and what they show into the folder; returns the same as `write_report`."""
    try:
        return _written(study, folder, stem, title, width)
    except OSError as error:
        if error.filename is None and error.errno is not None:  # a full disk names no file
            raise OSError(f"{folder} cannot be written ({error}); make room there, or copy it elsewhere") from error
        raise


def _written(study: Study, folder: Path, stem: str, title: str, width: int | None) -> str:
    page, printed = Page(folder), []
    page.heading(title, level=1)
    _summary(page, study, printed)
    page.contents()
    header, rows = config_table(study)
    if rows:
        page.heading("What the arms differ in")
        page.table(header, rows, "configuration")
    for condition in study.conditions:
        page.heading(condition or "Results")
        printed += [f"\n{condition}"] if condition else []
        _condition(page, study, condition, printed, width)
    if len(study.conditions) > 1:
        _across(page, study)
    _samples(page, study)
    _side_by_side(page, study)
    _origin(page, study)
    markdown, html = page.write(stem)
    written = f"wrote {markdown}, {html}, {folder / 'figures'} and {folder / 'tables'}"
    if not study.branching:  # a branch has no curves
        interactive = folder / "interactive.html"
        written += f"\n{f'wrote {interactive}' if write_interactive(study, interactive, title) else HOW_TO_GET_IT}"
    lines = [*printed, "", *written.splitlines()]
    if width is not None:  # a table has lines of its own
        lines = [line if "\n" in line else wrapped(line, width) for line in lines]
    return visible("\n".join(lines))


def _summary(page: Page, study: Study, printed: list[str]) -> None:
    """Return the question, the missing runs, and the first outcome of every condition."""
    page.heading("Summary")
    for task in dict.fromkeys(str(run.record["task"]) for run in study.runs if "task" in run.record):
        first = next(run for run in study.runs if run.record.get("task") == task)
        page.text(f"Task {task}.")
        printed.append(f"task {task}")
        if rows := last_answers(first, _ASKED):
            shown = [(str(row["prompt"]), *answered(row)) for row in rows]
            page.text(f"Greedy answers of {first.label} to held-out prompts, after rollout {rows[0]['step']}:")
            page.table(["prompt", "answer", "reward"], [[p, a, f"{r:g}"] for p, a, r in shown], "task", prose=True)
            printed += [f"  {shown_answer(*one)}" for one in shown]
        printed.append("")
    done = sum(run.finished for run in study.runs)
    line = f"{done} of {len(study.runs)} runs finished."
    missing = [f"{run.label}: {run.status}" for run in study.runs if not run.finished]
    if study.branching:
        states = len({(run.condition, run.seed, run.branch) for run in study.runs})
        trajectories = len({(run.condition, run.seed) for run in study.runs})
        line = f"{done} branches from {states} states of {trajectories} trajectories."
        missing += study.unfinished
    page.text(line)
    if missing:
        page.text("Missing or incomplete runs:")
        page.bullets(missing)
        printed += [line, *(f"  {one}" for one in missing), ""]
    warned = [f"{run.label}: {', '.join(run.warnings)}" for run in study.runs if run.warnings]
    if warned:
        page.text(f"Warnings of the runs, by the names that docs/metrics.md explains; what to do is in {PAGE}:")
        page.bullets(warned)
        printed += [f"warnings ({PAGE}):", *(f"  {one}" for one in warned), ""]
    if damaged := study.damaged():
        page.text("Damaged files, of which what can be read is shown:")
        page.bullets(damaged)
        printed += ["damaged files, of which what can be read is shown:", *(f"  {one}" for one in damaged), ""]
    for condition in study.conditions:
        lines = findings(study, condition)
        if lines and condition:
            page.text(f"{condition}:")
        if lines:
            page.bullets(lines)


def _condition(page: Page, study: Study, condition: str, printed: list[str], width: int | None) -> None:
    """The tables and figures of one condition."""
    suffix = f"_{study.conditions.index(condition)}" if len(study.conditions) > 1 else ""
    header, rows = arm_table(study, condition)
    page.table(header, rows, f"arms{suffix}")
    printed.append(text_table(header, rows, width))
    seeds = study.seeds(condition)
    if "±" in str(rows):
        told = f"±: half of the {100 * LEVEL:.0f} % t interval of the mean over seeds ({seeds} ended)"
        page.text(f"{told}.")
        printed.append(told)
    header, rows = difference_table(study, condition)
    if rows:
        pair = "branches from one state of a trajectory (seed)" if study.branching else "runs of one seed"
        page.text(
            f"Differences to {study.baseline}, pair by pair: two {pair} share start, prompts and sampling "
            "keys. Several pairs of one seed are averaged first, so that intervals rest on the number of seeds. p is "
            "of the t test, corrected by Holm for the number of arms in an outcome, and the verdict rests on it: "
            f"undecided above 0.05, no verdict under {MINIMUM_SEEDS} seeds. Detectable is the true difference that "
            "this number of seeds would have found with 80 % power: an undecided row says no more than that the "
            "difference is probably smaller."
        )
        page.table(header, rows, f"differences{suffix}")
        printed += ["", text_table(header, rows, width, keys=2)]
    for stem, text, table in (("commits", _BATCHES, batch_table), ("routing", _ROUTING, routing_table)):
        header, rows = table(study, condition)
        if rows:
            page.text(text)
            page.table(header, rows, f"{stem}{suffix}")
    absent = []
    concerned = [plot for plot in PLOTS if not plot.key or study.has(plot.key, condition)]
    for plot in PLOTS[:1] if study.branching else concerned:  # a branch has no curves
        left_out = plot.left_out(study, condition)
        absent += left_out
        if len(left_out) < plot.parts:
            page.heading(plot.heading, level=3)
            caption = f"{plot.caption} Seeds: {seeds}."
            page.picture(plot.draw(study, condition), plot.stem + suffix, plot.heading, caption)
    if absent:
        page.text(f"Left out, because they would be empty: {'; '.join(dict.fromkeys(absent))}.")


def _across(page: Page, study: Study) -> None:
    page.heading("Across conditions")
    if study.branching:
        caption = "Mean difference to the baseline with its 95 % t interval over trajectories."
        page.picture(differences_by_condition(study), "differences_by_condition", "differences", caption)
        return
    for number, outcome in enumerate(OUTCOMES):
        if any(run.rows and not math.isnan(outcome.measure(run)) for run in study.runs):
            caption = f"{outcome.title}: one dot per seed, a line through the means with their 95 % t intervals."
            page.picture(outcome_by_condition(study, outcome), f"conditions_{number}", outcome.title, caption)


def _samples(page: Page, study: Study) -> None:
    """The first run of every arm: held-out prompts before and after, then the worst answers of the last rollout."""
    shown = first_sampled(study)
    if shown:
        page.heading("Samples")
    for number, run in enumerate(shown):
        page.heading(run.label, level=3)
        changed, (start, end) = changes(run)
        if changed:
            page.text(
                f"Greedy answers to logged held-out prompts, after rollout {start} and after {end}: {tally(changed)}."
            )
            header = ["prompt", f"answer after {start} (reward)", f"answer after {end} (reward)", "what happened"]
            rows = [
                [c.prompt, f"{c.before} ({c.before_reward:g})", f"{c.after} ({c.after_reward:g})", c.kind]
                for c in pick(changed, _SAMPLES)
            ]
            page.table(header, rows, f"changes_{number}", prose=True)
        wrong = failures(run, _SAMPLES)
        if wrong:
            page.text(f"Lowest rewards among the logged training answers of rollout {wrong[0]['step']}:")
            rows = [[str(row.get("prompt")), str(row.get("answer")), f"{row.get('reward')}"] for row in wrong]
            page.table(["prompt", "answer", "reward"], rows, f"failures_{number}", prose=True)
        if not changed and not wrong:
            page.text("All logged answers are right, and no held-out prompt was logged twice.")


def _side_by_side(page: Page, study: Study) -> None:
    """The answers of the first run of every arm to prompts that all of them logged at one step."""
    runs = first_sampled(study)
    shared = side_by_side(runs) if len(runs) > 1 else []
    if shared:
        page.heading("Answers to the same prompts")
    for one in shared:
        page.text(
            f"{one.split} prompts at step {one.step}, with rewards; those that differ in reward first:".capitalize()
        )
        rows = [[prompt, *(f"{text} ({reward:g})" for text, reward in answers)] for prompt, answers in one.rows]
        page.table(["prompt", *(run.label for run in runs)], rows[: 2 * _SAMPLES], f"answers_{one.split}", prose=True)


def _origin(page: Page, study: Study) -> None:
    page.heading("Where this comes from")
    page.text("Beside this page lie its figures as PNG, SVG and PDF (figures/) and its tables as CSV (tables/).")
    for key in ("commit", "versions", "device", "cores"):
        values = list(dict.fromkeys(json.dumps(run.record[key]) for run in study.runs if key in run.record))
        if values:
            page.text(f"{key}: {'; '.join(values)}")
    recorded = next((run for run in study.runs if run.record), None)
    if recorded is not None:
        page.text(f"Configuration of {recorded.label}, with the defaults of its objective filled in:")
        page.code(json.dumps(resolved(recorded.record), indent=1))
