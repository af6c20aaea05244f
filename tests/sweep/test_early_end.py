"""A run that ended early is a finished run of its sweep, although it has fewer steps than were planned."""

import json

import pytest

from jaxrl_llm.config import loading
from jaxrl_llm.run.settings import config_hash
from jaxrl_llm.sweep.__main__ import main

SWEEP = """
from jaxrl_llm.sweep import Sweep


def get_sweep():
    early = {"checkpoint.best": "eval/greedy", "checkpoint.early_stopping_patience": 2}
    return Sweep("?", [{"arm": "A", "seed": 0} | early], "A", config="grpo:smoke")
"""


EARLY = {"metric": "eval/greedy", "mode": "max", "value": 0.5, "step": 1, "waited": 2}


@pytest.mark.parametrize(
    ("result", "counts"),
    [
        ({"eval/greedy": 0.5}, "1 runs, 0 finished, 1 to do"),  # of a run that was planned with fewer steps
        ({"eval/greedy": 0.5, "early_stopping": EARLY}, "1 runs, 1 finished, 0 to do"),
        # ... which had less patience than is planned now, and so trains on
        ({"eval/greedy": 0.5, "early_stopping": EARLY | {"waited": 1}}, "1 runs, 0 finished, 1 to do"),
    ],
    ids=["short", "early", "more patience"],
)
def test_a_run_that_ended_early_has_ended(tmp_path, capsys, result, counts):
    folder = tmp_path / "out" / "A" / "0"
    folder.mkdir(parents=True)
    identity = config_hash(loading.load(loading.find("grpo:smoke"), [("seed", "0")]))
    (folder / "config.json").write_text(json.dumps({"config_hash": identity}))
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    (folder / "result.json").write_text(json.dumps(result))
    (tmp_path / "sweep.py").write_text(SWEEP)
    arguments = [f"--sweep={tmp_path / 'sweep.py'}", f"--workdir={tmp_path / 'out'}", "--launcher=none"]
    assert main(arguments) == 0
    assert counts in capsys.readouterr().out
