"""A run's DIR: rows, null for what is not finite, cutting back to a checkpoint, progress, and clear refusals."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from jaxrl_llm.records import run_log
from jaxrl_llm.records.run_log import RunLog, read_json, read_rows


def events(workdir):
    """(tag, step) of every scalar in the event files, read with our own loop over the record format.

    A session that starts at a step drops the later events of files before it, as TensorBoard's reader does.
    """
    found = []
    for path in sorted(workdir.glob("events.out.*")):
        content, start = path.read_bytes(), 0
        while start + 12 < len(content):  # a kill leaves a half-written end
            length = int.from_bytes(content[start : start + 8], "little")
            event = event_pb2.Event.FromString(content[start + 12 : start + 12 + length])
            if event.HasField("session_log"):
                found = [(tag, step) for tag, step in found if step < event.step]
            found += [(value.tag.removesuffix("/text_summary"), event.step) for value in event.summary.value]
            start += length + 16
    return sorted(found)


def write(workdir, steps, stream=None, after=None):
    with RunLog(workdir, total_steps=10, stream=stream or io.StringIO()) as log:
        if after is not None:
            log.cut(after)
        for step in steps:
            log.metrics(step, {"reward/mean": step / 10})
            log.samples(step, [{"prompt": "21=", "answer": "12", "reward": 1.0}])


def test_a_number_is_logged_with_every_digit(tmp_path):
    """As Python writes it shortest; a float32 as the float64 that it equals."""
    values = {"rate": 1e-7 / 3, "loss": np.float32(1 / 3), "by_layer": np.array([1e-9, 0.1]), "updates": 2**53 + 1}
    with RunLog(tmp_path, 1, stream=io.StringIO()) as log:
        log.metrics(1, values)
    (row,) = read_rows(tmp_path / "metrics.jsonl")
    assert row == {
        "step": 1,
        "rate": 1e-7 / 3,
        "loss": float(values["loss"]),
        "by_layer": [1e-9, 0.1],
        "updates": 2**53 + 1,
    }


def test_rows_hold_numbers_lists_and_null(tmp_path):
    with RunLog(tmp_path, total_steps=3, stream=io.StringIO()) as log:
        log.metrics(1, {"a": np.float32(0.5), "b": float("nan"), "c": np.array([[1.0, np.inf], [2.0, 3.0]]), "n": 7})
    assert (tmp_path / "metrics.jsonl").read_text() == (
        '{"step": 1, "a": 0.5, "b": null, "c": [[1.0, null], [2.0, 3.0]], "n": 7}\n'
    )
    assert events(tmp_path) == [("a", 1), ("n", 1)]  # scalars that exist; lists of lists stay in metrics.jsonl


def test_tensorboard_has_layers_samples_and_the_configuration(tmp_path):
    with RunLog(tmp_path, total_steps=3, stream=io.StringIO()) as log:
        log.write_config({"config": {"seed": 1}})
        assert not list(tmp_path.glob("events.out.*"))  # nothing to show yet
        log.metrics(1, {"load_by_layer": [1.0, 2.0, None]})
        log.samples(1, [{"prompt": "1=", "answer": "1"}, {"prompt": "2=", "greedy": "2", "split": "test"}])
    logged = [("config", 0), ("load_by_layer/0", 1), ("load_by_layer/1", 1), ("samples/test", 1), ("samples/train", 1)]
    assert events(tmp_path) == logged
    (path,) = tmp_path.glob("events.out.*")
    assert b'"seed": 1' in path.read_bytes()
    assert b'"prompt": "1="' in path.read_bytes()


def test_two_held_out_answers_stand_below_the_row_of_their_evaluation(tmp_path):
    """Its row is written a step later; answers of training are not shown."""
    stream = io.StringIO()
    asked = [{"prompt": f"{n}\\n=", "greedy": "x" * 60, "reward": n / 2, "split": "test"} for n in range(3)]
    with RunLog(tmp_path, total_steps=3, stream=stream) as log:
        log.samples(1, asked)
        log.samples(1, [{"prompt": "1=", "answer": "1", "reward": 1.0}])
        log.metrics(1, {"eval/greedy": 0.5})
        log.metrics(2, {"reward/mean": 0.5})
    first, *answers, last = stream.getvalue().splitlines()
    assert first == "step 1/3  held-out 0.500"
    assert last.startswith("step 2/3  reward 0.500")
    assert answers == [
        rf"  0\n= -> {'x' * 12} ... {'x' * 12}   reward 0",
        rf"  1\n= -> {'x' * 11} ... {'x' * 11}   reward 0.5",
    ]


def test_config_and_result_are_whole_files(tmp_path):
    with RunLog(tmp_path, total_steps=3) as log:
        log.write_config({"config": {"update": {"epochs": 2}}, "config_hash": "ab12"})
        assert read_json(tmp_path / "result.json") is None
        log.result({"steps": 3})
    assert read_json(tmp_path / "config.json") == {"config": {"update": {"epochs": 2}}, "config_hash": "ab12"}
    assert read_json(tmp_path / "result.json") == {"steps": 3}
    assert not list(tmp_path.glob("*.part"))


def test_cut_and_resume_equals_a_straight_run(tmp_path):
    write(tmp_path / "straight", [0, 1, 2, 3, 4, 5])
    killed = tmp_path / "killed"
    write(killed, [0, 1, 2, 3, 4])
    with open(killed / "metrics.jsonl", "a") as half:
        half.write('{"step": 5, "rewa')
    for path in killed.glob("events.out.*"):
        path.write_bytes(path.read_bytes() + b"\x40\x00\x00")
    write(killed, [3, 4, 5], after=2)  # the checkpoint of step 2 was the last one
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert (killed / name).read_bytes() == (tmp_path / "straight" / name).read_bytes()
    assert events(killed) == events(tmp_path / "straight")


def test_cut_then_write_in_one_session(tmp_path):
    write(tmp_path, [0, 1, 2])
    with RunLog(tmp_path, total_steps=10, stream=io.StringIO()) as log:
        log.result({})
        log.cut(-1)
        log.metrics(0, {"reward/mean": 0.25})
    assert read_rows(tmp_path / "metrics.jsonl") == [{"step": 0, "reward/mean": 0.25}]
    assert read_rows(tmp_path / "samples.jsonl") == []
    assert events(tmp_path) == [("reward/mean", 0)]
    assert read_json(tmp_path / "result.json") is None  # a run that was cut back is not finished


def test_readers_leave_out_the_half_written_line(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2')
    assert read_rows(tmp_path / "metrics.jsonl") == [{"step": 1}]
    assert read_rows(tmp_path / "missing.jsonl") == []


def test_damaged_and_lost_rows_are_named_set_aside_and_passed_over(tmp_path):
    write(tmp_path, range(6))
    path, said = tmp_path / "metrics.jsonl", io.StringIO()
    rows = path.read_bytes().splitlines(keepends=True)
    bad = [b"\xff\xfe\n", b"[3]\n", b'{"step": "4"}\n', b'{"step": 1}\n', b'{"step": 2, "a": "\\ud800"}\n']
    path.write_bytes(b"".join([*rows[:2], *bad, rows[5], b'{"step": 6, "re']))
    assert [row["step"] for row in read_rows(path)] == [0, 1, 5]
    assert [number for number, *_ in run_log.scan_rows(path)[1]] == [3, 4, 5, 6, 7]
    (tmp_path / "samples.jsonl").write_bytes(b"{}\n")
    with RunLog(tmp_path, total_steps=10, stream=said) as log:
        log.cut(5)
    assert f"{path}, line 3 and 4 more are damaged ('utf-8' codec" in said.getvalue()
    assert "samples.jsonl, line 1 is damaged (step=None is not a whole number); set aside in" in said.getvalue()
    assert f"{path} has lost the rows of steps 2 to 4; the run goes on without them" in said.getvalue()
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == b"".join(bad)
    assert path.read_bytes() == b"".join([*rows[:2], rows[5]])
    assert run_log.missing_steps([{"step": 0}, {"step": 3}], 0, 5) == "1 to 2, 4 to 5"
    assert run_log.missing_steps([], 1, 1) == "1"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is always full")
def test_a_full_disk_names_the_file_and_lets_the_lock_go(tmp_path, monkeypatch):
    """TensorBoard's own thread would die of it, and whoever flushes it would wait for ever."""
    monkeypatch.setattr(run_log, "refuse_links", lambda *folders: None)  # this link stands for a full disk
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"metrics\.jsonl cannot be written .*No space left.*make room there"):
        write(tmp_path, [0])
    (tmp_path / "metrics.jsonl").unlink()
    write(tmp_path, [0])
    (path,) = tmp_path.glob("events.out.*")
    with open("/dev/full", "wb", buffering=0) as full, RunLog(tmp_path, 10, stream=io.StringIO()) as log:
        log.metrics(1, {"a": 1.0})
        board = log._writers[0]._open_writer._py_recordio_writer
        board._writer.close()
        board._writer = full
        with pytest.raises(OSError, match=r"the log in .* cannot be written"):
            log.metrics(2, {"a": 1.0})
    assert path.exists()
    write(tmp_path, [3])


