"""Wrong inputs through the real commands: how endings are told apart, a few kinds here, all in the slow tests."""

import pytest

from tests.reference.wrong_inputs import Kind
from tests.reference.wrong_inputs.__main__ import table, told
from tests.reference.wrong_inputs.running import BAD, MODULES, ending, run
from tests.reference.wrong_inputs.tables import TABLES

LINE, WARNS, RUNS = (
    Kind("group", "what", "train", "steps", expects=expects) for expects in ("line", "warning", "runs")
)
ENDINGS = [
    (LINE, 2, "", "error: steps=-1 must be at least 0\n", "line"),
    (LINE, 2, "", "warning: slow\nerror: steps=-1 must be at least 0\n", "line"),
    (LINE, 2, "", "error: it must be at least 0\n", "vague"),
    (LINE, 1, "", "error: steps=-1 must be at least 0\n", "vague"),
    (LINE, 2, "", "error: steps=-1\nerror: and more\n", "many lines"),
    (LINE, 3, "", "steps\n", "many lines"),
    (LINE, 1, "", "Traceback (most recent call last):\n", "traceback"),
    (LINE, 70, "", "error: a fault of jaxrl_llm\n", "traceback"),
    (LINE, -9, "", "", "traceback"),
    (LINE, 0, "steps", "", "silent"),
    (LINE, None, "", "", "hang"),
    (WARNS, 0, "warning steps: few\n", "", "warning"),
    (WARNS, 0, "", "", "silent"),
    (WARNS, 2, "", "error: steps\n", "refused"),
    (RUNS, 0, "steps", "", "runs"),
    (RUNS, 1, "", "error: steps\n", "refused"),
]


@pytest.mark.parametrize(("kind", "code", "out", "err", "ends"), ENDINGS)
def test_what_a_command_ended_in(kind, code, out, err, ends):
    assert ending(kind, code, out, err) == ends


def test_kinds_are_few_and_each_names_something():
    assert len({(kind.group, kind.what, kind.line) for kind in TABLES}) == len(TABLES) <= 200
    assert [kind for kind in TABLES if kind.expects != "runs" and not kind.says] == []
    assert {kind.line.split()[0] for kind in TABLES} == MODULES.keys()


def test_refused_in_one_line_before_jax_is_imported(tmp_path):
    """Fresh processes, in a folder whose modules jax and numpy say that they were imported."""
    few = [kind for kind in TABLES if kind.group == "before JAX is imported"][:4]
    outcomes = list(run(few, tmp_path, preload=False))
    assert [told(one) for one in outcomes if one.ending in BAD] == []
    assert table(outcomes).splitlines()[-1] == "| all | 4 | 4 |  |  |"


@pytest.mark.slow
@pytest.mark.long
def test_every_kind_ends_as_it_should(tmp_path):
    outcomes = list(run(TABLES, tmp_path))
    print(f"\n{table(outcomes)}")
    assert [told(one) for one in outcomes if one.ending in BAD] == []
