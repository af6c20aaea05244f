"""Turn the DIR of a run, of several runs or of a sweep into tables, figures and one page.

    python -m jaxrl_llm.report DIR

prints the table and writes DIR/report.md, DIR/report.html (one file, figures inlined) and DIR/figures/*.png. It only
reads logs, so the page of a sweep that is still running says what is missing.
"""

import json
from pathlib import Path

from jaxrl_llm.report.comparisons import (
    OUTCOMES,
    batch_table,
    compare,
    difference_table,
    grouped,
    identical_arms,
    sentence,
)
from jaxrl_llm.report.figures import PLOTS
from jaxrl_llm.report.outcome_figures import differences_by_condition, outcome_by_condition
from jaxrl_llm.report.page import Page, text_table
from jaxrl_llm.report.read import Study, load
from jaxrl_llm.report.samples import changes, failures, pick, tally
from jaxrl_llm.report.statistics import MINIMUM_SEEDS
from jaxrl_llm.report.tables import arm_table, config_table, resolved, routing_table

__all__ = ["write_report"]

_SAMPLES = 4  # held-out prompts shown per run, and failures


def write_report(folder: str | Path, width: int | None = None) -> str:
    """Write the page of a folder and return the text that belongs on the terminal, its tables `width` wide at most.

    Raises:
        FileNotFoundError: there is no run in the folder.
    """
    folder = Path(folder)
    study = load(folder)
    page = Page(folder)
    printed: list[str] = []
    name = folder.resolve().name
    page.heading(study.question or (f"Run {name}" if len(study.runs) == 1 else f"Runs of {name}"), level=1)
    _summary(page, study, printed)
    page.contents()
    header, rows = config_table(study)
    if rows:
        page.heading("What the arms differ in")
        page.table(header, rows)
    for condition in study.conditions:
        page.heading(condition or "Results")
        printed += [f"\n{condition}"] if condition else []
        _condition(page, study, condition, printed, width)
    if len(study.conditions) > 1:
        _across(page, study)
    _samples(page, study)
    _origin(page, study)
    markdown, html = page.write()
    printed.append(f"\nwrote {markdown}, {html} and {folder / 'figures'}")
    return "\n".join(printed)


def _summary(page: Page, study: Study, printed: list[str]) -> None:
    """The summary: which runs are missing, and the first outcome of every condition."""
    page.heading("Summary")
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
    for condition in study.conditions:
        lines = _findings(study, condition)
        if lines and condition:
            page.text(f"{condition}:")
        if lines:
            page.bullets(lines)


def _findings(study: Study, condition: str) -> list[str]:
    """Sentences on the first outcome that the runs have, or on each arm where there is nothing to compare."""
    compared = [c for c in compare(study, condition) if c.difference.n > 1]
    first = [c for c in compared if c.outcome is compared[0].outcome]
    lines = [sentence(c, study.baseline) for c in first if c.verdict in ("higher", "lower") or c.batches_p < 0.05]
    others = [c for c in first if sentence(c, study.baseline) not in lines]
    for verdict in dict.fromkeys(c.verdict for c in others):
        lines.append(f"{first[0].outcome.name}: {grouped([c for c in others if c.verdict == verdict], study.baseline)}")
    lines += [
        f"{one} and {other} are identical: their runs logged the same numbers."
        for one, other in identical_arms(study, condition)
    ]
    if compared:
        return lines
    for outcome in OUTCOMES:
        ends = {run.label: outcome.measure(run) for run in study.runs if run.condition == condition and run.ended}
        ends = {label: value for label, value in ends.items() if value == value}
        if ends:
            listed = "; ".join(f"{label} {value:.{outcome.digits}f}" for label, value in ends.items())
            return [f"{outcome.name}: {listed}.", *lines]
    return lines


