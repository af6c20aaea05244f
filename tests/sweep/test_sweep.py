"""Sweeps: combinators, plans, and what happens to runs that finish, crash, are killed or belong to another sweep."""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import psutil
import pytest

from jaxrl_llm.records import checkout
from jaxrl_llm.records.run_log import read_json, read_rows
from jaxrl_llm.report.write import write_report
from jaxrl_llm.sweep import Sweep, chain, each, launch, product, zipped
from jaxrl_llm.sweep.__main__ import load_sweep, main
from jaxrl_llm.sweep.launch import core_slots
from jaxrl_llm.sweep.planned import command
from tests.reference import tiny_run
from tests.reference.small_sweeps import starts, sweep_command, sweep_file, whole
from tests.reference.waiting import until

with contextlib.suppress(ImportError):
    import submitit  # noqa: F401 (now, since its import closes the log handlers that pytest gives to a running test)

REFERENCE = Path(__file__).parents[1] / "reference"
sys.path.append(str(REFERENCE))
from fake_program import PROGRAM  # noqa: E402 (found through the line above)

REAL = """
from jaxrl_llm.sweep import Sweep, each, product

def get_sweep():
    arms = [{{"arm": "GRPO", "config": "configs/grpo.py:smoke"}}, {{"arm": "GSPO", "config": "configs/gspo.py:smoke"}}]
    folders = {{"task.data_dir": "{folder}/data", "warm_start.cache_dir": "{folder}/cache"}}
    runs = product(arms, [folders | {{"steps": {steps}, "checkpoint.every": 1}}], each("seed", [0]))
    return Sweep("Does it go on?", runs, baseline="GRPO")
"""


@pytest.fixture
def environment(monkeypatch):
    paths = os.pathsep.join([str(REFERENCE), str(REFERENCE.parents[2])])
    monkeypatch.setenv("PYTHONPATH", paths)
    monkeypatch.setenv("PYTHONWARNINGS", "error")


