"""Grouped matmuls of every platform against a loop over the groups, in both directions, and compiled for an H100."""

import functools
import importlib.util
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import backend

from jaxrl_llm.models.experts import mosaic_matmul
from jaxrl_llm.models.experts.grouped_matmul import _in_stack, grouped_matmul
from jaxrl_llm.models.experts.triton_matmul import tiles_of
from jaxrl_llm.models.layers import OfLayer
from tests.reference.grouped_rows import by_loop, interpreted
from tests.reference.slowly import first_quick

needs_cuda = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="compiling for GPUs is optional: pip install jax[cuda13]",
)
needs_tokamax = pytest.mark.skipif(
    not mosaic_matmul.installed(), reason="its kernel is optional, from Python 3.12 on: pip install jaxrl_llm[hopper]"
)


def arrays(dtype, *shapes):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def check(run, counts, d, f, dtype=jnp.float32, tolerance=1e-5):
    """Values and both gradients, with three rows of no group behind the groups: nothing depends on what they hold."""
    m = sum(counts) + 3
    rows, weights, cotangent = arrays(dtype, (m, d), (len(counts), d, f), (m, f))
    rows, cotangent = (x.at[-3:].set(jnp.nan) for x in (rows, cotangent))

    @functools.partial(jax.jit, static_argnums=0)
    def forward_and_back(f, rows, weights):
        out, pull = jax.vjp(f, rows, weights)
        d_rows, d_weights = pull(cotangent)
        return out[:-3], d_rows[:-3], d_weights

    want = forward_and_back(functools.partial(by_loop, counts=counts), rows, weights)
    got = forward_and_back(functools.partial(run, counts=jnp.asarray(counts, jnp.int32)), rows, weights)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max(initial=0))


@pytest.mark.parametrize(
    "counts", [(3, 0, 5, 2), *(pytest.param(c, marks=pytest.mark.slow) for c in ((0, 0, 0, 10), (1, 2, 3, 4)))]
)
def test_the_reference_and_the_kernel_of_tpus(counts):
    check(functools.partial(grouped_matmul, platform="cpu"), counts, 128, 256)
    check(functools.partial(interpreted, kernel="tpu"), counts, 128, 256)


@pytest.mark.parametrize("layer", [0, 2])
def test_a_layer_of_a_stack_is_some_of_the_groups_of_all_layers(layer):
    counts = jnp.array([3, 0, 5, 2])
    rows, stack = arrays(jnp.float32, (10, 128), (3, 4, 128, 256))
    wanted = by_loop(rows, stack[layer], tuple(counts.tolist()))
    of_layer = OfLayer(stack, jnp.asarray(layer))
    for run in (functools.partial(_in_stack, interpret=True), functools.partial(grouped_matmul, platform="cpu")):
        np.testing.assert_allclose(run(rows, of_layer, counts), wanted, atol=1e-4)


@pytest.mark.parametrize(
    ("counts", "d", "f", "dtype"),
    [
        ((17, 0, 16, 33), 40, 72, jnp.float32),  # whole tiles and parts of them; sides that no block divides
        ((0, 0, 70, 0), 32, 128, jnp.float32),  # all rows of one group, sides of whole blocks
        ((5, 1, 0, 40), 24, 136, jnp.bfloat16),
        ((0, 0), 8, 8, jnp.float32),  # no row at all: zeros
    ],
)
def test_the_kernels_of_gpus(counts, d, f, dtype):
    """Interpreted. A gradient in bfloat16 is rounded to it once."""
    check(functools.partial(interpreted, kernel="gpu"), counts, d, f, dtype, 1e-5 if dtype == jnp.float32 else 4e-3)


HOPPER = types.SimpleNamespace(platform="gpu", device_kind="H100", compute_capability="9.0", core_count=4)


@needs_tokamax
@pytest.mark.parametrize(("counts", "d", "f"), [((37, 0, 216), 128, 256), ((253,), 448, 128)])
def test_the_kernel_of_tokamax(counts, d, f, monkeypatch):
    """Interpreted."""
    from jax.experimental.pallas import mosaic_gpu

    rows, weights = arrays(jnp.bfloat16, (256, d), (len(counts), d, f))
    monkeypatch.setattr(backend, "get_default_device", lambda: HOPPER)
    with mosaic_gpu.force_gpu_interpret_mode():  # pyright: ignore
        got = mosaic_matmul.multiply(rows.at[-3:].set(jnp.nan), weights, jnp.asarray(counts, jnp.int32))
    want = by_loop(rows, weights, counts)
    assert got.dtype == want.dtype
    got, want = (np.asarray(x[:-3], np.float32) for x in (got, want))
    np.testing.assert_allclose(got, want, rtol=0, atol=4e-3 * np.abs(want).max())


