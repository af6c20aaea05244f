"""Models small enough to compile in a second, with parameters that no mistake could hide behind."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models import Model, ModelConfig

SIZES = dict(
    vocab_size=24,
    num_hidden_layers=2,
    hidden_size=16,
    intermediate_size=20,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    moe_intermediate_size=12,
    rope_theta=100.0,
    rms_norm_eps=1e-5,
    experts_implementation="dense",  # test_experts.py holds the others to it; they compile slower
)


@pytest.fixture(scope="session")
def tiny():
    """tiny(**changes) -> Model; dense unless num_experts is given."""
    return lambda mesh=None, **changes: Model(ModelConfig(**{**SIZES, **changes}), mesh)


@functools.lru_cache(maxsize=32)
def _params(model: Model):
    """Drawn by numpy, which compiles nothing; norm scales too, since a scale of one would be no test of the norm."""
    rng = np.random.default_rng(0)

    def draw(shape):
        fan_in = shape[-2] if len(shape) > 1 else 1
        return jnp.asarray(rng.standard_normal(shape) / np.sqrt(fan_in), jnp.float32)

    return jax.tree.map(lambda leaf: draw(leaf.shape), jax.eval_shape(model.init, jax.random.key(0)))


@pytest.fixture(scope="session")
def params_of():
    return _params


@functools.partial(jax.jit, static_argnames=("model",))
def _forward(model, params, tokens, segment_ids=None, routing=None):
    out = model.apply(params, tokens, segment_ids=segment_ids, routing=routing, router_logits=True)
    return model.logits(params, out.hidden), out.routing


@pytest.fixture(scope="session")
def forward():
    """forward(model, params, tokens, segment_ids=None, routing=None) -> (logits, routing with router logits)."""
    return _forward


@pytest.fixture(scope="session")
def batch():
    """(tokens, segment_ids) [2 8]: no token twice; two segments and padding, one segment and padding."""
    tokens = np.random.default_rng(1).permutation(SIZES["vocab_size"])[:16].reshape(2, 8)
    segment_ids = np.array([[1, 1, 1, 2, 2, 2, 2, 0], [1, 1, 1, 1, 1, 0, 0, 0]])
    return jnp.asarray(tokens), jnp.asarray(segment_ids)