def test_an_interrupt_leaves_whole_rows_and_a_closed_log(tmp_path):
    def interrupted():
        with RunLog(tmp_path, total_steps=10, stream=io.StringIO()) as log:
            log.metrics(1, {"reward/mean": 0.1})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert read_rows(tmp_path / "metrics.jsonl") == [{"step": 1, "reward/mean": 0.1}]
    write(tmp_path, [2])  # the lock was let go


def test_a_dir_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"workdir=.*file/run cannot be written .*give another --workdir"):
        RunLog(tmp_path / "file" / "run", total_steps=1)


def test_two_processes_never_write_one_dir(tmp_path):
    with RunLog(tmp_path, total_steps=1):
        code = f"from jaxrl_llm.records.run_log import RunLog; RunLog({str(tmp_path)!r}, 1)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 1
    assert "is being written by another process" in done.stderr


def test_other_hosts_are_silent(tmp_path):
    stream = io.StringIO()
    with RunLog(tmp_path / "run", total_steps=1, stream=stream, write=False) as log:
        log.write_config({})
        log.metrics(0, {"a": 1.0})
        log.samples(0, [{}])
        log.cut(0)
        log.result({})
    assert not (tmp_path / "run").exists()
    assert stream.getvalue() == ""


def test_plain_knows_arrays_and_refuses_nothing():
    value = {"a": (np.int64(3), True, None, -0.0), 4: np.array(2.5), "p": run_log}
    out = run_log.plain(value)
    assert out["a"] == [3, True, None, 0.0]
    assert out["4"] == 2.5
    assert isinstance(out["p"], str)
    json.dumps(out, allow_nan=False)


