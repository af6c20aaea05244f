"""Checkpoints with Orbax: bounded in number, complete or absent, and verified leaf by leaf on restore.

A step's checkpoint is the state (any pytree of arrays), a digest of every leaf and the caller's JSON (iterator state,
config hash). Orbax notices missing, extra and misshapen leaves; it does not notice flipped bits or a cast dtype, hence
the digests.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

__all__ = ["Checkpoints", "load_tree", "save_tree"]


def _digests(tree: Any) -> dict[str, str]:
    """blake2b of every leaf that this process holds whole."""
    out = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            continue
        array = np.asarray(leaf)
        digest = hashlib.blake2b(np.ascontiguousarray(array).tobytes(), digest_size=16)
        digest.update(f"{array.dtype}{array.shape}".encode())
        out[jax.tree_util.keystr(path)] = digest.hexdigest()
    return out


def _verify(tree: Any, digests: Mapping[str, str], where: Path) -> None:
    broken = [name for name, digest in _digests(tree).items() if digests.get(name) != digest]
    if broken:
        raise ValueError(
            f"checkpoint {where} is damaged or foreign: {', '.join(broken[:3])} differ from their digests; "
            "remove that step's folder to fall back on an earlier one"
        )


class Checkpoints:
    """The checkpoints of one DIR.

    Args:
      workdir: the run's DIR; checkpoints lie in workdir/checkpoints.
      keep: how many of the newest stay.
    """

    def __init__(self, workdir: str | Path, keep: int = 1):
        self.folder = Path(workdir).absolute() / "checkpoints"
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True)
        self._manager = ocp.CheckpointManager(self.folder, options=options)

    @property
    def latest(self) -> int | None:
        return self._manager.latest_step()

    def save(self, step: int, state: Any, extra: Mapping[str, Any]) -> None:
        """Write asynchronously; `close` (or the next save) waits. Saving a step that exists is a no-op."""
        if step in self._manager.all_steps():
            return
        payload = {"digests": _digests(state), "extra": dict(extra)}
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), payload=ocp.args.JsonSave(payload))  # pyright: ignore
        self._manager.save(step, args=items)

    def restore(self, like: Any, step: int | None = None) -> tuple[int, Any, dict[str, Any]]:
        """(step, state, extra) of the newest checkpoint, or of `step`.

        Args:
          like: a pytree of arrays (or jax.ShapeDtypeStruct with shardings) of the state's structure.

        Raises:
          FileNotFoundError: there is no checkpoint.
          ValueError: it belongs to another model or optimizer, or its data is damaged.
        """
        step = self.latest if step is None else step
        if step is None:
            raise FileNotFoundError(f"no checkpoint in {self.folder}; train first with --workdir {self.folder.parent}")
        target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
        items = ocp.args.Composite(state=ocp.args.StandardRestore(target), payload=ocp.args.JsonRestore())  # pyright: ignore
        try:
            restored = self._manager.restore(step, args=items)
        except (ValueError, KeyError, TypeError, FileNotFoundError) as error:
            raise ValueError(
                f"checkpoint {self.folder / str(step)} does not fit this model and optimizer ({str(error)[:300]}); "
                "use the config that wrote it, or another --workdir"
            ) from error
        _verify(restored["state"], restored["payload"]["digests"], self.folder / str(step))
        return step, restored["state"], restored["payload"]["extra"]

    def wait(self) -> None:
        """Until everything saved is on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        self._manager.wait_until_finished()
        self._manager.close()


def save_tree(folder: str | Path, tree: Any) -> None:
    """One pytree in a folder of its own, complete or absent; an existing one stays."""
    if not Path(folder).exists():
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(Path(folder).absolute(), tree)


def load_tree(folder: str | Path, like: Any) -> Any:
    """The pytree of `save_tree`, with the shapes, dtypes and shardings of `like`."""
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(Path(folder).absolute(), target)
