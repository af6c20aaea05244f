"""Every backward that is written by hand, against differences of its own forward."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jaxrl_llm.ground import sharding
from jaxrl_llm.models import selected_logprobs as logprobs_module
from jaxrl_llm.models.attention import attend_blocks
from jaxrl_llm.models.attention.attend import attend
from jaxrl_llm.models.experts.expert_blocks import block_experts
from jaxrl_llm.models.experts.implementations import apply_experts
from jaxrl_llm.models.experts.moe import _gated
from jaxrl_llm.models.layers import normalise, project
from tests.reference.grouped_rows import interpreted
from tests.reference.slowly import first_quick

RNG = np.random.default_rng(0)
EXPERTS = jnp.asarray(RNG.integers(0, 4, (6, 2)))
VISIBLE = jnp.asarray(np.tril(np.ones((2, 5, 5), bool)))
TARGETS = jnp.asarray(RNG.integers(0, 10, 6))


def chunked(hidden, head, kept):
    """Log-probs of two chunks, whose probabilities the backward computes again or has kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprobs_module, "_ONE_CHUNK", 0)
        patch.setattr(logprobs_module, "kept_probabilities", lambda *_: int(kept))
        patch.setattr(logprobs_module, "score_chunk", lambda platform: 4)
        return logprobs_module.selected_logprobs(hidden, head, TARGETS, temperature=0.7)


def in_blocks(queries, keys, values):
    """Three blocks of two queries, the last with padding."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attend_blocks, "BLOCK", 2)
        return attend_blocks.attend_blocks(queries, keys, values, VISIBLE)


def moved(x, gates, *weights):
    """Two devices, each with half of the experts."""
    mesh = sharding.make_mesh((1, 1, 2, 1))
    return apply_experts(x, EXPERTS, gates, *weights, implementation="blocks", mesh=mesh)


def grouped(kernel):
    return lambda rows, weights: interpreted(rows, weights, jnp.array([3, 0, 4]), kernel=kernel)


WEIGHTS = (4, 3, 5), (4, 3, 5), (4, 5, 3)
BACKWARDS = {
    "norm": (lambda x, scale: normalise(x, scale, 1e-5), (2, 5), (5,)),
    "attention": (lambda q, k, v: attend(q, k, v, VISIBLE), (2, 5, 4, 3), (2, 2, 5, 3), (2, 2, 5, 3)),
    "attention in blocks": (in_blocks, (2, 5, 4, 3), (2, 2, 5, 3), (2, 2, 5, 3)),
    "product, wider": (project, (2, 3, 4), (4, 5)),
    "product, narrower": (project, (6, 5), (5, 3)),
    "log-probs": (lambda h, w: logprobs_module.selected_logprobs(h, w, TARGETS, temperature=0.7), (6, 3), (3, 10)),
    "log-probs in chunks": (functools.partial(chunked, kept=False), (6, 3), (3, 10)),
    "log-probs in chunks that are kept": (functools.partial(chunked, kept=True), (6, 3), (3, 10)),
    "experts": (lambda x, gates, *w: block_experts(x, EXPERTS, gates, w), (6, 3), (6, 2), *WEIGHTS),
    "experts on devices": (moved, (6, 3), (6, 2), *WEIGHTS),
    "groups on a TPU": (grouped("tpu"), (8, 3), (3, 3, 2)),
    "groups on a GPU": (grouped("gpu"), (8, 3), (3, 3, 2)),
}


@pytest.mark.parametrize("name", first_quick(9, BACKWARDS))
def test_a_backward_is_the_derivative_of_its_forward(name):
    """Along random directions of all arguments together, in float32: differences of 1 % steps, right to 0.2 %."""
    f, *shapes = BACKWARDS[name]
    arguments = [jnp.asarray(np.random.default_rng(i).standard_normal(s), jnp.float32) for i, s in enumerate(shapes)]
    with jax.default_matmul_precision("highest"):
        check_grads(jax.jit(f), arguments, order=1, modes=("rev",), eps=1e-2, atol=2e-3, rtol=2e-3)


def test_a_gated_product_keeps_two_arrays_of_its_width():
    """The gate and up products; autodiff alone would keep the sigmoid and the two products of silu and of up, too."""
    gate, up, down = (jnp.asarray(RNG.normal(size=shape)) for shape in ((2, 3, 7), (2, 3, 7), (7, 5)))

    def kept(product):
        _, back = jax.vjp(product, gate, up, down)
        return sum(x.shape == gate.shape for x in jax.tree.leaves(back)), back(jnp.ones((2, 3, 5)))

    (two, given), (more, wanted) = kept(_gated), kept(lambda gate, up, down: (jax.nn.silu(gate) * up) @ down)
    assert two == 2 < more
    for one, other in zip(given, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
