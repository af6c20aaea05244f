"""The page of a run, of two runs, of a whole sweep and of half a sweep, from logs with known numbers."""

import json
import re
import shutil
from unittest import mock

import matplotlib
import numpy as np
import pytest

from jaxrl_llm.report import figures
from jaxrl_llm.report.__main__ import main
from jaxrl_llm.report.comparisons import compare
from jaxrl_llm.report.curves import Curve, curves
from jaxrl_llm.report.diagnostic_figures import flip_map, load_map
from jaxrl_llm.report.outcome_figures import survival_plot
from jaxrl_llm.report.page import Page
from jaxrl_llm.report.read import CLIPPED, Run, load
from jaxrl_llm.report.samples import changes, failures, pick
from jaxrl_llm.report.style import colour
from jaxrl_llm.report.tables import arm_table
from jaxrl_llm.report.write import write_report
from tests.reference.synthetic_runs import ARMS, write_rows, write_run, write_sweep


@pytest.fixture(scope="module", autouse=True)
def _coarse_pictures():
    """What is drawn is looked at in the figures themselves; writing them in full takes most of the time."""
    with matplotlib.rc_context({"savefig.dpi": 30}):
        yield


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    write_sweep(folder)
    return folder


@pytest.fixture(scope="module")
def page(sweep):
    return write_report(sweep), (sweep / "report.md").read_text(), (sweep / "report.html").read_text()


def test_series_reads_null_as_nan_and_lists_as_axes(tmp_path):
    rows = [
        {"step": 0, "eval/greedy": 0.5},
        {"step": 1, "a": 1.0, "layers": [1.0, None], "clip/low": 0.25},
        {"step": 2, "a": None, "layers": [3.0, 4.0], "clip/low": 0.5, "clip/high": 0.125},
    ]
    write_rows(tmp_path / "run", rows)
    run = Run(tmp_path / "run", "A")
    np.testing.assert_array_equal(run.series("a"), [[1, 2], [1, np.nan]])
    np.testing.assert_array_equal(run.series("layers")[1], [[1, np.nan], [3, 4]])
    assert run.series("none")[0].size == 0
    assert run.value("a") == 1.0
    assert run.average("a", 1) != run.average("a", 1)  # the last row is not finite
    np.testing.assert_array_equal(run.series(CLIPPED)[1], [np.nan, 0.625])


def test_clipped_is_one_side_where_only_one_is_logged(tmp_path):
    write_rows(tmp_path / "run", [{"step": 1, "clip/low": 0.25}])
    assert Run(tmp_path / "run", "A").value(CLIPPED) == 0.25


@pytest.mark.slow
def test_a_single_run_and_a_folder_of_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    write_run(tmp_path / "demo" / "grpo")
    write_run(tmp_path / "demo" / "gspo", arm="GSPO")
    assert main([str(tmp_path / "demo" / "grpo")]) == 0
    out = capsys.readouterr().out
    assert re.search(r"grpo +1/1 +0\.200 -> 0\.\d{3} +0\.180 -> 0\.\d{3} .* 1\.\d\d% +4\.50% +\d{3} +0/1", out)
    assert "difference" not in out
    assert main([str(tmp_path / "demo")]) == 0
    out = capsys.readouterr().out
    assert "grpo   1/1" in out
    assert "estimate only" not in out  # one pair has nothing to say beyond the rows of the arms
    assert "- held-out accuracy, greedy, end: grpo 0." in (tmp_path / "demo" / "report.md").read_text()
    assert (tmp_path / "demo" / "figures" / "curves.png").read_bytes().startswith(b"\x89PNG")
    # The page of the folder is not taken for a run of it, and neither are the pages of its runs.
    assert [run.arm for run in load(tmp_path / "demo").runs] == ["grpo", "gspo"]


