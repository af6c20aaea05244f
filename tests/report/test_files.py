"""What a report leaves for a paper: figures as SVG and PDF, tables as CSV, a page to point at."""

import csv
import json
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.figure import Figure

from jaxrl_llm.report.interactive import HOW_TO_GET_IT, write_interactive
from jaxrl_llm.report.names import NAMES, in_words
from jaxrl_llm.report.page import Page, save_vectors
from jaxrl_llm.report.read import load
from jaxrl_llm.report.tables import arm_table
from jaxrl_llm.report.write import write_report
from tests.reference.synthetic_runs import write_rows

HOSTILE = "</script><script>alert(1)</script>"


def test_the_same_figure_gives_the_same_files(tmp_path):
    def draw(stem):
        figure = Figure(layout="constrained")
        figure.subplots().plot([1, 2], [3, 4])
        save_vectors(figure, tmp_path / f"{stem}.png")
        return [(tmp_path / f"{stem}.{form}").read_bytes() for form in ("svg", "pdf")]

    svg, pdf = draw("a")
    assert draw("b") == [svg, pdf]
    assert b"<svg" in svg
    assert pdf.startswith(b"%PDF")
    assert b"/Type3" not in pdf  # which journals refuse


def test_a_table_as_csv_holds_no_formula_of_others(tmp_path):
    page = Page(tmp_path)
    header, rows = ["arm", "change"], [["a_b & c", "-0.5 -> [+0.25, 1 %]"]]
    page.table(header, rows, "numbers")
    assert list(csv.reader((tmp_path / "tables/numbers.csv").read_text().splitlines())) == [header, *rows]
    answers = ["\\input{x}~^", '=HYPERLINK("x")', "-1 ± 2\x1b"]
    page.table(["answer"], [[answer] for answer in answers], "prose", prose=True)
    shown = [row[0] for row in csv.reader((tmp_path / "tables/prose.csv").read_text().splitlines())][1:]
    assert shown == [answers[0], f"'{answers[1]}", "'-1 ± 2\\x1b"]


def test_names_have_words_and_the_k_of_best_of_k(tmp_path):
    assert in_words("eval/pass_at_16") == in_words("eval/pass_at_k", 16) == "held-out accuracy, best of 16"
    assert in_words("eval/pass_at_1") == NAMES["eval/pass_at_1"]
    assert in_words("routing/of_my_own") == "of my own"
    rows = [{"step": 0, "eval/pass_at_k": 0.5, "eval/k": 4}]
    for arm in "AB":
        write_rows(tmp_path / arm, rows, result={})
    assert load(tmp_path).named("eval/pass_at_k") == "held-out accuracy, best of 4"
    write_rows(tmp_path / "C", [rows[0] | {"eval/k": 16}], result={})
    assert load(tmp_path).named("eval/pass_at_k") == "held-out accuracy, best of 4 or 16"


def test_means_over_seeds_have_intervals_with_their_n(tmp_path):
    for seed, reward in enumerate((0.25, 0.5, 0.75)):
        write_rows(tmp_path / "A" / str(seed), [{"step": 1, "reward/mean": reward}], result={})
    write_rows(tmp_path / "B" / "0", [{"step": 1, "reward/mean": 0.5}], result={})
    header, rows = arm_table(load(tmp_path), "")
    half = 4.302653 * 0.25 / np.sqrt(3)
    assert [row[header.index("mean reward, last 5")] for row in rows] == [f"0.500 ± {half:.3f}", "0.500"]
    assert load(tmp_path).seeds("") == "A 3, B 1"
    assert "±: half of the 95 % t interval of the mean over seeds (A 3, B 1 ended)" in write_report(tmp_path)


@pytest.fixture
def hostile(tmp_path):
    write_rows(tmp_path / "run", [{"step": s, "reward/mean": 0.1 * s} for s in range(3)], result={})
    rows = [{"step": 1, "prompt": HOSTILE, "answer": f"\x1b{HOSTILE}", "reward": None}]
    (tmp_path / "run" / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "run"


def test_the_interactive_page_has_runs_and_samples_as_text(hostile, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "plotly.offline", SimpleNamespace(get_plotlyjs=lambda: "/* plotly */"))
    assert write_interactive(load(hostile), tmp_path / "page.html", HOSTILE)
    page = (tmp_path / "page.html").read_text()
    assert page.count("<script") == page.count("</script>") == 3
    assert not re.findall(r'(?:src|href)="', page)
    assert "default-src 'none'" in page
    data = json.loads(re.search(r'id="study">(.*)</script>', page)[1])
    assert data["metrics"] == [{"key": "reward/mean", "name": "mean reward", "scale": "linear"}]
    (run,) = data["runs"]
    assert run["series"] == {"reward/mean": {"x": [0, 1, 2], "y": [0, 0.1, 0.2]}}
    assert run["samples"] == {
        "1": [{"split": "training", "reward": "nan", "prompt": HOSTILE, "answer": f"\\x1b{HOSTILE}"}]
    }


def test_without_plotly_the_report_says_how_to_get_it(hostile, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    assert write_report(hostile).endswith(f"\n{HOW_TO_GET_IT}")
    assert not (hostile / "interactive.html").exists()
