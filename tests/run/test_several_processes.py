"""Whole runs in two and four real processes: equal to one process, moved between counts, and ended together."""

import json
import re
import shutil
import signal
import time

import numpy as np
import pytest

from jaxrl_llm.config import loading
from jaxrl_llm.config.command_line import fields_and_rest
from jaxrl_llm.records.checkpoint_reader import saved_payload
from jaxrl_llm.records.run_log import read_rows
from tests.reference import several, tiny_run
from tests.reference.fake_bucket import fake_bucket

pytestmark = pytest.mark.slow
long = pytest.mark.long

STEPS = 6
_LOST = 15  # seconds in which a process has noticed that another is gone


def line(config, workdir, changes):
    fields = [f"--config.{name}={value}" for name, value in changes.items()]
    return ["-m", "jaxrl_llm.main", f"--config={config}", f"--workdir={workdir}", *fields]


def command(folder, workdir, count, **changes):
    """DAPO with dynamic sampling; every count has a warm start of its own, from the same config and mesh."""
    changes = {
        "steps": STEPS,
        "mesh.shape": "(1,-1,1,1)",
        "task.data_dir": folder / "data",
        "warm_start.cache_dir": folder / f"cache{count}",
        "warm_start.steps": 60,
        "dynamic_sampling.max_draws": 3,
        "evaluation.every": 3,
        "checkpoint.every": 2,
        "checkpoint.keep": 9,
        "processes.heartbeat_timeout_s": 10,
    } | changes
    return line("dapo:smoke", workdir, changes)


@pytest.fixture(scope="module")
def whole(folder):
    """The DIR of the run without a break, for any number of processes: one, two or four with as many devices."""
    done = {}

    def of(count):
        if count not in done:
            done[count] = folder / f"whole{count}"
            job = several.ended(folder / f"job{count}", count, command(folder, done[count], count))
            for index in range(1, count):
                assert "step 1/" not in job.printed(index)  # process 0 is the one that speaks
        return done[count]

    return of


def close(rows, others):
    """Every metric but the clock's, within rounding."""
    assert [row["step"] for row in rows] == [other["step"] for other in others]
    for row, other in zip(rows, others, strict=True):
        assert row.keys() == other.keys()
        for name in row.keys() - {"time/to_first_update_s"}:
            given, wanted = (np.asarray(one[name], float) for one in (row, other))
            np.testing.assert_allclose(given, wanted, rtol=2e-3, atol=1e-4, err_msg=f"step {row['step']} {name}")


def small(folder, workdir, **changes):
    """Two steps of four answers each, from fresh parameters of one layer."""
    changes = {
        "steps": 2,
        "mesh.shape": "(1,-1,1,1)",
        "model.num_hidden_layers": 1,
        "warm_start.steps": 0,
        "rollout.prompts": 2,
        "rollout.group_size": 4,
        "evaluation.prompts": 2,
        "evaluation.samples": 1,
        "log.diagnostics_every": 0,
        "task.data_dir": folder / "data",
    } | changes
    return line("grpo:smoke", workdir, changes)


def test_a_small_pair_trains_as_one(folder, tmp_path):
    """Two processes with two devices each, and this one with four."""
    arguments = small(folder, tmp_path / "two")
    several.ended(tmp_path / "job", 2, arguments, timeout=300)
    fields, _ = fields_and_rest(arguments)
    tiny_run.train(tmp_path / "one", loading.load(loading.find("grpo:smoke"), fields))
    close(tiny_run.metrics(tmp_path / "two"), tiny_run.metrics(tmp_path / "one"))
    assert tiny_run.samples(tmp_path / "two") == tiny_run.samples(tmp_path / "one")


