"""model.numerics=exact on a mesh: the bits of one device, and no device with the experts of another."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.ground import sharding
from jaxrl_llm.models import Model
from jaxrl_llm.models.exact import exact_block, tiles
from tests.reference.exact_rollouts import EVERY, assert_same, config, parameters, rollout, scored

SHAPES = {  # the type and experts that CI takes
    (4, 1, 1, 1): [("bfloat16", 8), ("float32", 0)],
    (1, 4, 1, 1): [("float32", 8), ("bfloat16", 0)],
    (1, 1, 4, 1): [("bfloat16", 8)],
    (2, 1, 2, 1): [("bfloat16", 8)],
    (1, 2, 2, 1): [("float32", 8)],
}


@pytest.mark.parametrize(
    ("shape", "dtype", "experts"),
    [
        pytest.param(shape, *model, marks=[pytest.mark.long] * (model not in chosen))
        for shape, chosen in SHAPES.items()
        for model in ((dtype, experts) for dtype, experts, _ in EVERY)
        if model[1] or shape[2] == 1
    ],
)
@pytest.mark.slow
def test_devices(shape, dtype, experts):
    one = Model(config(dtype, experts))
    several = Model(one.config, sharding.make_mesh(shape))
    for seed in range(5):
        of, other = rollout(one, seed, slots=8), rollout(several, seed, slots=8)
        np.testing.assert_array_equal(of.tokens, other.tokens)
        assert_same(of, other.sampler_logprobs, other.experts)
        with jax.set_mesh(several.mesh):
            given = parameters(several, seed), of.tokens, of.segment_ids
            assert_same(of, *scored(several, *given))
    if shape[2] > 1:  # no device has the experts of another
        with jax.set_mesh(several.mesh):
            text = scored.lower(several, *given).compile().as_text()
        assert "f32[8,64,32]" not in text
        assert f"f32[{8 // shape[2]},64,32]" in text


def test_slots_of_experts_on_other_devices():
    """To the sign of a zero, whatever an expert that is not here would give."""
    mesh, rng = sharding.make_mesh((1, 2, 2, 1)), np.random.default_rng(0)
    x, weight, experts = (jnp.asarray(rng.integers(*of)) for of in ((-1, 2, (8, 3)), (-1, 2, (6, 3)), (0, 6, (8, 2))))
    x, weight = x.astype(jnp.float32), weight.astype(jnp.float32)

    class Products(tiles.Tiles):
        def experts(self, x, experts, weights, dtype):
            known = (experts < len(weights[0]))[..., None]
            return jnp.where(known, x[:, None] * weights[0][jnp.minimum(experts, len(weights[0]) - 1)], jnp.nan)

    slots = functools.partial(exact_block._slots, Products(), dtype="float32")
    rows, axes = sharding.rows(mesh).spec, exact_block._spread(config(experts=6), mesh)
    places = rows, rows, (jax.sharding.PartitionSpec(axes),)
    spread = jax.shard_map(functools.partial(slots, axes=axes), mesh=mesh, in_specs=places, out_specs=rows)
    whole = np.asarray(slots(x, experts, (weight,), axes=()))
    assert len(axes) == 1
    assert (np.signbit(whole) & (whole == 0)).any()
    np.testing.assert_array_equal(np.asarray(spread(x, experts, (weight,))).view(np.uint32), whole.view(np.uint32))
