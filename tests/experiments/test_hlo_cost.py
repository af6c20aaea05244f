"""FLOPs, bytes and collectives of small compiled programs against what they must be."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from experiments.scale.hlo import Shape, parse
from experiments.scale.hlo_cost import Cost, measure
from jaxrl_llm.ground import sharding

N, D, F = 16, 32, 64


def costs(f, *args, devices=1):
    return measure(parse(jax.jit(f).lower(*args).compile().as_text()), devices)


def arrays(*shapes):
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]


def test_a_matmul_and_a_batched_one():
    once, turn = costs(jnp.matmul, *arrays((N, D), (D, F)))
    assert once.flops == 2 * N * D * F
    assert once.bytes >= 4 * (N * D + D * F + N * F)
    assert turn == Cost()
    batched, _ = costs(lambda a, b: jnp.einsum("bnd,bdf->bnf", a, b), *arrays((3, N, D), (3, D, F)))
    assert batched.flops == 2 * 3 * N * D * F


def test_a_scan_counts_every_turn():
    """XLA's own analysis counts the body once; forward and backward of 5 layers are 5 x 3 products."""

    def loss(x, w):
        return jnp.sum(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0])

    once, _ = costs(jax.grad(loss, (0, 1)), *arrays((N, D), (5, D, D)))
    assert once.flops == 5 * 3 * 2 * N * D * D
    nested, _ = costs(lambda x, w: lax.fori_loop(0, 7, lambda _, x: lax.scan(lambda x, w: (x @ w, None), x, w)[0], x),
                      *arrays((N, D), (5, D, D)))  # fmt: skip
    assert nested.flops == 7 * 5 * 2 * N * D * D


def test_a_loop_of_unknown_length_is_one_turn():
    """What micro-batches and decode steps are; a loop inside it that is as unknown counts for nothing."""

    def f(count, x, w):
        def turn(i, x):
            inner = lax.fori_loop(0, i, lambda _, x: x @ w @ w, x)
            return lax.scan(lambda x, _: (jnp.tanh(x @ w), None), inner, None, length=3)[0]

        return lax.fori_loop(0, count, turn, x @ w)

    once, turn = costs(f, jax.ShapeDtypeStruct((), jnp.int32), *arrays((N, D), (D, D)))
    assert once.flops == 2 * N * D * D
    assert turn.flops == 3 * 2 * N * D * D


def test_the_dearer_branch_counts():
    def f(deep, x, w):
        return lax.cond(deep, lambda: x @ w @ w, lambda: x @ w)

    once, _ = costs(f, jax.ShapeDtypeStruct((), bool), *arrays((N, D), (D, D)))
    assert once.flops == 2 * 2 * N * D * D


def test_a_slice_of_a_stack_is_read_as_the_slice():
    """A scan over stacked weights reads each once, not the stack at every layer."""
    layers = 64
    once, _ = costs(lambda x, w: lax.scan(lambda x, w: (x + w, None), x, w)[0], *arrays((N, D), (layers, N, D)))
    read_once = 4 * layers * N * D
    assert read_once < once.bytes < 16 * read_once < 4 * layers**2 * N * D


@pytest.mark.parametrize(
    ("collective", "kind", "sent"),
    [
        (lambda x: lax.psum(x, "fsdp"), "all-reduce", 2 * 3 / 4),
        (lambda x: lax.all_gather(x, "fsdp"), "all-gather", 3),
        (lambda x: lax.psum_scatter(x, "fsdp", tiled=True), "reduce-scatter", 3 / 4),
        (lambda x: lax.all_to_all(x, "fsdp", 0, 0, tiled=True), "all-to-all", 3 / 4),
        (lambda x: lax.ppermute(x, "fsdp", [(i, (i + 1) % 4) for i in range(4)]), "collective-permute", 1),
        (lambda x: lax.psum(x, "tensor"), "all-reduce", 0),
    ],
)
def test_bytes_that_a_collective_sends(collective, kind, sent):
    """Of a device's operand, 8 x D floats on each of 4 devices: the bandwidth-optimal algorithm's share."""
    mesh = sharding.make_mesh((1, 4, 1, 1))
    split = jax.shard_map(
        collective, mesh=mesh, in_specs=PartitionSpec("fsdp"), out_specs=PartitionSpec("fsdp"), check_vma=False
    )
    x = jax.ShapeDtypeStruct((32, D), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("fsdp")))
    once, _ = costs(lambda x: split(x), x, devices=4)
    assert once.sent == sent * 4 * 8 * D
    if sent:
        assert once.collectives == {kind: (1.0, once.sent)}