def test_a_folder_without_runs_is_named(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "holds no run: no sweep.json and no metrics.jsonl" in capsys.readouterr().err


def test_numbered_folders_are_seeds(tmp_path):
    for seed in range(2):
        write_run(tmp_path / "GRPO" / str(seed), seed=seed)
    study = load(tmp_path)
    assert [(run.arm, run.seed) for run in study.runs] == [("GRPO", "0"), ("GRPO", "1")]


# Figures of runs on pairs and of a learnt reward, which the sweep has not.
ELSEWHERE = {"pairs", "reliability", "reward_against_kl"}
SHOWN = [plot for plot in figures.PLOTS if plot.stem not in ELSEWHERE]


def test_the_page_of_a_sweep(page, sweep):
    printed, markdown, html = page
    assert markdown.startswith("# Does routing swing the ratio?")
    assert "20 of 20 runs finished" in markdown
    assert "Missing or incomplete" not in markdown
    for plot in SHOWN:
        assert f"### {plot.heading}" in markdown
        assert (sweep / "figures" / f"{plot.stem}.png").exists()
    top = markdown.index("## N = 8")
    assert markdown.index("## Summary") < markdown.index("[Learning curves](#learning-curves)") < top
    assert '<a href="#learning-curves">' in html
    assert '<h3 id="learning-curves">' in html
    for word in (*ARMS, "commit", "0123abc", "Configuration of", "3142=", "1234", "95 % t interval"):
        assert word in markdown
        assert word in html
    assert "held-out accuracy, greedy, end: GSPO against GRPO" in markdown
    assert "GSPO is higher (p " in markdown
    assert "SAPO" in printed


def test_the_html_needs_no_other_file(page):
    html = page[2]
    assert html.count("data:image/png;base64,") == len(SHOWN)
    assert not re.findall(r'(?:src|href)="(?!data:|#)', html)
    assert "<script" not in html


def test_the_same_logs_give_the_same_page(tmp_path):
    write_run(tmp_path / "run", keys="reward")
    pages = [write_report(tmp_path / "run") and (tmp_path / "run" / "report.html").read_bytes() for _ in range(2)]
    assert pages[0] == pages[1]


def test_half_a_sweep_says_what_is_missing(tmp_path):
    conditions = ("N = 8", "N = 32")
    write_sweep(tmp_path, seeds=2, conditions=conditions, unfinished=[("GSPO", 1)], absent=[("SAPO", 1)], keys="reward")
    printed = write_report(tmp_path)
    assert "12 of 16 runs finished" in printed
    assert "GSPO, N = 8, seed 1: stopped after step 12" in printed
    assert "SAPO, N = 32, seed 1: not started" in printed
    pairs = {(c.arm, c.difference.n) for c in compare(load(tmp_path), "N = 32")}
    assert pairs == {("GRPO+R2", 2), ("GSPO", 1), ("SAPO", 1)}  # runs that have not ended are in no pair
    markdown = (tmp_path / "report.md").read_text()
    assert markdown.count("### Learning curves") == 2
    assert "## Across conditions" in markdown
    assert (tmp_path / "figures" / "curves_1.png").exists()


def test_the_page_says_what_is_asked(tmp_path):
    """The answers are those of the last evaluation, the first two of them."""
    write_rows(tmp_path / "run", [{"step": step, "reward/mean": 0.5} for step in range(3)])
    (tmp_path / "run" / "config.json").write_text(json.dumps({"config": {}, "task": "sort: Write it in order"}))
    asked = [
        {"step": step, "prompt": f"{n}=", "greedy": f"{n + step}", "reward": 0.5, "split": "test"}
        for step in (0, 2)
        for n in range(3)
    ]
    (tmp_path / "run" / "samples.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in asked))
    printed = write_report(tmp_path)
    assert printed.startswith("task sort: Write it in order\n  0= -> 2   reward 0.5\n  1= -> 3   reward 0.5\n")
    page = (tmp_path / "report.md").read_text()
    assert "Task sort: Write it in order." in page
    assert re.search(r"\| 1= +\| 3 +\| 0.5 +\|", page)


def test_the_page_has_the_warnings_of_its_runs(tmp_path):
    names = [["a"], ["a"], ["a", "b"], ["b"]]
    rows = [{"step": step, "reward/mean": 0.0, "log/warnings": one} for step, one in enumerate(names)]
    write_rows(tmp_path / "run", rows)
    printed, label = write_report(tmp_path), load(tmp_path).runs[0].label
    assert f"warnings (docs/reward_does_not_rise.md):\n  {label}: a (steps 0 to 2), b (steps 2 to 3)\n" in printed
    assert f"- {label}: a (steps 0 to 2), b (steps 2 to 3)\n" in (tmp_path / "report.md").read_text()


def test_a_sweep_in_which_nothing_ran_yet_has_a_page(tmp_path):
    write_sweep(tmp_path, seeds=1, absent=[(arm, 0) for arm in ARMS])
    assert "0 of 4 runs finished" in write_report(tmp_path)
    assert "Left out, because they would be empty" in (tmp_path / "report.md").read_text()


def test_panels_without_metrics_are_left_out_and_named(tmp_path):
    write_rows(tmp_path / "run", [{"step": 1, "reward/mean": 0.5}, {"step": 2, "reward/mean": 0.6}], result={})
    write_report(tmp_path / "run")
    markdown = (tmp_path / "run" / "report.md").read_text()
    assert "experts changed by layer and update (not logged)" in markdown
    assert "### Experts changed" not in markdown
    header, _ = arm_table(load(tmp_path / "run"), "")
    assert header == ["arm", "runs", "mean reward, last 5", "collapsed"]


def test_the_flip_map_shows_layers_and_updates(sweep):
    figure = flip_map(load(sweep), "N = 8")
    image = figure.axes[0].images[0].get_array()
    assert image.shape == (3, 8)
    # GRPO in the synthetic logs: 9 % times update 0..1 times layer 0.5..1.5.
    np.testing.assert_allclose(image[:, -1], [4.5, 9, 13.5], rtol=1e-6)
    np.testing.assert_allclose(image[:, 0], 0)


def test_the_load_map_shows_layers_and_rollouts_and_blanks_what_is_missing(tmp_path):
    for seed, steps in ((0, 4), (1, 2)):
        rows = [{"step": s, "routing/load_max_by_layer": [1.0, 1 + seed + s]} for s in range(1, steps + 1) if s != 3]
        write_rows(tmp_path / "A" / str(seed), [{"step": 0, "eval/greedy": 0.5}, *rows], result={})
    write_rows(tmp_path / "A" / "2", [{"step": 1, "routing/load_max_by_layer": [9.0] * 3}], result={})  # another model
    write_rows(tmp_path / "dense" / "0", [{"step": 1, "reward/mean": 0.5}], result={})
    figure = load_map(load(tmp_path), "")
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["A", ""]  # and the colour bar
    image = figure.axes[0].images[0]
    np.testing.assert_allclose(image.get_array(), [[1, 1, 1], [2.5, 3.5, 5]])
    assert image.get_clim() == (1, 5)
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["1", "2", "4"]


def test_ratios_with_and_without_a_flip_share_a_panel(sweep):
    plot = next(plot for plot in figures.PLOTS if plot.stem == "flipped")
    panels = plot.draw(load(sweep), "N = 8").axes
    assert plot.left_out(load(sweep), "N = 8") == ["tokens after a changed expert (60 % throughout)"]
    assert len(panels) == 4
    variance, maximum = panels[1], panels[3]
    assert [text.get_text() for text in variance.get_legend().get_texts()] == ["after a changed expert", "before any"]
    drawn = {(line.get_linestyle(), line.get_color()): line.get_ydata() for line in variance.lines}
    for arm, (_, flips, _) in ARMS.items():
        ink = colour(list(ARMS), arm)
        np.testing.assert_allclose(drawn["-", ink], [4 * flips] * 3)  # rollouts 10, 20 and 30
        np.testing.assert_allclose(drawn["--", ink], [flips / 2] * 3)
    np.testing.assert_allclose(maximum.lines[0].get_ydata(), [41, 81, 121])
    np.testing.assert_allclose(maximum.lines[1].get_ydata(), [6, 11, 16])
    assert sorted(text.get_text() for text in variance.texts) == sorted(ARMS)  # one label an arm


def test_whiskers_are_t_intervals_from_three_seeds_on_and_the_axis_spans_the_seeds(tmp_path):
    for seed, height in enumerate((1.0, 2.0, 3.0)):
        write_rows(tmp_path / "A" / str(seed), [{"step": s, "a": height * s} for s in (1, 2)], result={})
    panel = [Curve("a", "a")]
    (ax,) = curves(load(tmp_path), "", panel).axes
    half = 4.302653 / 3**0.5  # t(0.975, 2) sd / sqrt(3) with sd = 1 at step 1
    np.testing.assert_allclose(ax.collections[0].get_segments()[0][:, 1], [2 - half, 2 + half], rtol=1e-6)
    assert ax.get_ylim()[1] < 7
    shutil.rmtree(tmp_path / "A" / "2")
    (ax,) = curves(load(tmp_path), "", panel).axes
    np.testing.assert_allclose(ax.collections[0].get_segments()[0][:, 1], [1, 2])


def test_survival_stays_between_zero_and_one(sweep):
    (ax,) = survival_plot(load(sweep), "N = 8").axes
    drawn = [drawn.get_ydata() for drawn in ax.lines]
    assert min(map(np.min, drawn)) >= 0
    assert max(map(np.max, drawn)) == 1


def test_samples_show_what_changed_and_what_fails(tmp_path):
    write_rows(tmp_path / "run", [{"step": 1, "reward/mean": 0.5}], result={})
    answers = {"a": (1, 0), "b": (0, 0), "c": (0, 1), "d": (1, 1), "e": (1, 1), "f": (1, 0)}
    rows = [
        {"step": step, "prompt": prompt, "greedy": f"{prompt}{step}", "reward": rewards[step > 0], "split": "test"}
        for step in (0, 5, 9)
        for prompt, rewards in answers.items()
    ]
    rows += [{"step": 9, "prompt": p, "answer": p, "reward": r} for p, r in (("x", 1.0), ("y", 0.5), ("z", 0.0))]
    (tmp_path / "run" / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = load(tmp_path / "run").runs[0]
    changed, steps = changes(run)
    assert steps == (0, 9)
    assert {one.prompt: one.kind for one in changed} == {
        "a": "broken", "b": "still wrong", "c": "fixed", "d": "still right", "e": "still right", "f": "broken"
    }  # fmt: skip
    assert [one.prompt for one in pick(changed, 4)] == ["a", "b", "c", "d"]
    assert [one.prompt for one in pick(changed, 5)] == ["a", "f", "b", "c", "d"]
    assert [row["prompt"] for row in failures(run, 3)] == ["z", "y"]
    with mock.patch.object(type(run), "solved", 0.5):
        assert [row["prompt"] for row in failures(run, 3)] == ["z"]
    write_report(tmp_path / "run")
    markdown = (tmp_path / "run" / "report.md").read_text()
    assert "after rollout 0 and after 9: 2 broken, 1 still wrong, 1 fixed, 2 still right of 6 prompts" in markdown
    assert "| a | a0 (1) | a9 (0) | broken |" in markdown


def test_the_page_escapes_what_a_model_wrote(tmp_path):
    page = Page(tmp_path)
    page.heading("<b>", level=1)
    page.code("```<script>alert(1)</script>")
    page.table(["a", "b"], [["x|y", "<i>"]], "plain")
    page.table(["answer <b>"], [["![](address) <img src=x> \x1b[2J"]], "prose", prose=True)
    page.text("<img>")
    page.bullets(["<img>"])
    markdown, html = page.write()
    assert "<script>" not in html.read_text()
    assert "~~~~\n```<script>" in markdown.read_text()
    assert "x\\|y" in markdown.read_text()
    assert "| !&#91;](address) &lt;img src=x&gt; \\x1b&#91;2J |" in markdown.read_text()
    assert not re.search(r"<(?!/?script>)\w", markdown.read_text())
    assert "\x1b" not in markdown.read_text() + html.read_text()
