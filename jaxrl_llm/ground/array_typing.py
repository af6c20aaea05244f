"""The axis letters and the named array types of the whole package.

b  row (an answer, or a packed row)     l  layer (for routing: MoE layers only)
t  time (position in the row)           k  expert slot of a token (top-k)
s  sequence (answer) index              e  expert
v  vocabulary                           d  model width
h  attention head                       n  flat token index

Shapes are checked at trace time in the tests (jaxtyping's import hook with beartype, see tests/conftest.py);
at run time they cost nothing.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from jaxtyping import Array, Bool, Float, Int, Integer, PRNGKeyArray, Shaped, config  # noqa: F401 (others take them from here)

Params = Mapping[str, Any]  # a plain pytree of arrays
Key = PRNGKeyArray
Tokens = Integer[Array, "b t"]
SegmentIds = Integer[Array, "b t"]  # 0 = padding
Mask = Bool[Array, "b t"]
PerToken = Float[Array, "b t"]
PerAnswer = Float[Array, "b"]


@contextlib.contextmanager
def shapes_for_arrays() -> Iterator[None]:
    """Let abstract shapes stand where types ask for arrays; nothing is checked within it."""
    before = config.jaxtyping_disable
    config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        config.update("jaxtyping_disable", before)
