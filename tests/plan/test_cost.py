"""FLOPs, bytes and collectives of small compiled programs against what they must be."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm.ground import sharding
from jaxrl_llm.plan.cost import Cost, measure
from jaxrl_llm.plan.hlo import Instruction, Shape, between_slices, device_groups, parse

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


def test_a_collective_of_every_layer():
    mesh = sharding.make_mesh((1, 2, 1, 2))

    def body(x, _):
        return lax.psum(jnp.tanh(x), "tensor"), None

    split = jax.shard_map(
        lambda x: lax.scan(body, x, None, length=6)[0],
        mesh=mesh,
        in_specs=PartitionSpec("fsdp"),
        out_specs=PartitionSpec("fsdp"),
        check_vma=False,
    )
    once, _ = costs(split, *arrays((N, D)), devices=4)
    assert once.collectives == {"all-reduce": (6.0, 6 * 2 * (1 / 2) * 4 * N * D / 2)}


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


TPU = """HloModule m

%product (p0: f32[8,16], p1: f32[16,4]) -> f32[8,4] {
  %p0 = f32[8,16]{1,0:T(8,128)} parameter(0)
  %p1 = f32[16,4]{1,0:T(8,128)S(1)} parameter(1)
  ROOT %d = f32[8,4]{1,0:T(8,128)} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%all-reduce-scatter.1 (p0: f32[8,16], p1: f32[16,4]) -> f32[8,4] {
  %p0 = f32[8,16]{1,0:T(8,128)} parameter(0)
  %p1 = f32[16,4]{1,0:T(8,128)S(1)} parameter(1)
  %f = f32[8,4]{1,0:T(8,128)} fusion(%p0, %p1), kind=kOutput, calls=%product
  ROOT %r = f32[8,4]{1,0:T(8,128)} all-reduce(%f), replica_groups={{0,1},{2,3}}, to_apply=%add
}

%wrapped (p: f32[8,16]) -> f32[4,16] {
  %p = f32[8,16]{1,0:T(8,128)} parameter(0)
  ROOT %r = f32[4,16]{1,0:T(8,128)} reduce-scatter(%p), replica_groups=[2,2]<=[4], dimensions={0}, to_apply=%add
}

%body (c: (s32[], f32[8,16], s32[])) -> (s32[], f32[8,16], s32[]) {
  %c = (s32[]{:T(128)}, f32[8,16]{1,0:T(8,128)}, s32[]{:T(128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%c), index=0
  %v = f32[8,16]{1,0:T(8,128)} get-tuple-element(%c), index=1
  %n = s32[]{:T(128)} get-tuple-element(%c), index=2
  %g = f32[16,16]{1,0:T(8,128)} all-gather(%v), replica_groups=mesh['a'=2,'b'=2] {'b'}, dimensions={0}
  ROOT %o = (s32[]{:T(128)}, f32[8,16]{1,0:T(8,128)}, s32[]{:T(128)}) tuple(%i, %v, %n)
}

%condition (c: (s32[], f32[8,16], s32[])) -> pred[] {
  %c = (s32[]{:T(128)}, f32[8,16]{1,0:T(8,128)}, s32[]{:T(128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%c), index=0
  %n = s32[]{:T(128)} get-tuple-element(%c), index=2
  ROOT %more = pred[]{:T(512)} compare(%n, %i), direction=GT
}

ENTRY %main (a: f32[8,16], b: f32[16,4]) -> f32[8,4] {
  %a = f32[8,16]{1,0:T(8,128)} parameter(0)
  %b = f32[16,4]{1,0:T(8,128)S(1)} parameter(1)
  %first = s32[]{:T(128)} constant(-2)
  %five = s32[]{:T(128)} constant(5)
  %last = s32[]{:T(128)} copy(%five)
  %start = (s32[]{:T(128)}, f32[8,16]{1,0:T(8,128)}, /*index=2*/s32[]{:T(128)}) tuple(%first, %a, %last)
  %loop = (s32[]{:T(128)}, f32[8,16]{1,0:T(8,128)}, s32[]{:T(128)}) while(%start), condition=%condition, body=%body
  %begun = ((f32[8,16]{1,0:T(8,128)}), f32[4,16]{1,0:T(8,128)}, u32[]{:S(2)}) async-start(%a), calls=%wrapped
  %done = f32[4,16]{1,0:T(8,128)} async-done(%begun)
  ROOT %out = f32[8,4]{1,0:T(8,128)} fusion(%a, %b), kind=kOutput, calls=%all-reduce-scatter.1
}
"""


@pytest.mark.parametrize("order", ["", ", device_ids=(0,2,1,3)", ", device_ids=([2,2]T(1,0))"])
def test_the_dialect_of_tpus(order):
    """From -2 to 5 a loop whose length the compiler did not note makes 7 turns. An all-reduce that is fused with a
    slice is a reduce-scatter, which sends half of 8 x 4 floats. What an async pair wraps counts once."""
    once, turn = measure(parse(TPU.replace("'b'=2]", f"'b'=2]{order}")), devices=4)
    assert once.flops == 2 * 8 * 16 * 4
    assert once.collectives == {
        "all-gather": (7.0, 7 * 4 * 8 * 16),
        "reduce-scatter": (2.0, 4 * 8 * 16 / 2 + 4 * 8 * 4 / 2),
    }
    assert turn == Cost()


HOSTS = '_xla_megascale_target={},_xla_megascale_transfer_type="{}"'


@pytest.mark.parametrize(
    ("attributes", "groups"),
    [
        ("replica_groups={{0,2},{1,3}}, use", [(0, 2), (1, 3)]),
        ("replica_groups=[2,2]<=[4], use", [(0, 1), (2, 3)]),
        ("replica_groups=[2,2]<=[2,2]T(1,0), use", [(0, 2), (1, 3)]),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}, use", [(0, 2), (1, 3)]),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'b'}, use", [(0, 2), (1, 3)]),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a','b'}, use", [(0, 2, 1, 3)]),
        ("replica_groups={}, use", [(0, 1, 2, 3)]),
        ("source_target_pairs={{0,1},{2,2}}, use", [(0, 1)]),
        (HOSTS.format('"{1,2}x{0:1}"', "ALL_REDUCE"), [(100000, 200000), (100001, 200001)]),
        (HOSTS.format("{{100000,200000},{100001,200001}}", "ALL_TO_ALL"), [(100000, 200000), (100001, 200001)]),
        (HOSTS.format("{{100001->200000}}", "ONE_TO_ONE"), [(100001, 200000)]),
    ],
)
def test_which_devices_exchange(attributes, groups):
    """As XLA spells groups of four devices, and libtpu the transfers of hosts between two slices."""
    assert device_groups(Instruction("x", "send", (), (), attributes, ""), 4) == tuple(groups)


def test_a_transfer_of_hosts_is_a_collective_between_slices():
    """An all-reduce of 4 x 8 floats by two slices: each device sends 2 x 128 bytes x 1/2."""
    text = """HloModule m

ENTRY %main (a: f32[4,8]) -> token[] {
  %a = f32[4,8]{1,0:T(8,128)} parameter(0)
  %t = token[] after-all()
  %s = (f32[4,8]{1,0:T(8,128)}, u32[], token[]) send(%a, %t), channel_id=2, is_host_transfer=true, frontend_attributes={TARGET}
  ROOT %d = token[] send-done(%s), channel_id=2, is_host_transfer=true
}
"""  # noqa: E501
    module = parse(text.replace("TARGET", HOSTS.format('"{1,2}x{0:1}"', "ALL_REDUCE")))
    groups = ((100000, 200000), (100001, 200001))
    assert measure(module, 2)[0].exchanges == {("all-reduce", groups): (1.0, 128.0)}
    assert between_slices(module.entry.by_name["a"]) == ""


def test_a_collective_beside_other_work_is_counted_where_it_starts():
    """XLA:TPU names the all-gather in the fusion that starts it, in each that computes beside it and in the one that
    ends it: two devices send 64 bytes once; the product beside it moves its own 3 x 64."""
    text = """HloModule m

%start (p: f32[4,4]) -> (f32[4,4], f32[8,4]) {
  %p = f32[4,4]{1,0} parameter(0)
  %g = f32[8,4]{1,0} all-gather(%p), channel_id=7, replica_groups={{0,1}}, dimensions={0}
  ROOT %t = (f32[4,4]{1,0}, f32[8,4]{1,0}) tuple(%p, %g)
}

%async_collective_fusion.1 (p: f32[4,4], q: f32[8,4], a: f32[4,4], b: f32[4,4]) -> (f32[4,4], f32[4,4], f32[8,4]) {
  %a = f32[4,4]{1,0} parameter(2)
  %b = f32[4,4]{1,0} parameter(3)
  %m = f32[4,4]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %p = f32[4,4]{1,0} parameter(0)
  %q = f32[8,4]{1,0} parameter(1)
  %g = f32[8,4]{1,0} all-gather(%p), channel_id=7, replica_groups={{0,1}}, dimensions={0}
  ROOT %t = (f32[4,4]{1,0}, f32[4,4]{1,0}, f32[8,4]{1,0}) tuple(%m, %p, %g)
}

%done (p: f32[4,4], q: f32[8,4]) -> f32[8,4] {
  %p = f32[4,4]{1,0} parameter(0)
  %q = f32[8,4]{1,0} parameter(1)
  ROOT %g = f32[8,4]{1,0} all-gather(%p), channel_id=7, replica_groups={{0,1}}, dimensions={0}
}

ENTRY %main (x: f32[4,4], a: f32[4,4], b: f32[4,4]) -> f32[8,4] {
  %x = f32[4,4]{1,0} parameter(0)
  %a = f32[4,4]{1,0} parameter(1)
  %b = f32[4,4]{1,0} parameter(2)
  %async-collective-start = (f32[4,4]{1,0}, f32[8,4]{1,0}) fusion(%x), kind=kCustom, calls=%start
  %s = f32[4,4]{1,0} get-tuple-element(%async-collective-start), index=0
  %r = f32[8,4]{1,0} get-tuple-element(%async-collective-start), index=1
  %beside = (f32[4,4]{1,0}, f32[4,4]{1,0}, f32[8,4]{1,0}) fusion(%s, %r, %a, %b), kind=kCustom, calls=%async_collective_fusion.1
  %s2 = f32[4,4]{1,0} get-tuple-element(%beside), index=1
  %r2 = f32[8,4]{1,0} get-tuple-element(%beside), index=2
  ROOT %async-collective-done = f32[8,4]{1,0} fusion(%s2, %r2), kind=kCustom, calls=%done
}
"""  # noqa: E501
    cost = measure(parse(text), 2)[0]
    assert cost.exchanges == {("all-gather", ((0, 1),)): (1.0, 64.0)}
    assert cost.flops == 2 * 4**3
    assert cost.bytes == (64 + 64 + 128) + 3 * 64


def test_memory_on_the_chip_takes_no_bandwidth():
    text = """HloModule m

ENTRY %main (a: f32[8,16]) -> f32[8,16] {
  %a = f32[8,16]{1,0:T(8,128)} parameter(0)
  %s = (f32[8,16]{1,0:T(8,128)S(1)}, f32[8,16]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%a)
  ROOT %d = f32[8,16]{1,0:T(8,128)S(1)} copy-done(%s)
}
"""
    assert measure(parse(text), 1)[0].bytes == 4 * 8 * 16


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
    one = Cost(1.0, 2.0, {("all-reduce", ((0, 1),)): (0.5, 4.0), ("all-reduce", ((0, 2),)): (0.5, 4.0)})
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