def test_a_pair_that_does_not_run_the_same_is_refused(folder, tmp_path):
    """Both end, and nothing is written."""
    commands = [small(folder, tmp_path / "run", **{"optimizer.learning_rate": rate}) for rate in (1e-3, 1e-2)]
    job = several.ended(tmp_path / "job", 2, *commands, code=2, timeout=120)
    message = (
        "the processes do not run the same: config.optimizer.learning_rate is 0.001 in process 0, 0.01 in process 1"
    )
    for index in range(2):
        (said,) = [line for line in job.printed(index).splitlines() if line.startswith("error")]
        assert said == f"error: {message}; start all of them alike"
    assert not (tmp_path / "run").exists()


def test_a_pair_with_two_dirs_is_refused(folder, tmp_path):
    commands = [small(folder, tmp_path / name) for name in ("here", "there")]
    job = several.ended(tmp_path / "job", 2, *commands, code=1, timeout=120)
    assert "here is not one folder of all processes" in job.printed(0)
    assert "there is not one folder of all processes" in job.printed(1)


def test_a_pair_with_two_dirs_goes_on_from_its_nearer_checkpoint(folder, tmp_path):
    """Each process saves to its own disk what its devices hold, here one of two copies; the newest that both have."""
    changes = {"steps": 4, "mesh.shape": "(2,-1,1,1)", "checkpoint.every": 2, "checkpoint.keep": 2}
    changes |= {"checkpoint.local_every": 3, "processes.heartbeat_timeout_s": 10}
    dirs = here, there = tmp_path / "here", tmp_path / "there"
    commands = [[*small(folder, each, **changes), f"--checkpoints={tmp_path / 'far'}"] for each in dirs]
    several.ended(tmp_path / "job", 2, *commands, timeout=300)
    straight = tiny_run.metrics(here), final_digests(tmp_path / "far")
    for step, lost in (3, None), (2, there / "local"):
        shutil.rmtree(tmp_path / "far" / "checkpoints" / "4")
        (here / "result.json").unlink()
        if lost:
            shutil.rmtree(lost)
        job = several.ended(tmp_path / "again", 2, *commands, timeout=300)
        assert f"resumed from step {step}" in job.printed(0)
        assert not re.search("damaged|primary_host", job.printed(0))
        assert (tiny_run.metrics(here), final_digests(tmp_path / "far")) == straight


def test_a_pair_saves_to_a_bucket(folder, tmp_path, monkeypatch):
    """Its checkpoints, the reference of its KL term and the files of its DIR; one process evaluates what is there, and
    a pair on other machines goes on from it, bit for bit."""
    pytest.importorskip("gcsfs")
    changes = {"objective.kl_coef": 0.1, "processes.heartbeat_timeout_s": 10}
    with fake_bucket() as (environment, objects):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)

        def commands(here, **more):
            dirs = tmp_path / here, tmp_path / f"{here}, process 1"
            return [[*small(folder, each, **changes, **more), "--checkpoints=gs://bucket/run"] for each in dirs]

        several.ended(tmp_path / "job 1", 2, *commands("first"), timeout=300)
        assert {"checkpoints/2", "reference"} <= {re.findall(r"run/(checkpoints/\d+|\w+)", name)[0] for name in objects}
        where = [f"--workdir={tmp_path / 'elsewhere'}", "--checkpoints=gs://bucket/run"]
        several.ended(tmp_path / "evaluated", 1, ["-m", "jaxrl_llm.evaluation", *where], timeout=300)
        (tmp_path / "first").rename(tmp_path / "lost")  # its machine is gone; while it is there, the PLACE is its own
        job = several.ended(tmp_path / "job 2", 2, *commands("second", steps=3), timeout=300)
        assert "resumed from step 2" in job.printed(0)
        (tmp_path / "second").rename(tmp_path / "resumed")
        again = [[*command, "--restart"] for command in commands("whole", steps=3)]
        several.ended(tmp_path / "job 3", 2, *again, timeout=300)
    assert tiny_run.metrics(tmp_path / "resumed") == tiny_run.metrics(tmp_path / "whole")


