"""Checkpoints in another place than the DIR, which brings a lost DIR back; and a nearer tier, saved more often."""

import base64
import importlib.util
import os
import shutil
import socket
import threading
import time
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from jaxrl_llm.ground import processes
from jaxrl_llm.records import digests, places, recorded
from jaxrl_llm.records.checkpointing import Checkpoints, steps_of
from jaxrl_llm.records.run_log import RunLog
from jaxrl_llm.run import run_dir
from tests.reference.fake_bucket import fake_bucket

STATE = {"x": jnp.arange(4.0)}


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name != ".lock"}


def logged(workdir, root, steps, every=2, keep=2):
    """Rows and samples of these steps as a run writes them, and a checkpoint every so many."""
    with RunLog(workdir, 9) as log:
        places.name_place(workdir, root)
        if 1 in steps:
            log.write_config({"config": {}, "config_hash": "abc"})
        checkpoints = Checkpoints(workdir, keep)
        for step in steps:
            log.metrics(step, {"reward/mean": step / 9})
            log.samples(step, [{"prompt": "1=é"}])
            if step % every == 0:
                checkpoints.save(step, {"x": STATE["x"] + step}, {"config_hash": "abc"})
        checkpoints.close()


def test_where_checkpoints_are(tmp_path, monkeypatch):
    assert places.root_of("runs/a") == Path("runs/a")
    monkeypatch.chdir(tmp_path)
    places.name_place(tmp_path / "a", places.root_of(tmp_path / "a", "far"))
    assert places.root_of(tmp_path / "a") == tmp_path / "far"  # it does not depend on where one is
    assert steps_of(tmp_path / "a") == []
    places.name_place(tmp_path / "a", places.root_of(tmp_path / "a", str(tmp_path / "a")))
    assert places.root_of(tmp_path / "a") == tmp_path / "a"  # the place may move back
    with pytest.raises(ValueError, match=r"--checkpoints=s3://a/b has the scheme s3; give a folder"):
        places.root_of("a", "s3://a/b")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"needs gcsfs: pip install 'jaxrl_llm\[gcs\]'"):
        places.root_of("a", "gs://bucket/run")


def test_a_lost_dir_comes_back_from_its_place(tmp_path):
    """With every byte that it had at its checkpoint; later rows are cut there, as after a kill."""
    workdir, root = tmp_path / "run", tmp_path / "far"
    logged(workdir, root, (1, 2))
    assert not (workdir / "checkpoints").exists()
    before = content(workdir)
    shutil.rmtree(workdir)
    assert "back from" in recorded.bring_back(workdir, root)
    places.name_place(workdir, root)
    assert content(workdir) == before
    assert recorded.bring_back(workdir, root) == ""  # it has what the checkpoint has
    np.testing.assert_array_equal(Checkpoints(workdir).restore(STATE)[1]["x"], STATE["x"] + 2)
    logged(workdir, root, (3, 4, 5))
    for path in (root / "checkpoints" / "4" / "files").iterdir():
        path.write_text("{")
    shutil.rmtree(workdir)
    assert "of step 2 back" in recorded.bring_back(workdir, root)  # of the newest that can be read


def test_the_newest_of_both_tiers_is_restored(tmp_path):
    """The nearer of two of a step; and where the newest is damaged, the other tier's."""
    near, said = Checkpoints(tmp_path / "local", of_process=True), []
    both = Checkpoints(tmp_path, 2, near)
    for step, where in ((2, near), (3, both), (4, near), (4, both)):
        where.save(step, {"x": STATE["x"] + step + (where is near) / 2}, {})
    both.wait(), near.wait()
    assert both.latest == 4
    assert steps_of(tmp_path / "local") == [4]
    assert both.restore(STATE)[1]["x"][0] == 4.5
    shutil.rmtree(tmp_path / "local" / "checkpoints" / "4" / "payload")
    assert both.restore(STATE, note=said.append)[1]["x"][0] == 4
    assert "local/checkpoints/4 is damaged" in said[0]
    both.set_aside(after=3)
    both.close()
    assert (steps_of(tmp_path), steps_of(tmp_path / "local")) == ([3], [])


def test_a_slow_checkpoint_is_not_waited_for(tmp_path, monkeypatch):
    """It is being written until its digests are there, which wait; then the next may begin."""
    summed, may = digests._sums, threading.Event()
    monkeypatch.setattr(digests, "_sums", lambda xp, x: (may.wait(60), summed(xp, x))[1])
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.ready()
    checkpoints.save(1, {"x": jnp.arange(9.0)}, {})
    assert not checkpoints.ready()
    may.set()
    checkpoints.wait()
    assert checkpoints.ready()
    monkeypatch.setattr(processes, "everywhere", lambda true: False)  # another process is not ready
    assert not checkpoints.ready()


def test_saving_waits_for_no_digest(tmp_path, monkeypatch):
    """They are computed where the checkpoint is written, of what the arrays held when it was asked for."""
    summed, slow = digests._sums, []

    def sums(xp, x):
        time.sleep(0.3)
        slow.append(x)
        return summed(xp, x)

    monkeypatch.setattr(digests, "_sums", sums)
    checkpoints = Checkpoints(tmp_path)
    state, bump = {"x": jnp.arange(9.0)}, jax.jit(lambda x: x * 2, donate_argnums=0)
    checkpoints.save(1, state, {})
    assert not slow
    bump(state["x"])
    checkpoints.close()
    assert Checkpoints(tmp_path).restore({"x": jnp.zeros(9)})[1]["x"][8] == 8