def test_a_convolution_counts_no_padding():
    """As XLA:TPU spells a batched matmul: of the 7 places each of 4 taps meets the input in 4."""
    text = """HloModule m

ENTRY %main (a: f32[2,4,3], b: f32[4,3,5]) -> f32[2,7,5] {
  %a = f32[2,4,3]{2,1,0} parameter(0)
  %b = f32[4,3,5]{2,1,0} parameter(1)
  ROOT %c = f32[2,7,5]{2,1,0} convolution(%a, %b), window={size=4 pad=3_3}, dim_labels=b0f_0io->b0f
}
"""
    assert measure(parse(text), 1)[0].flops == 2 * 2 * 5 * 3 * 4 * 4


def test_a_slice_inside_a_fusion_inside_a_fusion_is_all_that_is_read():
    """As XLA:TPU spells a product with one layer of a stack."""
    text = """HloModule m

%slice (s: f32[6,8,16], i: s32[]) -> f32[8,16] {
  %s = f32[6,8,16]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %z = s32[] constant(0)
  %d = f32[1,8,16]{2,1,0} dynamic-slice(%s, %i, %z, %z), dynamic_slice_sizes={1,8,16}
  ROOT %b = f32[8,16]{1,0} bitcast(%d)
}

%product (s: f32[6,8,16], i: s32[], x: f32[4,8]) -> f32[4,16] {
  %s = f32[6,8,16]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %x = f32[4,8]{1,0} parameter(2)
  %w = f32[8,16]{1,0} fusion(%s, %i), kind=kLoop, calls=%slice
  ROOT %y = f32[4,16]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (s: f32[6,8,16], i: s32[], x: f32[4,8]) -> f32[4,16] {
  %s = f32[6,8,16]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %x = f32[4,8]{1,0} parameter(2)
  ROOT %y = f32[4,16]{1,0} fusion(%s, %i, %x), kind=kOutput, calls=%product
}
"""
    cost = measure(parse(text), 1)[0]
    assert cost.bytes == 4 * (8 * 16 + 1 + 4 * 8 + 4 * 16)  # one layer, its number, the input and the output
    assert cost.flops == 2 * 4 * 8 * 16


def test_memory_on_the_chip_takes_no_bandwidth():
    text = """HloModule m

ENTRY %main (a: f32[8,16]) -> f32[8,16] {
  %a = f32[8,16]{1,0:T(8,128)} parameter(0)
  %s = (f32[8,16]{1,0:T(8,128)S(1)}, f32[8,16]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%a)
  ROOT %d = f32[8,16]{1,0:T(8,128)S(1)} copy-done(%s)
}
"""
    assert measure(parse(text), 1)[0].bytes == 4 * 8 * 16


@pytest.mark.parametrize("fused", [False, True])
def test_a_slice_that_the_chip_keeps_has_been_read(fused):
    """One layer of six, from memory to memory of the core."""
    layer = "f32[1,8,16]{2,1,0:T(8,128)S(1)} dynamic-slice(%s, %i, %i, %i), dynamic_slice_sizes={1,8,16}"
    text = f"""HloModule m

%take (s: f32[6,8,16], i: s32[]) -> f32[1,8,16] {{
  %s = f32[6,8,16]{{2,1,0:T(8,128)}} parameter(0)
  %i = s32[]{{:S(6)}} parameter(1)
  ROOT %d = {layer}
}}

ENTRY %main (s: f32[6,8,16], i: s32[]) -> f32[1,8,16] {{
  %s = f32[6,8,16]{{2,1,0:T(8,128)}} parameter(0)
  %i = s32[]{{:S(6)}} parameter(1)
  ROOT %d = {"f32[1,8,16]{2,1,0:T(8,128)S(1)} fusion(%s, %i), kind=kLoop, calls=%take" if fused else layer}
}}
"""
    assert measure(parse(text), 1)[0].bytes == 4 * 8 * 16 + 4 * fused  # a fusion reads its number too