def test_a_pair_ends_early_and_keeps_its_best_in_a_bucket(folder, tmp_path, monkeypatch):
    """Fresh parameters answer nothing right at any step: the first is the best, and two more end the run."""
    pytest.importorskip("gcsfs")
    changes = {"steps": 9, "evaluation.every": 1, "checkpoint.every": 1, "checkpoint.keep": 1}
    changes |= {"checkpoint.best": "eval/greedy", "checkpoint.early_stopping_patience": 2}
    with fake_bucket() as (environment, objects):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        dirs = tmp_path / "here", tmp_path / "there"
        commands = [[*small(folder, each, **changes), "--checkpoints=gs://bucket/run"] for each in dirs]
        job = several.ended(tmp_path / "job", 2, *commands, timeout=300)
        assert "ended early: eval/greedy has not been better than 0 at step 1 for 2 evaluations" in job.printed(0)
        assert {name.split("/")[2] for name in objects if name.startswith("run/checkpoints/")} == {"1", "3"}
        rows = tiny_run.metrics(dirs[0])
        (dirs[0] / "result.json").unlink()  # as where a kill came before it
        job = several.ended(tmp_path / "again", 2, *commands, timeout=300)
        assert "resumed from step 3" in job.printed(0)
        assert tiny_run.metrics(dirs[0]) == rows
        where = [f"--workdir={tmp_path / 'elsewhere'}", "--checkpoints=gs://bucket/run", "--step=best"]
        job = several.ended(tmp_path / "best", 1, ["-m", "jaxrl_llm.evaluation", *where], timeout=300)
        assert "prompts, step 1" in job.printed(0)


def final_digests(place):
    return saved_payload(place, 4)["digests"]


@long
@pytest.mark.parametrize("count", [2, 4])
def test_they_train_as_one(whole, count):
    """Same mesh of four devices, warm start included. The samples are those of one process."""
    one, several_ = whole(1), whole(count)
    rows = tiny_run.metrics(one)
    assert max(row.get("rollout/groups_generated", 0) for row in rows) > rows[1]["rollout/groups_kept"]
    close(tiny_run.metrics(several_), rows)
    assert tiny_run.samples(several_) == tiny_run.samples(one)
    recorded = json.loads((several_ / "config.json").read_text())
    assert recorded["devices"] == several.DEVICES


@long
def test_they_sample_on_a_mesh_of_their_own(whole, folder, tmp_path):
    """Two processes: the parameters, and then the rows, go from one to the other and change no answer."""
    changes = {"rollout.mesh_shape": "(1,1,1,-1)", "warm_start.cache_dir": folder / "cache2"}
    expected = whole(2)
    several.ended(tmp_path / "job", 2, command(folder, tmp_path / "run", 2, **changes))
    rows = tiny_run.metrics(tmp_path / "run")
    moved = [row.pop("rollout/parameters_moved_bytes", 0) for row in rows]
    assert min(moved[1:]) > 0
    close(rows, tiny_run.metrics(expected))
    assert tiny_run.samples(tmp_path / "run") == tiny_run.samples(expected)


@long
@pytest.mark.parametrize("count", [1, 4])
def test_a_checkpoint_of_two_is_restored_by_another_count(whole, folder, tmp_path, count):
    """The state after an earlier step, to the end of the run."""
    shutil.copytree(whole(2), tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / str(STEPS))
    (tmp_path / "run" / "result.json").unlink()
    changes = {"warm_start.cache_dir": folder / "cache2"}  # a field of the run that is resumed
    job = several.ended(tmp_path / "job", count, command(folder, tmp_path / "run", count, **changes))
    assert re.search("resumed from step [2-5]", job.printed(0))  # a checkpoint waits for the one before
    close(tiny_run.metrics(tmp_path / "run"), tiny_run.metrics(whole(2)))