@pytest.mark.slow
def test_a_bucket_keeps_what_a_lost_machine_had(tmp_path, monkeypatch):
    """Orbax, TensorStore and gcsfs against a bucket on this machine: saved, kept, listed, restored, set aside."""
    pytest.importorskip("gcsfs")
    with fake_bucket() as (environment, objects):
        for name, value in environment.items():
            monkeypatch.setitem(os.environ, name, value)
        workdir, root = tmp_path / "run", places.root_of(tmp_path / "run", "gs://bucket/a/run")
        assert steps_of(root) == []
        logged(workdir, root, (1, 2, 3, 4), every=1, keep=1)
        assert steps_of(workdir) == [4]
        assert not any(name.startswith("a/run/checkpoints/3/") for name in objects)
        before = content(workdir)
        shutil.rmtree(workdir)
        recorded.bring_back(workdir, root)
        places.name_place(workdir, root)
        assert content(workdir) == before
        checkpoints = Checkpoints(workdir)
        assert checkpoints.restore(STATE)[1]["x"][0] == 4
        del objects["a/run/checkpoints/4/commit_success.txt"]  # killed before it was whole
        with pytest.raises(FileNotFoundError, match=r"no checkpoint in gs://bucket/a/run/checkpoints"):
            Checkpoints(workdir).restore(STATE)
    with pytest.raises(OSError, match=r"gs://none/run/checkpoints cannot be read .*give the name of a bucket"):
        steps_of("gs://none/run")


def test_a_place_is_that_of_one_dir(tmp_path):
    """The first DIR marks it. Another on this machine is refused; after the loss of that DIR it takes over."""
    first, second, root = tmp_path / "first", tmp_path / "second", tmp_path / "far"
    logged(first, root, (1, 2))
    (first / "checkpoints_at").unlink()
    shutil.rmtree(root)
    assert places.refused(first, root, given=True) == ""
    places.claim(first, root)
    assert places.refused(first, root, given=False) == ""  # resumed without --checkpoints
    assert places.root_of(first) == root
    assert f"is the PLACE of {first}" in places.refused(second, root, given=True)
    shutil.rmtree(first)
    assert places.refused(second, root, given=True) == ""
    places.claim(second, root)
    logged(first, root, (1, 2))  # the old machine is back
    assert "is the PLACE of" not in (said := places.refused(first, root, given=False))
    assert f"names {root}, which is not marked as its own" in said


def test_a_place_of_another_machine_is_taken_over(tmp_path):
    """A DIR of the same path, on a machine of another name, is not the one here."""
    other, root = tmp_path / "other", tmp_path / "far"
    logged(other, other, (1, 2))
    for host, refused in ((socket.gethostname(), True), (f"not-{socket.gethostname()}", False)):
        root.mkdir(exist_ok=True)
        (root / "used_by").write_text(f"{'0' * 32}\n{host}:{other}\n")
        assert ("is the PLACE of" in places.refused(tmp_path / "mine", root, given=True)) is refused
    places.claim(tmp_path / "mine", root)
    assert (root / "used_by").read_text().endswith(f"{socket.gethostname()}:{tmp_path / 'mine'}\n")


def test_a_copy_of_a_dir_leaves_out_what_a_kill_left_half_written(tmp_path):
    for name in ("config.json", "report.md", "config.json.part", ".lock", "checkpoints_at"):
        (tmp_path / name).write_text(name)
    (tmp_path / "checkpoints").mkdir()
    packed = places.packed_files(tmp_path)
    assert list(packed) == ["config.json", "report.md"]
    places.unpack_files(tmp_path / "again", packed)
    assert content(tmp_path / "again") == {name: name.encode() for name in packed}


def test_a_dir_that_names_the_checkpoints_of_another_run_gets_nothing_of_them(tmp_path):
    """`--restart` would erase them, and a step would be saved among them."""
    mine, given = tmp_path / "mine", tmp_path / "given"
    logged(mine, mine, (1, 2))
    given.mkdir()
    (given / "checkpoints_at").write_text(f"{mine}\n{'0' * 32}\n")
    for restart in (True, False):
        with pytest.raises(ValueError, match="not marked as its own"):
            run_dir.check(given, ConfigDict(), restart=restart)
    with pytest.raises(ValueError, match="holds a run that no DIR is marked for"):
        run_dir.check(tmp_path / "new", ConfigDict(), restart=True, root=mine, given=True)
    assert steps_of(mine) == [2]


@pytest.mark.parametrize("name", ["../out.txt", "/out.txt", "a/b", "..", "", ".lock", "checkpoints_at"])
def test_the_copy_of_a_dir_holds_files_of_a_dir_alone(name, tmp_path):
    packed = {name: base64.b64encode(zlib.compress(b"x")).decode()}
    with pytest.raises(ValueError, match="is no file of a DIR"):
        places.unpack_files(tmp_path / "run", packed)
    assert [path.name for path in tmp_path.rglob("*")] == ["run"]
