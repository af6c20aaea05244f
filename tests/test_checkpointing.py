"""Checkpoints: bounded, verified leaf by leaf, and an error that names what is wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import sharding
from jaxrl_llm.checkpointing import Checkpoints, load_tree, save_tree

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


FOREIGN = {
    "another shape": {**STATE, "a": jnp.zeros((3, 2))},
    "a leaf too many": {**STATE, "d": jnp.zeros(1)},
    "a leaf too few": {"a": STATE["a"]},
    "another dtype": {**STATE, "a": jnp.zeros((2, 3), jnp.bfloat16)},
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_checkpoint_of_another_model_is_refused(tmp_path, kind):
    with pytest.raises(ValueError, match=r"does not fit this model and optimizer|is damaged or foreign"):
        saved(tmp_path).restore(FOREIGN[kind])


def test_flipped_bits_are_seen(tmp_path, monkeypatch):
    """Orbax restores them without a word; the digests do not."""
    checkpoints = saved(tmp_path)
    restore = checkpoints._manager.restore

    def flipped(*args, **keywords):
        found = restore(*args, **keywords)
        found["state"]["a"] = found["state"]["a"].at[0, 1].set(9.0)
        return found

    monkeypatch.setattr(checkpoints._manager, "restore", flipped)
    with pytest.raises(ValueError, match=r"1 is damaged or foreign: \['a'\] differ .*remove that step's folder"):
        checkpoints.restore(STATE)


@pytest.mark.parametrize("how", ["empty", "gone"])
def test_a_damaged_folder_is_named(tmp_path, how):
    """Every file of the array data cut to nothing, or the payload missing."""
    saved(tmp_path).close()
    folder = tmp_path / "checkpoints" / "1"
    if how == "gone":
        for path in (folder / "payload").rglob("*"):
            path.unlink()
    else:
        for path in (folder / "state").rglob("*"):
            if path.is_file():
                path.write_bytes(b"")
    with pytest.raises((ValueError, FileNotFoundError), match=r"checkpoints/1"):
        Checkpoints(tmp_path).restore(STATE)


def test_one_tree_in_a_folder(tmp_path):
    save_tree(tmp_path / "tree", STATE)
    save_tree(tmp_path / "tree", {"other": jnp.zeros(1)})  # an existing one stays
    assert_same(load_tree(tmp_path / "tree", STATE), STATE)