@long
@pytest.mark.parametrize(("name", "victim"), [("KILL", 1), ("STOP", 1), ("KILL", 0), ("STOP", 0)])
def test_one_is_lost_and_the_others_end(whole, folder, tmp_path, name, victim):
    """Within seconds, with a message; the same commands then end as the run that nothing disturbed, bit for bit."""
    expected, workdir = whole(2), tmp_path / "run"
    with several.start(tmp_path / "job", 2, command(folder, workdir, 2)) as job:
        job.wait_for("step 3/")
        job.members[victim].send_signal(getattr(signal, f"SIG{name}"))
        began = time.monotonic()
        (code,) = job.codes(2 * _LOST, of=[1 - victim])
        assert time.monotonic() - began < _LOST
    said = job.printed(1 - victim)
    assert (code == 1 and "error: process" in said) or (code == -6 and "detected fatal errors" in said), (code, said)
    again = several.ended(tmp_path / "again", 2, command(folder, workdir, 2))
    assert "resumed from step 2" in again.printed(0)
    assert tiny_run.metrics(workdir) == tiny_run.metrics(expected)
    assert tiny_run.samples(workdir) == tiny_run.samples(expected)


@long
def test_a_signal_to_one_stops_all_after_the_same_step(folder, whole, tmp_path):
    expected, workdir = whole(2), tmp_path / "run"
    with several.start(tmp_path / "job", 2, command(folder, workdir, 2)) as job:
        job.wait_for("step 1/")
        job.members[1].send_signal(signal.SIGTERM)
        assert job.codes() == [143, 143], job.printed(0) + job.printed(1)
    last = read_rows(workdir / "metrics.jsonl")[-1]["step"]
    assert f"stopped after step {last}, saved in {workdir}; to go on" in job.printed(1)
    again = several.ended(tmp_path / "again", 2, command(folder, workdir, 2))
    assert f"resumed from step {last}" in again.printed(0)
    assert tiny_run.metrics(workdir) == tiny_run.metrics(expected)


def test_signals_and_notice_save_the_same_step_and_the_start_ends_at_once(folder, tmp_path):
    """Of a small run that goes on twice; notice is a SIGTERM that process 1 leaves to JAX's service, which keeps it."""
    changes = {"steps": 1000, "evaluation.every": 1000, "checkpoint.every": 1000}
    arguments = small(folder, tmp_path / "run", **changes)[2:]
    heard = "import signal\nsignal.signal(signal.SIGHUP, signal.SIG_DFL)"  # under nohup it is ignored
    run = "\nfrom jaxrl_llm.main import main\nraise SystemExit(main())"
    own, noticed = (["-c", first + run, *arguments] for first in (heard, several.SIGTERM_IS_JAXS))
    with several.start(tmp_path / "start", 2, own) as job:
        job.wait_for("compiling")
        job.members[1].send_signal(signal.SIGTERM)
        assert job.codes(_LOST, of=[1]) == [143]
        assert job.printed(1).splitlines()[-1] == "stopped by SIGTERM"
    last = 0
    for number, of_1 in ((signal.SIGHUP, own), (signal.SIGINT, own), (signal.SIGTERM, noticed)):
        with several.start(tmp_path / number.name, 2, own, of_1) as job:
            job.wait_for("compiling" if of_1 is noticed else f"step {last + 1}/", timeout=120)
            job.members[1].send_signal(number)
            assert job.codes(60) == [128 + number] * 2, job.printed(0) + job.printed(1)
        assert not last or f"resumed from step {last}\n" in job.printed(0)
        last = read_rows(tmp_path / "run" / "metrics.jsonl")[-1]["step"]
        assert all(
            f"stopped after step {last}, saved in {tmp_path / 'run'}; to go on" in job.printed(i) for i in range(2)
        )


def test_a_check_of_several_processes_is_one_table(folder):
    changes = {"mesh.shape": "(1,-1,1,1)", "warm_start.steps": 0, "task.verify_truncated": True}
    fields = [f"--config.{name}={value}" for name, value in (changes | {"task.data_dir": folder / "data"}).items()]
    job = several.ended(folder / "check", 2, ["-m", "jaxrl_llm.check", "--config=grpo:smoke", *fields])
    assert "0 to stop for" in job.printed(0)
    assert "checked  " not in job.printed(1)
