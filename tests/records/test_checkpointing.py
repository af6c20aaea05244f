"""Checkpoints: bounded, verified leaf by leaf, and an error that names what is wrong."""

import functools
import json
import re
import shutil
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.experimental import multihost_utils
from orbax.checkpoint._src.multihost import multihost

from jaxrl_llm.ground import sharding
from jaxrl_llm.records.checkpoint_reader import read_part
from jaxrl_llm.records.checkpointing import Checkpoints, steps_of
from jaxrl_llm.records.digests import _sums_of_all, digests
from jaxrl_llm.records.saved_trees import load_tree, save_tree

STATE = {"a": jnp.arange(6.0).reshape(2, 3), "b": {"c": jnp.array([1, 2, 3]), "step": jnp.array(7)}}


def saved(folder, steps=(1,), keep=2):
    checkpoints = Checkpoints(folder, keep)
    for step in steps:
        checkpoints.save(step, jax.tree.map(lambda x, n=step: x + n, STATE), {"config_hash": "abc", "step": step})
    checkpoints.close()
    return Checkpoints(folder, keep)


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_what_is_saved_comes_back_and_few_stay(tmp_path):
    checkpoints = saved(tmp_path, (1, 2, 5))
    assert checkpoints.latest == 5
    step, state, extra = checkpoints.restore(STATE)
    assert step == 5
    assert extra == {"config_hash": "abc", "step": 5}
    assert_same(state, jax.tree.map(lambda x: x + 5, STATE))
    assert_same(checkpoints.restore(STATE, 2)[1], jax.tree.map(lambda x: x + 2, STATE))
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"2", "5"}
    checkpoints.save(5, STATE, {})  # a step that exists stays as it is
    checkpoints.wait()
    assert checkpoints.restore(STATE)[2]["step"] == 5


def test_jax_is_not_asked_for_notice_of_a_step_that_is_over(tmp_path, monkeypatch):
    """As Orbax's thread would once a checkpoint is written: JAX would count on from there, and stop at no step."""
    asked = []
    monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", asked.append)
    saved(tmp_path)
    assert not asked


def test_checkpoints_that_are_written_at_once_wait_at_other_barriers(tmp_path, monkeypatch):
    """Several processes would take one of the near ones for one of the others, and end."""
    waited = []

    def barrier(*, processes=None):
        return lambda *, key, timeout_ms: waited.append(key)

    monkeypatch.setattr(multihost, "get_barrier_sync_fn", barrier)
    keys = []
    for given in ({}, {"of_process": True}):
        checkpoints = Checkpoints(tmp_path / str(len(given)), **given)
        checkpoints.save(1, STATE, {})
        checkpoints.close()
        keys.append({*waited})
        waited.clear()
    assert len(keys[0]) == len(keys[1]) > 1
    assert not keys[0] & keys[1]


def test_a_state_may_change_while_it_is_written(tmp_path):
    """Training goes on in donated buffers while a checkpoint is still being written."""
    bump = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0, tree), donate_argnums=0)
    state = {"x": jnp.arange(200_000.0)}
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state, {})
    bump(state)
    checkpoints.close()
    restored = Checkpoints(tmp_path).restore({"x": jnp.zeros(200_000)})[1]
    np.testing.assert_array_equal(restored["x"], np.arange(200_000.0))


def test_it_comes_back_on_another_mesh(tmp_path):
    one, four = (sharding.make_mesh(shape) for shape in ((1, 1, 1, 1), (1, 4, 1, 1)))
    x = np.arange(8.0, dtype=np.float32)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"x": jax.device_put(x, sharding.rows(one))}, {})
    checkpoints.wait()
    found = checkpoints.restore({"x": jax.device_put(np.zeros_like(x), sharding.rows(four))})[1]["x"]
    assert len(found.sharding.device_set) == 4
    np.testing.assert_array_equal(found, x)


