"""One pytree in a folder of its own, and the shapes that a stored tree is read into."""

import os
from collections.abc import Callable
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from jaxrl_llm.records import places


def save_tree(folder: str | os.PathLike[str], tree: Any) -> None:
    """Write one pytree into its own folder, whole or not at all; an existing one is left as it is."""
    if not epath.Path(folder).exists():
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(places.absolute(folder), tree)


def load_tree(folder: str | os.PathLike[str], like: Any) -> Any:
    """The pytree of `save_tree`, with the shapes, dtypes and shardings of `like`."""
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(places.absolute(folder), shapes(like))


def shapes(like: Any, where: Callable[[Any], jax.sharding.Sharding] = lambda x: x.sharding) -> Any:
    """Shapes of arrays, or of what a checkpoint says of them; where: the sharding of each, by default its own."""

    def shape(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where(x))

    return jax.tree.map(shape, like)
