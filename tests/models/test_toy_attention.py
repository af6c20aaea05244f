"""An attention of another kind is one class and one entry of `LAYERS`: here one that sees a window of columns."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models import ModelConfig
from jaxrl_llm.models.attention.grouped_query import Attention
from jaxrl_llm.models.experts.moe import SwiGLU
from jaxrl_llm.models.transformer import LAYERS, Model
from tests.models.conftest import SIZES

WINDOW, LENGTH = 3, 8


class Windowed(Attention):
    """A token sees itself and the WINDOW - 1 columns before it that it would see anyway."""

    def __call__(self, x, seen, cache):
        from_here_on = jnp.cumsum(seen.visible[..., ::-1], axis=-1)[..., ::-1]
        return super().__call__(x, seen._replace(visible=seen.visible & (from_here_on <= WINDOW)), cache)


class Alternating(ModelConfig, prefix="model."):
    @property
    def kinds(self):
        return ("windowed", "dense")[: self.num_hidden_layers]


@pytest.fixture
def make(monkeypatch):
    monkeypatch.setitem(LAYERS, "windowed", (Windowed, SwiGLU))
    return lambda layers: Model(Alternating(**{**SIZES, "num_hidden_layers": layers}))


def test_a_token_reaches_as_far_as_the_window(make, params_of):
    model, tokens = make(1), jnp.arange(LENGTH)[None]
    hidden = jax.jit(lambda tokens: model.apply(params_of(model), tokens).hidden[0])
    moved = np.abs(hidden(tokens) - hidden(tokens.at[0, 2].set(20))).max(-1) > 1e-6
    np.testing.assert_array_equal(np.flatnonzero(moved), np.arange(2, 2 + WINDOW))


def test_it_trains_and_decodes_beside_another_kind(make, params_of):
    """Every parameter of both kinds learns, and each column is that of a forward over the whole row."""
    model, tokens = make(2), jnp.asarray(np.random.default_rng(0).integers(0, 24, (2, LENGTH)), jnp.int32)
    params = params_of(model)

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def gradient(params):
        hidden = model.apply(params, tokens).hidden
        return jnp.sum(jnp.sin(3 * hidden)), hidden

    slopes, whole = gradient(params)
    assert all(np.abs(x).max() > 1e-5 for kind in ("windowed", "dense") for x in jax.tree.leaves(slopes[kind]))
    cache, layers = model.empty_cache(2, LENGTH), model.unstack(params)

    @jax.jit
    def feed(cache, column):
        at = jax.lax.dynamic_slice_in_dim(tokens, column, 1, axis=1)
        out = model.apply(layers, at, positions=jnp.full((2, 1), column), cache=cache)
        return out.cache, out.hidden[:, 0]

    for column in range(LENGTH):
        cache, hidden = feed(cache, column)
        np.testing.assert_allclose(hidden, whole[:, column], atol=1e-5)