def test_combinators():
    arms = chain([{"arm": "A"}], each("arm", ["B", "C"]))
    assert arms == [{"arm": "A"}, {"arm": "B"}, {"arm": "C"}]
    runs = product(arms[:2], each("seed", range(2)))
    assert [(run["arm"], run["seed"]) for run in runs] == [("A", 0), ("A", 1), ("B", 0), ("B", 1)]
    assert zipped(each("a.b", [1, 2]), each("c", "xy")) == [{"a.b": 1, "c": "x"}, {"a.b": 2, "c": "y"}]
    assert product() == [{}]
    assert product(arms, []) == []


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: product(each("a", [1]), each("a", [2])), "field 'a' is set by two parts"),
        (lambda: zipped(each("a", [1]), each("b", [1, 2])), r"lengths \[1, 2\]"),
        (lambda: Sweep("?", [{"arm": "A"}], baseline="A"), "no 'seed'"),
        (lambda: Sweep("?", [{"arm": "A", "seed": 0}], baseline="B"), "baseline='B' is none of the arms"),
        (lambda: Sweep("?", [{"arm": "A", "seed": 0}] * 2, baseline="A"), "share the labels of 'A/0'"),
        (lambda: Sweep("?", [], baseline="B", minutes=float("nan")), "minutes=nan is not a number"),
        (lambda: Sweep("?", [], baseline="B", minutes=-1), "minutes=-1 is out of range"),
        (lambda: core_slots(0, 1), "cores=0"),
        (lambda: core_slots(10_000, 1), "cores=10000 is not between 1 and"),
        (lambda: core_slots(1, 2), "cores_per_run=2"),
    ],
)
def test_mistakes_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_plan_runs_whole_pairs_first_and_names_folders(monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    arms = [{"arm": "GRPO + R2", "replay.mode": "R2"}, {"arm": "GSPO", "config": "configs/gspo.py:smoke"}]
    runs = product(arms, [{"condition": "N = 8", "updates.minibatches": 8}], each("seed", [3, 1]))
    planned = Sweep("?", runs, baseline="GSPO", keep_checkpoints=2).planned()
    assert [run.folder for run in planned] == ["N_=_8/GRPO_+_R2/3", "N_=_8/GSPO/3", "N_=_8/GRPO_+_R2/1", "N_=_8/GSPO/1"]
    line = command(planned[0], "my runs")
    here = Path.cwd()
    assert shlex.split(line) == [
        *(sys.executable, "-m", "jaxrl_llm.main", f"--config={here}/configs/base.py"),
        f"--workdir={here}/my runs/N_=_8/GRPO_+_R2/3",
        *("--config.replay.mode=R2", "--config.updates.minibatches=8", "--config.seed=3", "--config.checkpoint.keep=2"),
    ]
    assert f"--config={here}/configs/gspo.py:smoke" in command(planned[1], "d")


def test_a_sweep_runs_skips_and_goes_on(tmp_path, environment, capsys):
    name, workdir = f"{sweep_file(tmp_path, seeds=1)}:really", tmp_path / "out"
    arguments = ["--sweep", name, "--workdir", str(workdir)]
    assert main(arguments, PROGRAM) == 0
    out = capsys.readouterr().out
    assert "Is really B better?\n2 runs, 0 finished, 2 to do" in out
    assert all(whole(workdir, f"{arm}/0") for arm in "AB")
    plan = read_json(workdir / "sweep.json")
    assert [run["folder"] for run in plan["runs"]] == ["A/0", "B/0"]
    assert (plan["question"], plan["baseline"]) == ("Is really B better?", "A")
    assert len((workdir / "commands.txt").read_text().splitlines()) == 2
    records = [read_rows(path)[0] for path in workdir.rglob("starts.txt")]
    assert {record["threads"] for record in records} == {"1"}
    assert {len(record["cores"]) for record in records} <= {0, 1}
    # Again, with one more seed and a run that had lost its mark of completion.
    (workdir / "A/0/result.json").unlink()
    sweep_file(tmp_path, seeds=2)
    assert main(arguments, PROGRAM) == 0
    assert "4 runs, 1 finished, 3 to do" in capsys.readouterr().out
    assert starts(workdir) == {"A/0": 2, "B/0": 1, "A/1": 1, "B/1": 1}
    # A part again: the plan keeps what the whole has begun.
    sweep_file(tmp_path, seeds=1)
    assert main(arguments, PROGRAM) == 0
    assert {run["folder"] for run in read_json(workdir / "sweep.json")["runs"]} == starts(workdir).keys()


def test_a_checkout_with_changes_is_flagged_and_its_changes_are_kept(tmp_path, monkeypatch, capsys):
    """A clean one leaves nothing; of a changed one `git apply` on the commit gives the file back, to its last blank."""
    source, workdir = tmp_path / "code" / "checkout.py", tmp_path / "out"
    source.parent.mkdir()
    source.write_text("one\n\n")
    git = partial(subprocess.run, cwd=source.parent, check=True, capture_output=True)
    git(["git", "init"])
    git(["git", "add", "."])
    git(["git", "-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-m", "first"])
    monkeypatch.setattr(checkout, "__file__", str(source))
    arguments = ["--sweep", str(sweep_file(tmp_path)), "--workdir", str(workdir), "--launcher", "none"]
    assert main(arguments, PROGRAM) == 0
    assert "warning" not in capsys.readouterr().out
    assert not checkout.commit().endswith("+")
    assert not list(workdir.glob("*.diff"))
    source.write_text("two\n\n")
    assert main(arguments, PROGRAM) == main(arguments, PROGRAM) == 0
    (kept,) = workdir.glob("changes-*.diff")
    said = capsys.readouterr().out
    assert f"differs from commit {checkout.commit()[:7]} in checkout.py; {kept} has the difference" in said
    assert checkout.commit().endswith("+")
    git(["git", "checkout", "."])
    git(["git", "apply", str(kept)])
    assert source.read_text() == "two\n\n"


def test_the_first_run_is_alone_until_its_first_update(tmp_path, environment):
    if len(core_slots(None, 1)) < 2:
        pytest.skip("one usable core: runs are never parallel here")
    # A waits in its second update until B has started, so A ends only if the two share the machine.
    path = sweep_file(tmp_path, first=f', "wait.at": 2, "wait.for": "{tmp_path}/out/B/0/starts.txt"')
    arguments = ["--sweep", str(path), "--workdir", str(tmp_path / "out"), "--cores", "2"]
    assert main(arguments, PROGRAM) == 0
    times = {
        folder: [row["time/at"] for row in read_rows(tmp_path / "out" / folder / "metrics.jsonl")]
        for folder in ("A/0", "B/0")
    }
    assert times["B/0"][0] > times["A/0"][1]  # step 1 is the first update


def test_a_crash_stays_alone_and_is_reported_and_tried_again(tmp_path, environment, capsys):
    """Runs share a process until one fails. The second time the two that failed are tried side by side."""
    workdir = tmp_path / "out"
    arguments = ["--sweep", str(sweep_file(tmp_path, extra=', "crash.at": 2')), "--workdir", str(workdir)]
    assert main([*arguments, "--cores", "1"], PROGRAM) == 1
    out = capsys.readouterr().out
    assert "B, seed 1 failed" in out
    assert "RuntimeError: told to crash at step 2" in out
    assert "2 runs finished, 0 diverged, 2 failed" in out
    assert all(whole(workdir, run) for run in ("A/0", "A/1"))
    failure = read_json(workdir / "B/0/failed.json")
    assert failure == {"exit_code": 1, "last_line": "RuntimeError: told to crash at step 2"}
    processes = [read_rows(workdir / run / "starts.txt")[0]["process"] for run in ("A/0", "B/0", "A/1", "B/1")]
    assert processes[0] == processes[1] != processes[2] == processes[3]
    assert {log.read_text().count("step 1/4") for log in workdir.rglob("process.log")} == {1}  # its own output
    assert main(arguments, PROGRAM) == 1
    assert starts(workdir) == {"A/0": 1, "A/1": 1, "B/0": 2, "B/1": 2}


def test_a_run_that_diverged_has_ended_and_is_a_result(tmp_path, environment, capsys):
    path = sweep_file(tmp_path, extra=', "diverge.at": 2', seeds=1)
    arguments = ["--sweep", str(path), "--workdir", str(tmp_path / "out")]
    assert main(arguments, PROGRAM) == 0
    assert "1 runs finished, 1 diverged, 0 failed" in capsys.readouterr().out
    assert main(arguments, PROGRAM) == 0
    assert "2 runs, 2 finished, 0 to do" in capsys.readouterr().out


def test_a_dir_of_another_configuration_is_refused_before_anything_runs(tmp_path, environment, capsys):
    workdir = tmp_path / "out"
    assert main(["--sweep", str(sweep_file(tmp_path, seeds=1)), "--workdir", str(workdir)], PROGRAM) == 0
    changed = sweep_file(tmp_path, extra=', "objective.tau": 2', seeds=1)
    assert main(["--sweep", str(changed), "--workdir", str(workdir)], PROGRAM) == 2
    error = capsys.readouterr().err
    assert "B/0 holds a run of another configuration (config_hash" in error
    assert "give another --workdir" in error
    (workdir / "A/0/config.json").write_text("{")
    assert main(["--sweep", str(changed), "--workdir", str(workdir)], PROGRAM) == 2
    assert "A/0/config.json is not valid JSON" in capsys.readouterr().err
    assert set(starts(workdir).values()) == {1}


@pytest.mark.slow
def test_more_steps_go_on_from_finished_runs(tmp_path, environment):
    path, workdir = sweep_file(tmp_path, seeds=1), tmp_path / "out"
    assert main(["--sweep", str(path), "--workdir", str(workdir)], PROGRAM) == 0
    path.write_text(path.read_text().replace('"steps": 4', '"steps": 6'))
    assert main(["--sweep", str(path), "--workdir", str(workdir)], PROGRAM) == 0
    assert whole(workdir, "A/0", steps=6)
    assert starts(workdir) == {"A/0": 2, "B/0": 2}


def test_a_bad_configuration_is_refused_before_anything_runs(tmp_path, environment, capsys):
    path = sweep_file(tmp_path, extra=', "broken": 1')
    assert main(["--sweep", str(path), "--workdir", str(tmp_path / "out")], PROGRAM) == 2
    assert "the configuration of B, seed 0 is refused: broken=1 is refused" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "sign", [signal.SIGHUP, *(pytest.param(one, marks=pytest.mark.slow) for one in (signal.SIGINT, signal.SIGTERM))]
)
def test_an_interrupted_sweep_goes_on_with_nothing_lost_or_twice(tmp_path, environment, sign):
    go, workdir = tmp_path / "go", tmp_path / "out"
    path = sweep_file(tmp_path, extra=f', "wait.at": 1, "wait.for": "{go}"', seeds=1)
    # A shell in the background ignores SIGINT, and nohup SIGHUP; so would the child.
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    inherited = {number: signal.signal(number, handler) for number, handler in usual.items()}
    process = subprocess.Popen(
        sweep_command(path, workdir), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    for number, handler in inherited.items():
        signal.signal(number, handler)
    until(lambda: (workdir / "A/0/result.json").exists() and read_rows(workdir / "B/0/metrics.jsonl"))
    process.send_signal(sign)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 130, out
    assert "the same command goes on from here" in out
    assert not list(workdir.rglob("failed.json"))  # stopped is not failed
    go.touch()
    (workdir / "B/0/failed.json").write_text("{}")  # as of a run that failed before
    assert main(["--sweep", str(path), "--workdir", str(workdir)], PROGRAM) == 0
    assert all(whole(workdir, f"{arm}/0") for arm in "AB")
    assert starts(workdir) == {"A/0": 1, "B/0": 2}
    assert not list(workdir.rglob("failed.json"))


@pytest.mark.slow
def test_a_second_signal_ends_a_sweep_and_its_runs_at_once(tmp_path, environment):
    """The run is in a step that lasts for ever, and would save its state after it."""
    workdir = tmp_path / "out"
    path = sweep_file(tmp_path, first=', "wait.at": 2, "wait.for": "never", "wait.stubborn": 1', seeds=1)
    with psutil.Popen(sweep_command(path, workdir), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as sweep:
        until((workdir / "A/0/waits").exists)
        runs = sweep.children(recursive=True)
        sweep.send_signal(signal.SIGTERM)
        assert sweep.stderr.readline() == "stopping the runs once they have saved; again ends them now\n"
        assert {*psutil.wait_procs(runs, 0.5)[1]} == {*runs}
        sweep.send_signal(signal.SIGTERM)
        assert sweep.wait(60) == 143
        assert sweep.stderr.read() == "stopped by SIGTERM\n"
        assert psutil.wait_procs(runs, 60)[1] == []


@pytest.mark.slow
def test_a_sweep_killed_outright_leaves_its_runs_the_lock(tmp_path, environment):
    go, workdir = tmp_path / "go", tmp_path / "out"
    path = sweep_file(tmp_path, first=f', "wait.at": 2, "wait.for": "{go}"', seeds=1)
    process = subprocess.Popen(sweep_command(path, workdir), stdout=subprocess.DEVNULL)
    until(lambda: (workdir / "A/0/starts.txt").exists())
    process.kill()
    process.wait()
    again = partial(subprocess.run, sweep_command(path, workdir), capture_output=True, text=True)
    refused = again()
    assert refused.returncode == 2
    assert "is in use by another sweep or by runs it left" in refused.stderr
    go.touch()
    until(lambda: again().returncode == 0)
    assert starts(workdir) == {"A/0": 1, "B/0": 1}


@pytest.mark.slow
def test_a_sweep_of_the_trainer_killed_with_its_runs_goes_on_as_if_nothing_had_been(tmp_path, monkeypatch):
    """One run after the other: the first has finished and the second has logged three updates when all are killed."""
    monkeypatch.chdir(REFERENCE.parents[2])
    steps, workdir, unbroken = 10, tmp_path / "killed", tmp_path / "unbroken"
    path = tmp_path / "sweep.py"
    path.write_text(REAL.format(folder=tmp_path, steps=steps))
    line = [sys.executable, "-m", "jaxrl_llm.sweep", "--sweep", str(path), "--cores", "1", "--workdir"]
    subprocess.run([*line, str(unbroken)], check=True, stdout=subprocess.DEVNULL)

    sweep = psutil.Popen([*line, str(workdir)], stdout=subprocess.DEVNULL)
    until(lambda: len(read_rows(workdir / "GSPO/0/metrics.jsonl")) > 3, seconds=300)
    killed = [sweep, *sweep.children(recursive=True)]
    for process in killed:  # the sweep first: it must not see its run fail
        process.kill()
    psutil.wait_procs(killed, timeout=60)
    assert len(killed) == 2
    logged = read_rows(workdir / "GSPO/0/metrics.jsonl")[-1]["step"]
    assert logged < steps
    assert not list(workdir.rglob("failed.json"))
    assert f"1 of 2 runs finished.\n  GSPO, seed 0: stopped after step {logged}\n" in write_report(workdir)

    first = workdir / "GRPO/0/result.json"
    finished_at = first.stat().st_mtime_ns
    again = subprocess.run([*line, str(workdir)], check=True, capture_output=True, text=True)
    assert "2 runs, 1 finished, 1 to do" in again.stdout
    assert first.stat().st_mtime_ns == finished_at
    assert (workdir / "GSPO/0/result.json").exists()
    _, second = (workdir / "GSPO/0/process.log").read_text().split("resumed from step ")
    resumed = int(second.splitlines()[0])
    assert 0 < resumed <= logged  # the row of a step is there before its checkpoint, which a busy disk delays
    assert [int(step) for step in re.findall(r"^step (\d+)/", second, re.MULTILINE)] == [*range(resumed + 1, steps + 1)]
    for run in ("GRPO/0", "GSPO/0"):
        assert whole(workdir, run, steps)
        assert tiny_run.metrics(workdir / run) == tiny_run.metrics(unbroken / run)
        assert tiny_run.samples(workdir / run) == tiny_run.samples(unbroken / run)


def test_launcher_none_only_writes_the_commands(tmp_path, environment):
    arguments = ["--sweep", str(sweep_file(tmp_path)), "--workdir", str(tmp_path / "out"), "--launcher", "none"]
    assert main(arguments, PROGRAM) == 0
    assert starts(tmp_path / "out") == {}
    first = (tmp_path / "out/commands.txt").read_text().splitlines()[0]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-c", first], check=True, env=environment, stdout=subprocess.DEVNULL)
    assert whole(tmp_path / "out", "A/0")


@pytest.mark.slow
def test_submitit_gets_one_job_a_run(tmp_path, environment, monkeypatch):
    pytest.importorskip("submitit", reason="the launcher is an extra, jaxrl_llm[cluster]")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONWARNINGS", "default")  # submitit's own
    jobs, submit = [], launch.submit
    monkeypatch.setattr(launch, "submit", lambda *args, **kwargs: jobs.extend(submit(*args, **kwargs)) or jobs)
    arguments = ["--sweep", str(sweep_file(tmp_path, seeds=1)), "--workdir", str(tmp_path / "out")]
    assert main([*arguments, "--launcher", "submitit", "--cluster", "local"], PROGRAM) == 0
    assert len([job.result() for job in jobs]) == 2
    until(
        lambda: all(job._process.poll() is not None for job in jobs)
    )  # a result is there before its process has ended
    assert whole(tmp_path / "out", "A/0")
    assert whole(tmp_path / "out", "B/0")


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ([], "finds no scheduler"),
        (["--cluster", "slurm"], "no --cluster=slurm"),
        (["--cluster", "x"], "--cluster=x on"),
    ],
)
def test_submitit_without_a_scheduler_is_refused(cluster, message, tmp_path, monkeypatch, capsys):
    """Submitit itself would start all runs at once on this machine."""
    pytest.importorskip("submitit", reason="the launcher is an extra, jaxrl_llm[cluster]")
    monkeypatch.setenv("PATH", str(tmp_path))
    arguments = ["--sweep", str(sweep_file(tmp_path)), "--workdir", str(tmp_path / "out"), "--launcher", "submitit"]
    assert main([*arguments, *cluster], PROGRAM) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert (said.out, said.err.count("\n"), (tmp_path / "out").exists()) == ("", 1, False)
    (tmp_path / "srun").touch(mode=0o755)
    launch.check_scheduler(None)


def test_a_missing_file_is_named(tmp_path, capsys):
    assert main(["--sweep", str(tmp_path / "no.py"), "--workdir", str(tmp_path)], PROGRAM) == 2
    assert "no.py does not exist" in capsys.readouterr().err
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(ValueError, match="defines no get_sweep"):
        load_sweep(str(tmp_path / "empty.py"))


def test_the_plan_is_plain_data(tmp_path, environment):
    assert main(["--sweep", str(sweep_file(tmp_path)), "--workdir", str(tmp_path), "--launcher", "none"], PROGRAM) == 0
    plan = json.loads((tmp_path / "sweep.json").read_text())
    assert plan["runs"][1]["fields"] == {"objective": "b", "steps": 4, "seed": 0, "checkpoint.keep": 1}