def test_a_kernel_that_is_given_a_stack_reads_one_layer():
    text = """HloModule m

ENTRY %main (x: bf16[8,16], w: bf16[12,16,32]) -> bf16[8,32] {
  %x = bf16[8,16]{1,0} parameter(0)
  %w = bf16[12,16,32]{2,1,0} parameter(1)
  ROOT %gmm = bf16[8,32]{1,0} custom-call(%x, %w), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/one_of_3_layers/jit(gmm)/pallas_call"}
}
"""  # noqa: E501
    cost = measure(parse(text), 1)[0]
    assert cost.bytes == 2 * (8 * 16 + 12 // 3 * 16 * 32 + 8 * 32)
    assert cost.flops == 2 * 8 * 16 * 32


@pytest.mark.parametrize(("space", "moved"), [("S(1)", 1), ("", 2)])
def test_a_slice_that_is_started_reads_the_slice(space, moved):
    """Two of eight rows, to memory of the core or of the chip; what starts it names the operand before the result."""
    text = f"""HloModule m

ENTRY %main (a: f32[8,16]) -> f32[2,16] {{
  %a = f32[8,16]{{1,0:T(8,128)}} parameter(0)
  %s = ((f32[8,16]{{1,0:T(8,128)}}), f32[2,16]{{1,0:T(8,128){space}}}, u32[]) slice-start(%a), slice={{[0:2], [0:16]}}
  ROOT %d = f32[2,16]{{1,0:T(8,128){space}}} slice-done(%s)
}}
"""
    assert measure(parse(text), 1)[0].bytes == moved * 4 * 2 * 16


def test_what_another_shape_is_given_to_is_read_through_it():
    """A fusion inside a fusion that only reshapes its operand hands it on to what reads it."""
    text = """HloModule m

%shaped (p: f32[8,16]) -> f32[128] {
  %p = f32[8,16]{1,0} parameter(0)
  ROOT %b = f32[128]{0} bitcast(%p)
}

%body (q: f32[8,16]) -> f32[128] {
  %q = f32[8,16]{1,0} parameter(0)
  %r = f32[128]{0} fusion(%q), kind=kLoop, calls=%shaped
  ROOT %n = f32[128]{0} negate(%r)
}

ENTRY %main (a: f32[8,16]) -> f32[128] {
  %a = f32[8,16]{1,0} parameter(0)
  ROOT %f = f32[128]{0} fusion(%a), kind=kLoop, calls=%body
}
"""
    assert measure(parse(text), 1)[0].bytes == 2 * 4 * 8 * 16


@pytest.mark.parametrize(
    ("given", "moved"),
    [
        ("bf16[1,8] slice(%c), slice={[2:3], [0:8]}", 4 * 8 + 2 * 8),
        ("bf16[6,8] dynamic-update-slice(%c, %n, %n, %n)", 4 * 6 * 8 + 2 * 6 * 8),
    ],
)
def test_a_slice_of_what_is_converted_reads_the_slice(given, moved):
    """In the type that it is read in. What is converted to be updated is no update in place."""
    text = f"""HloModule m

%body (p: f32[6,8]) -> bf16[6,8] {{
  %p = f32[6,8]{{1,0}} parameter(0)
  %c = bf16[6,8]{{1,0}} convert(%p)
  %n = bf16[1,8]{{1,0}} constant(0)
  ROOT %r = {given}
}}
ENTRY %main (a: f32[6,8]) -> bf16[6,8] {{
  %a = f32[6,8]{{1,0}} parameter(0)
  ROOT %x = {given.split()[0]} fusion(%a), kind=kLoop, calls=%body
}}
"""
    assert measure(parse(text), 1)[0].bytes == moved


def test_a_line_break_in_an_attribute_ends_nothing():
    """Kernels carry JSON with line breaks; what follows belongs to the same computation."""
    text = """HloModule m

ENTRY %main (a: f32[4,3], b: f32[3,5]) -> f32[4,5] {
  %a = f32[4,3]{1,0} parameter(0)
  %b = f32[3,5]{1,0} parameter(1), frontend_attributes={kernel_metadata={
"block":"{1}"
}}, metadata={op_name="b"}
  ROOT %c = f32[4,5]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}, execution_thread="main"
"""
    module = parse(text)
    assert measure(module, 1)[0].flops == 2 * 4 * 3 * 5
    assert module.entry.by_name["b"].attributes.endswith('metadata={op_name="b"}')


def test_against_xla():
    """Without a loop both must agree on a program of matmuls, but for what XLA counts of everything else."""

    def f(x, w):
        return jnp.sum(jax.nn.silu(x @ w) @ w.T)

    compiled = jax.jit(jax.grad(f, (0, 1))).lower(*arrays((64, 128), (128, 256))).compile()
    ours = measure(parse(compiled.as_text()), 1)[0].flops
    assert ours <= compiled.cost_analysis()["flops"] <= 1.1 * ours


def test_shapes():
    assert Shape("bf16", (3, 5)).bytes == 30
    assert Shape("s4", (3,)).bytes == 2
    assert Shape("pred", ()).bytes == 1
    assert Shape("f8e4m3fn", (7,)).bytes == 7
    with pytest.raises(ValueError, match="no ENTRY"):
        parse("HloModule nothing")


def test_costs_add_up():
    one = Cost(1.0, 2.0, {("all-reduce", ((0, 1),), 0): (0.5, 4.0), ("all-reduce", ((0, 2),), 0): (0.5, 4.0)})
    both = one * 3 + functools.reduce(Cost.__add__, [Cost(unknown=frozenset({"kernel"})), one])
    assert (both.flops, both.bytes, both.sent) == (4, 8, 32)
    assert both.collectives == {"all-reduce": (4.0, 32.0)}
    assert both.unknown == {"kernel"}
    assert np.isclose(Cost().sent, 0)


CUDNN = """HloModule attention

ENTRY %main (q: bf16[2,64,4,8], k: bf16[2,COLUMNS,4,8], mask: bf16[2,1,64,COLUMNS]) -> bf16[2,4,64,8] {
  %q = bf16[2,64,4,8]{3,2,1,0} parameter(0)
  %k = bf16[2,COLUMNS,4,8]{3,2,1,0} parameter(1)
  %mask = bf16[2,1,64,COLUMNS]{3,2,1,0} parameter(2)
  %run = (bf16[2,4,64,8]{3,1,2,0}, u8[0]{0}) custom-call(%q, %k, %k, %mask), custom_call_target="__cudnn$fmhaNAME", backend_config={"cudnn_fmha_backend_config":{"mask_type":"MASK"}}
  ROOT %out = bf16[2,4,64,8]{3,1,2,0} get-tuple-element(%run), index=0
}
"""  # noqa: E501


SPLASH = """HloModule attention

ENTRY %main (blocks: s8[4,8,8], q: bf16[2,4,64,8], k: bf16[2,2,COLUMNS,8]) -> bf16[2,4,64,8] {
  %blocks = s8[4,8,8]{2,1,0} parameter(0)
  %q = bf16[2,4,64,8]{3,2,1,0} parameter(1)
  %k = bf16[2,2,COLUMNS,8]{3,2,1,0} parameter(2)
  ROOT %splash_mha_NAME_segmented.3 = bf16[2,4,64,8]{3,2,1,0} custom-call(%blocks, %q, %k, %k), custom_call_target="tpu_custom_call"
}
"""  # noqa: E501


@pytest.mark.parametrize("columns", [64, 256])
@pytest.mark.parametrize(("name", "products"), [("fwd", 2), ("dkv", 4), ("dq", 3)])
def test_attention_by_splash(name, products, columns):
    """Causal: half of the 64 x 64 pairs, 2 FLOPs each; the first operand says which blocks of the mask are empty. 256:
    a quarter of the queries of a row that four devices share."""
    once, _ = measure(parse(SPLASH.replace("NAME", name).replace("COLUMNS", str(columns))), 1)
    assert once.flops == products * 2 * 4 * 64 * columns * 8
    assert not once.unknown


@pytest.mark.parametrize(
    ("name", "mask", "columns", "products"),
    [
        ("Softmax", "CAUSAL", 64, 2 / 2),
        ("ScaleBiasSoftmax", "NO_MASK", 64, 2),
        ("ScaleBiasSoftmax", "NO_MASK", 256, 2),
        ("SoftmaxBackward", "CAUSAL", 64, 5 / 2),
    ],
)
def test_attention_by_cudnn(name, mask, columns, products):
    """2 rows, 4 heads, 64 queries and all pairs with the columns, of which a causal mask leaves half, 8 numbers a
    head."""
    once, _ = measure(parse(CUDNN.replace("NAME", name).replace("MASK", mask).replace("COLUMNS", str(columns))), 1)
    assert once.flops == products * 2 * 2 * 4 * 64 * columns * 8
    assert not once.unknown


SCATTER = """HloModule cache

%%keep (a: f32[], b: f32[]) -> f32[] {
  %%a = f32[] parameter(0)
  ROOT %%b = f32[] parameter(1)
}

%%body (cache: f32[%(rows)d,8], at: s32[2,1], new: f32[2,8]) -> f32[%(rows)d,8] {
  %%cache = f32[%(rows)d,8] parameter(0)
  %%at = s32[2,1] parameter(1)
  %%new = f32[2,8] parameter(2)
  %%zero = f32[] constant(0)
  %%empty = f32[%(rows)d,8] broadcast(%%zero), dimensions={}
  ROOT %%put = f32[%(rows)d,8] scatter(%%%(into)s, %%at, %%new), to_apply=%%keep
}

ENTRY %%main (cache: f32[%(rows)d,8], at: s32[2,1], new: f32[2,8]) -> f32[%(rows)d,8] {
  %%cache = f32[%(rows)d,8] parameter(0)
  %%at = s32[2,1] parameter(1)
  %%new = f32[2,8] parameter(2)
  ROOT %%fusion = f32[%(rows)d,8] fusion(%%cache, %%at, %%new), kind=kInput, calls=%%body
}
"""


def test_a_scatter_writes_its_places_and_not_the_array():
    """What a decode step writes into a cache; a scatter into zeros that it makes itself writes all of them."""
    small, large = (measure(parse(SCATTER % {"rows": n, "into": "cache"}), 1)[0].bytes for n in (100, 1000))
    assert small == large == 2 * 4 * 2 * 8 + 4 * 2  # reads and writes two rows, and reads where they go
    assert measure(parse(SCATTER % {"rows": 1000, "into": "empty"}), 1)[0].bytes == 4 * 1000 * 8 + 4 * 2 * 8 + 4 * 2