@pytest.mark.slow
def test_weights_and_biases_gets_the_same_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for steps in ([0, 1], [2]):  # the second time is a resume
        with RunLog(tmp_path, total_steps=3, stream=io.StringIO(), wandb="tests") as log:
            log.write_config({"config": {"seed": 1}})
            log.cut(steps[0] - 1)
            for step in steps:
                log.metrics(step, {"reward/mean": 0.5, "load": [1.0, 2.0]})
                log.samples(step, [{"prompt": "1=", "answer": "1"}])
    files = sorted((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    identity = (tmp_path / "wandb_id").read_text()
    assert {path.stem for path in files} == {f"run-{identity}"}
    content = b"".join(path.read_bytes() for path in files)
    for word in (b"reward/mean", b"load/1", b"samples", b"seed"):
        assert word in content


def test_weights_and_biases_without_the_package_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ModuleNotFoundError, match=r"log.wandb='tests' needs the wandb package: pip install"):
        RunLog(tmp_path, total_steps=3, wandb="tests")


def test_weights_and_biases_without_a_login_is_one_line_and_lets_the_lock_go(tmp_path, monkeypatch):
    def refuse(**settings):
        raise RuntimeError("api_key not configured (no-tty)")

    fake = SimpleNamespace(init=refuse, Table=None, Settings=lambda **settings: None)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with pytest.raises(ValueError, match=r"log.wandb='tests' cannot start a run \(api_key .*log in with `wandb login`"):
        RunLog(tmp_path, total_steps=3, wandb="tests")
    write(tmp_path, [0])
