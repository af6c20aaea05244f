"""The page for a reward that does not go up: what it names exists, and warnings and the end of a run name it."""

import io
import re

import pytest

from jaxrl_llm.config import listed
from jaxrl_llm.records.run_log import RunLog
from jaxrl_llm.records.watch import PAGE, TEXTS
from jaxrl_llm.run.opening import closing
from tests.reference.metrics_doc import ROOT, documented

TEXT = (ROOT / PAGE).read_text()
NAMES = set(re.findall(r"`([\w./]+)(?:=\w+)?`", TEXT))
BLOCKS = {line.split(".")[0] for line in re.findall(r"--config\.([\w.]+)", listed.field_help())}


def test_its_metrics_are_documented_and_its_fields_exist():
    metrics = {name for name in NAMES if re.fullmatch(r"[a-z]+/[\w.]+", name)}
    fields = {name for name in NAMES if name.split(".")[0] in BLOCKS and "." in name}
    assert metrics <= documented()
    listed.check_names(fields)
    assert len(metrics) > 10
    assert len(fields) > 10


def test_it_knows_the_warnings_of_a_run():
    assert TEXTS.keys() <= NAMES


@pytest.mark.parametrize("name", TEXTS)
def test_warnings_and_the_last_line_of_a_run_name_it(tmp_path, name):
    stream = io.StringIO()
    with RunLog(tmp_path, 1, stream=stream) as log:
        log.warn({name: TEXTS[name]})
        log.screen.end(closing("runs/a"))
    first, *last = stream.getvalue().splitlines()
    assert first == f"warning {name}: {TEXTS[name]}; more in {PAGE}"
    assert last[-1] == f"      {PAGE} if the reward did not go up"
    assert max(map(len, last)) <= 80
