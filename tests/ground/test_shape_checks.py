"""What conftest.py checks of every call in the package: plain types, and axes that must agree."""

import jax
import jax.numpy as jnp
import pytest
from beartype.roar import BeartypeCallHintViolation

from jaxrl_llm.ground.array_typing import shapes_for_arrays
from jaxrl_llm.objectives.batch import clamp, occupied


def test_what_does_not_fit_its_type_is_refused():
    mask = jnp.ones((2, 3), bool)
    assert occupied(mask, jnp.zeros((2, 3), int), 2).shape == (2,)
    for wrong in (
        lambda: occupied(mask, jnp.zeros((3, 2), int), 2),  # [b t] of the mask
        lambda: occupied(jnp.ones((2, 3))),
        lambda: clamp(mask, "1"),
        lambda: clamp(jax.ShapeDtypeStruct((2, 3), "float32"), 1.0),
    ):
        with pytest.raises(BeartypeCallHintViolation):
            wrong()
    with shapes_for_arrays():
        jax.eval_shape(lambda x: clamp(x, 1.0), jax.ShapeDtypeStruct((2, 3), "float32"))
