"""Which steps of a run are saved, and where, by a schedule and by what is still being written."""

from unittest.mock import Mock

import pytest

from jaxrl_llm.records.checkpointing import Checkpoints
from jaxrl_llm.records.run_log import RunLog
from jaxrl_llm.run.assembly import Run
from jaxrl_llm.run.blocks import CheckpointConfig, Settings
from jaxrl_llm.run.saves import Saves


@pytest.fixture
def saves(tmp_path, monkeypatch):
    """saves(busy, **fields): the steps 1 to 9 that are saved in the DIR ("far") or in DIR/local ("near"); in the steps
    of `busy` the checkpoints of either place are still being written."""

    def saved(busy=(), ends=(), **fields):
        run = Mock(Run, settings=Mock(Settings, checkpoint=CheckpointConfig(**fields)))
        own, at = Saves(run, Mock(RunLog, workdir=tmp_path), "identity"), []
        monkeypatch.setattr(Checkpoints, "ready", lambda self: at[-1] not in busy)
        found = {}
        for step in range(1, 10):
            at.append(step)
            own.judged(step, {"eval/greedy": 1.0 if step == 5 else 0.5 if step == 1 else 0.0})
            if (into := own.due(step, ends=step in ends)) is not None:
                found[step] = "near" if into is own._near else "far"
        own.close()
        return found

    return saved


def test_every_so_many_steps(saves):
    assert saves(every=4) == {4: "far", 8: "far"}
    assert saves(every=4, local_every=2) == {2: "near", 4: "far", 6: "near", 8: "far"}


def test_a_save_that_is_due_waits_for_the_one_before_and_is_not_forgotten(saves):
    """The nearer one is not waited for: its next comes soon."""
    assert saves(every=4, busy=(4, 5)) == {6: "far", 8: "far"}
    assert saves(every=4, local_every=2, busy=(2, 4, 5)) == {6: "far", 8: "far"}


def test_the_end_and_the_best_wait_for_nothing(saves):
    assert saves(every=9, ends=(3,), busy=range(10)) == {3: "far"}
    assert saves(every=9, best="eval/greedy", busy=range(10)) == {1: "far", 5: "far"}