def _condition(page: Page, study: Study, condition: str, printed: list[str], width: int | None) -> None:
    header, rows = arm_table(study, condition)
    page.table(header, rows)
    printed.append(text_table(header, rows, width))
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
        page.table(header, rows)
        printed += ["", text_table(header, rows, width)]
    header, rows = batch_table(study, condition)
    if rows:
        page.text(
            "The same differences apart for each commit that the arm's runs were made at, with the seeds. The "
            "last column is the p of Welch's t test that the commits have one mean: where it is small, the result did "
            "not replicate."
        )
        page.table(header, rows)
    header, rows = routing_table(study, condition)
    if rows:
        page.text(
            "What the changed selection of experts explains of the variance of the log-ratio, on whole rollouts after "
            "their last update, scored without replay. Weighted by variance, since single shares are heavy-tailed; "
            "the last columns are the shares of tokens whose ratio the routing alone moves beyond the usual clip, and "
            "doubles or halves."
        )
        page.table(header, rows)
    absent = []
    suffix = f"_{study.conditions.index(condition)}" if len(study.conditions) > 1 else ""
    plots = PLOTS[:1] if study.branching else [plot for plot in PLOTS if plot.concerns(study, condition)]
    for plot in plots:  # a branch has no curves
        absent += plot.left_out(study, condition)
        if plot.drawable(study, condition):
            page.heading(plot.heading, level=3)
            page.picture(plot.draw(study, condition), plot.stem + suffix, plot.heading, plot.caption)
    if absent:
        page.text(f"Left out, because they would be empty: {'; '.join(dict.fromkeys(absent))}.")


def _across(page: Page, study: Study) -> None:
    page.heading("Across conditions")
    if study.branching:
        caption = "Mean difference to the baseline with its 95 % t interval over trajectories."
        page.picture(differences_by_condition(study), "differences_by_condition", "differences", caption)
        return
    for number, outcome in enumerate(OUTCOMES):
        if any(run.rows and outcome.measure(run) == outcome.measure(run) for run in study.runs):  # not NaN
            figure = outcome_by_condition(study, outcome.measure, outcome.name)
            caption = f"{outcome.name}: one dot per seed, a line through the means."
            page.picture(figure, f"conditions_{number}", outcome.name, caption)


def _samples(page: Page, study: Study) -> None:
    """One run per arm: the same held-out prompts before and after, then the worst answers of the last rollout."""
    shown = [run for run in study.runs if any({"greedy", "answer"} & row.keys() for row in run.samples)]
    first = {run.arm: run for run in reversed(shown)}
    if first:
        page.heading("Samples")
    for arm in [arm for arm in study.arms if arm in first]:
        run = first[arm]
        page.heading(run.label, level=3)
        changed, (start, end) = changes(run)
        if changed:
            page.text(
                f"Greedy answers to logged held-out prompts, after rollout {start} and after {end}: {tally(changed)}."
            )
            header = ["prompt", f"answer after {start} (reward)", f"answer after {end} (reward)", "what happened"]
            rows = [
                [one.prompt, f"{one.before} ({one.before_reward:g})", f"{one.after} ({one.after_reward:g})", one.kind]
                for one in pick(changed, _SAMPLES)
            ]
            page.table(header, rows, prose=True)
        wrong = failures(run, _SAMPLES)
        if wrong:
            page.text(f"Lowest rewards among the logged training answers of rollout {wrong[0]['step']}:")
            rows = [[str(row.get("prompt")), str(row.get("answer")), f"{row.get('reward')}"] for row in wrong]
            page.table(["prompt", "answer", "reward"], rows, prose=True)
        if not changed and not wrong:
            page.text("All logged answers are right, and no held-out prompt was logged twice.")


def _origin(page: Page, study: Study) -> None:
    page.heading("Where this comes from")
    for key in ("commit", "versions", "device", "cores"):
        values = list(dict.fromkeys(json.dumps(run.record[key]) for run in study.runs if key in run.record))
        if values:
            page.text(f"{key}: {'; '.join(values)}")
    recorded = next((run for run in study.runs if run.record), None)
    if recorded is not None:
        page.text(f"Configuration of {recorded.label}, with the defaults of its objective filled in:")
        page.code(json.dumps(resolved(recorded.record.get("config", {})), indent=1))