def test_no_checkpoint_says_so(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.latest is None
    with pytest.raises(FileNotFoundError, match=r"no checkpoint in .*; train first with --workdir"):
        checkpoints.restore(STATE)


def test_a_step_that_is_not_there_is_refused_with_those_that_are(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no checkpoint of step 99 in .*; there are 1, 2"):
        saved(tmp_path, (1, 2)).restore(STATE, 99)


FOREIGN = {
    "another shape": {**STATE, "a": jnp.zeros((3, 2))},
    "a leaf too many": {**STATE, "d": jnp.zeros(1)},
    "a leaf too few": {"a": STATE["a"]},
    "another dtype": {**STATE, "a": jnp.zeros((2, 3), jnp.bfloat16)},
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_checkpoint_of_another_model_is_refused(tmp_path, kind):
    with pytest.raises(ValueError, match=r"checkpoints/1 is damaged or does not fit this model and optimizer"):
        saved(tmp_path).restore(FOREIGN[kind])


def flip_a_digest(folder):
    path = folder / "payload" / "metadata"
    payload = json.loads(path.read_text())
    payload["extra"]["step"] = 1000
    path.write_text(json.dumps(payload))


def flip_a_weight(folder, like=STATE, name="a"):
    """The state is written again with one weight changed: Orbax notices nothing."""
    reader = ocp.StandardCheckpointer()
    state = reader.restore(folder / "state", like)
    state[name] = state[name].at[0, 1].add(1)
    shutil.rmtree(folder / "state")
    reader.save(folder / "state", state)
    reader.close()


def empty_every_file(folder):
    for path in (folder / "state").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")


DAMAGE = {
    "a weight": (flip_a_weight, r"\['a'\] differ from their digests"),
    "the caller's JSON": (flip_a_digest, "its payload differs from its digest"),
    "no state": (lambda folder: shutil.rmtree(folder / "state"), ""),
    "no payload": (lambda folder: shutil.rmtree(folder / "payload"), ""),
    "no metadata": (lambda folder: (folder / "_CHECKPOINT_METADATA").unlink(), None),  # harmless: Orbax does without
    "empty files": (empty_every_file, ""),
    "an empty folder": (lambda folder: (shutil.rmtree(folder), folder.mkdir()), ""),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(tmp_path, kind):
    damage, reason = DAMAGE[kind]
    saved(tmp_path, (1, 2)).close()
    damage(tmp_path / "checkpoints" / "2")
    checkpoints, said = Checkpoints(tmp_path, 2), []
    step, state, extra = checkpoints.restore(STATE, note=said.append)
    if reason is None:
        assert (step, said) == (2, [])
        return
    assert (step, extra["step"]) == (1, 1)
    assert_same(state, jax.tree.map(lambda x: x + 1, STATE))
    assert re.match(rf".*checkpoints/2 is damaged .*{reason}.*; going on from step 1$", said[0])
    with pytest.raises(ValueError, match=r"checkpoints/2 is damaged .*; give another --step"):
        checkpoints.restore(STATE, 2)
    # Set aside, so that its step can be saved again.
    checkpoints.set_aside(after=1)
    assert steps_of(tmp_path) == [1]
    assert (tmp_path / "damaged_checkpoints" / "2").is_dir()
    checkpoints.save(2, STATE, {"step": 2})
    checkpoints.close()
    assert Checkpoints(tmp_path).restore(STATE)[0] == 2


def test_what_is_in_flight_is_verified_too(tmp_path):
    """Of two rollouts in flight one answer has changed since it was saved."""
    checkpoints, ahead = Checkpoints(tmp_path, 2), [{"tokens": jnp.arange(4)}, {"tokens": jnp.arange(4, 8)}]
    for step in (1, 2):
        checkpoints.save(step, STATE, {"step": step}, ahead)
        checkpoints.wait()
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    read = functools.partial(checkpoints.restore, STATE, in_flight=lambda shape: here)
    assert_same(read()[2]["in_flight"], ahead)
    changed = tmp_path / "checkpoints" / "2" / "in_flight"
    shutil.rmtree(changed)
    save_tree(changed, [ahead[0], {"tokens": jnp.array([4, 5, 9, 7])}])
    said = []
    assert read(note=said.append)[0] == 1
    assert re.search(r"checkpoints/2 is damaged .*\[1\]\['tokens'\] differ from their digests", said[0])
    shutil.rmtree(changed)  # what is not there at all is missed too
    assert read(note=said.append)[0] == 1
    assert re.search(r"checkpoints/2 is damaged .*\[0\]\['tokens'\], \[1\]\['tokens'\] differ", said[1])


def test_a_part_of_a_state_is_verified_too(tmp_path):
    """By the digests of the whole, whose other leaves are not read."""
    saved(tmp_path)
    part = {"b": {"c": STATE["b"]["c"]}}
    assert_same(read_part(tmp_path, 1, part), {"b": {"c": STATE["b"]["c"] + 1}})
    flip_a_weight(tmp_path / "checkpoints" / "1")
    assert_same(read_part(tmp_path, 1, part), {"b": {"c": STATE["b"]["c"] + 1}})
    with pytest.raises(ValueError, match=r"checkpoints/1 is damaged or of another model: a differ from their digests"):
        read_part(tmp_path, 1, {"a": STATE["a"]})


def test_where_all_are_damaged_each_is_named(tmp_path):
    saved(tmp_path, (1, 2)).close()
    for step in (1, 2):
        flip_a_digest(tmp_path / "checkpoints" / str(step))
    with pytest.raises(ValueError, match=r"checkpoints/2 is damaged .*checkpoints/1 is damaged .*; use the config"):
        Checkpoints(tmp_path).restore(STATE)


def test_a_digest_does_not_depend_on_the_mesh_and_sees_every_element():
    mesh = sharding.make_mesh((1, 4, 1, 1))
    for x in (np.arange(8.0, dtype=np.float32), np.arange(32).reshape(8, 4), np.ones((4, 3), bool)):
        spread = jax.device_put(x, sharding.rows(mesh))
        one = digests({"x": x})["['x']"]
        assert digests({"x": spread})["['x']"] == one
        a, b = _sums_of_all([spread])[0]  # where shards of other processes cannot be read
        assert one.endswith(f"{int(a):08x}{int(b):08x}")
        others = {one}
        for place in np.ndindex(x.shape):
            changed = x.copy()
            changed[place] = not changed[place] if x.dtype == bool else changed[place] + 1
            others.add(digests({"x": changed})["['x']"])
        others.add(digests({"x": x[::-1].copy()})["['x']"])  # the same elements elsewhere
        assert len(others) == x.size + 1 + (x.dtype != bool)
    assert (
        digests({"x": jnp.zeros(4)}) != digests({"x": jnp.zeros(4, jnp.bfloat16)}) != digests({"x": jnp.zeros((2, 2))})
    )


def test_a_digest_by_hand():
    """One zero at index 0 is mixed to 0 in every step; the bits of 1.0 at index 0 by the formula in Python integers."""
    assert digests({"x": jnp.zeros(1)})["['x']"] == "float32(1,) " + "0" * 16

    def mixed(bits, first, second):
        x = bits * second % 2**32
        x = (x ^ (x >> 15)) * first % 2**32
        x = (x ^ (x >> 13)) * second % 2**32
        return x ^ (x >> 16)

    one = 0x3F800000
    expected = f"{mixed(one, 0x9E3779B1, 0x85EBCA77):08x}{mixed(one, 0xC2B2AE3D, 0x27D4EB2F):08x}"
    assert digests({"x": jnp.ones(1)})["['x']"] == f"float32(1,) {expected}"


def test_the_best_stays_beside_the_newest(tmp_path):
    """As it is told with each save; once another is the best, the earlier one goes."""
    checkpoints, seen = Checkpoints(tmp_path, keep=2), []
    for step, best in ((1, None), (2, 2), (3, 2), (4, 2), (5, 2), (6, 6), (7, 6), (8, None), (9, None)):
        checkpoints.save(step, {"x": jnp.full(4, step)}, {}, best=best)
        checkpoints.wait()
        seen.append(steps_of(tmp_path))
    assert seen == [[1], [1, 2], [2, 3], [2, 3, 4], [2, 4, 5], [5, 6], [6, 7], [7, 8], [8, 9]]


_FULL_DISK = """
import resource, signal, sys
import jax.numpy as jnp
from jaxrl_llm.records.checkpointing import Checkpoints

checkpoints = Checkpoints(sys.argv[1], keep=1)
checkpoints.save(1, {"x": jnp.arange(8.0)}, {})
checkpoints.wait()
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2**14, 2**14))  # a longer file cannot be written
try:
    checkpoints.save(2, {"x": jnp.sin(jnp.arange(2.0**16))}, {})
    checkpoints.close()
except OSError as error:
    print(error)
"""


def test_a_full_disk_leaves_the_last_good_checkpoint(tmp_path):
    run = subprocess.run([sys.executable, "-c", _FULL_DISK, tmp_path], capture_output=True, text=True, timeout=120)
    assert "a checkpoint could not be written in " in run.stdout, run.stderr
    assert "the one of step 1 stays. Make room, or let it be written, and give the same command" in run.stdout
    assert steps_of(tmp_path) == [1]
    step, state, _ = Checkpoints(tmp_path).restore({"x": jnp.zeros(8)})
    assert step == 1
    np.testing.assert_array_equal(state["x"], np.arange(8.0))


def test_a_folder_that_cannot_be_written_is_found_before_orbax_is_asked(tmp_path, monkeypatch):
    """Whose threads would wait minutes for it."""
    checkpoints, asked = Checkpoints(tmp_path), []
    monkeypatch.setattr(checkpoints._manager, "save", lambda *step, **items: asked.append(step))
    checkpoints.save(1, {"x": jnp.zeros(1)}, {})
    checkpoints.folder.rmdir()
    checkpoints.folder.write_text("no folder")
    with pytest.raises(OSError, match=r"a checkpoint could not be written in .*there is none before it"):
        checkpoints.save(2, {"x": jnp.zeros(1)}, {})
    assert asked == [(1,)]


_TWO_PROCESSES = """
import sys
import jax
import numpy as np
from jaxrl_llm.ground import sharding
from jaxrl_llm.records import checkpoint_reader
from jaxrl_llm.records.checkpointing import Checkpoints
from jaxrl_llm.records.digests import digests

folder, port, number = sys.argv[1], sys.argv[2], int(sys.argv[3])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{port}", 2, number)
x = np.arange(32.0, dtype=np.float32).reshape(8, 4)
rows = sharding.rows(sharding.make_mesh((1, -1, 1, 1)))
state = {"x": jax.make_array_from_callback(x.shape, rows, lambda index: x[index])}
assert not state["x"].is_fully_addressable
checkpoints = Checkpoints(folder, 2)
for step in (1, 2):
    checkpoints.save(step, state, {"step": step})
checkpoints.wait()
assert Checkpoints(folder, 2).restore(state)[0] == 2
if number == 1:  # it alone meets what cannot be read
    reader = checkpoint_reader._reader

    def broken():
        checkpoint_reader._reader = reader
        raise OSError("a lost sector")

    checkpoint_reader._reader = broken
said = []
assert Checkpoints(folder, 2).restore(state, note=said.append)[0] == 1
assert len(said) == 1 and "going on from step 1" in said[0], said
print(digests(state)["['x']"])
"""


@pytest.mark.slow
def test_digests_of_arrays_that_span_processes(tmp_path):
    """Saved by two processes, restored by one on another mesh: one digest; a changed weight is seen there too."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-c", _TWO_PROCESSES, str(tmp_path), port]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = [subprocess.Popen([*command, str(number)], **pipes) for number in range(2)]
    printed = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0, 0], printed
    x = {"x": np.arange(32.0, dtype=np.float32).reshape(8, 4)}
    assert {out.split("\n")[-2] for out, _ in printed} == {digests(x)["['x']"]}
    like = {"x": jnp.zeros((8, 4))}
    np.testing.assert_array_equal(Checkpoints(tmp_path, 2).restore(like)[1]["x"], x["x"])
    flip_a_weight(tmp_path / "checkpoints" / "2", like, "x")
    assert Checkpoints(tmp_path, 2).restore(like)[0] == 1


def test_one_tree_in_a_folder(tmp_path):
    save_tree(tmp_path / "tree", STATE)
    save_tree(tmp_path / "tree", {"other": jnp.zeros(1)})  # an existing one stays
    assert_same(load_tree(tmp_path / "tree", STATE), STATE)