def test_when_the_kernel_of_tokamax_is_taken(monkeypatch):
    """On a Hopper GPU, for bfloat16, whole blocks, and many rows for each group."""
    monkeypatch.setattr(mosaic_matmul, "installed", lambda: True)

    def taken(device, m=6144, d=128, f=256, dtype=jnp.bfloat16):
        rows, weights = jnp.zeros((m, d), dtype), jnp.zeros((2, d, f), dtype)
        monkeypatch.setattr(backend, "get_default_device", lambda: device)
        return mosaic_matmul.fits(rows, weights)

    assert taken(HOPPER)
    others = types.SimpleNamespace(platform="gpu", compute_capability="8.0"), types.SimpleNamespace(platform="cpu")
    assert not any(map(taken, others))
    refused = {"m": 6136}, {"m": 6148}, {"d": 96}, {"f": 192}, {"dtype": jnp.float32}
    assert not any(taken(HOPPER, **fields) for fields in refused)


@pytest.mark.parametrize("size", first_quick(1, [2, 16]))
@pytest.mark.parametrize("counts", [(3, 0, 5, 2), (0, 0, 0), (0, 40, 0, 0), (1, 1, 1, 1, 1), (16, 32, 2)])
def test_tiles_cover_every_row_once(counts, size):
    """Also where rows are left over, and where there are more groups than rows."""
    rows = sum(counts) + 2
    group, start, stop = map(np.asarray, tiles_of(jnp.asarray(counts, jnp.int32), rows, size))
    covered = [(g, row) for g, a, b in zip(group, start, stop, strict=True) for row in range(a, min(a + size, b))]
    assert sorted(row for _, row in covered) == list(range(sum(counts)))
    assert [g for g, _ in sorted(covered, key=lambda pair: pair[1])] == np.repeat(range(len(counts)), counts).tolist()
    assert len(group) <= rows // size + len(counts), "more tiles than any cut of these rows needs"


FOR_AN_H100 = """
import sys

import jax
import jax.numpy as jnp
from jax.extend import backend

from jaxrl_llm.models.experts.grouped_matmul import grouped_matmul
from jaxrl_llm.plan.chips import lowering_for, topology_devices
from experiments.scale.hlo_cost import measure
from experiments.scale.hlo import parse

dtype, groups, there = sys.argv[1], int(sys.argv[2]), sys.argv[3]
device = topology_devices("h100:1")[1][0]
where = jax.sharding.SingleDeviceSharding(device)
if there == "there":  # as on a machine that has one
    backend.get_default_device = lambda: device
m, d, f = 32768, 2048, 768

def gradients(rows, weights, counts, cotangent):
    run = lambda rows, weights: grouped_matmul(rows, weights, counts, "gpu")
    out, pull = jax.vjp(run, rows, weights)
    return out, *pull(cotangent)

shapes = ((m, d), dtype), ((groups, d, f), dtype), ((groups,), "int32"), ((m, f), dtype)
with lowering_for(device):
    lowered = jax.jit(gradients).lower(*(jax.ShapeDtypeStruct(s, t, sharding=where) for s, t in shapes))
compiled = lowered.compile()
text = compiled.as_text()
cost, _ = measure(parse(text), 1)
print(cost.flops / (3 * 2 * m * d * f), len(cost.unknown), compiled.memory_analysis().temp_size_in_bytes)
print(text.count('custom_call_target="mosaic_gpu'))
"""


@needs_cuda
@pytest.mark.parametrize(
    ("dtype", "groups", "there"),
    [
        ("bfloat16", 128, "planned"),
        ("float32", 128, "planned"),
        pytest.param("bfloat16", 8, "there", marks=needs_tokamax),
    ],
)
def test_compiled_for_an_h100(dtype, groups, there):
    """Of 4096 tokens with 8 of 128 experts each: three products and copies of the rows, where XLA's form takes 44 GiB.
    With many rows a group, and an H100 there, the first is tokamax's."""
    command = [sys.executable, "-c", FOR_AN_H100, dtype, str(groups), there]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    flops, unknown, temporaries, of_tokamax = map(float, ran.stdout.split())
    assert (flops, unknown, of_tokamax) == (1.0, 0, there == "there")
    assert temporaries < 4 * 32768 * 2048 * 2
