"""Collectives as XLA and libtpu spell them: how often they are counted, what they send, and which devices exchange."""

import pytest

from experiments.scale.hlo import Instruction, between_slices, device_groups, links_used, parse
from experiments.scale.hlo_cost import Cost, measure

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


@pytest.mark.parametrize(
    ("config", "links"),
    [
        ('"color_strategies":[{"phase_rings":[{"ring_type":"CW"}]},{"phase_rings":[{"ring_type":"CCW"}]}]', 2),
        (r'"strategy":"StrategyND","debug":"\nStrategyND{colors:3 phases:3 cores:{4 4 4}"', 6),
        (r'"strategy":"StrategyRing","debug":"\nStrategyRing{colors:1 phases:1 cores:{16}"', 2),
        ('"emitter":"1DAllGatherNonMajorDimImbalanced","debug":"group_size = 256"', 2),
        ('"emitter":"RotatedPincerEmitter"', 0),
    ],
)
def test_links_used(config, links):
    """As libtpu writes its algorithms; two ways round the SparseCores' torus, three colors in both directions."""
    assert links_used(Instruction("x", "all-gather", (), (), f"backend_config={{{config}}}", "")) == links


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
    assert measure(module, 2)[0].exchanges == {("all-reduce", groups, 0): (1.0, 128.0)}
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
    assert cost.exchanges == {("all-gather", ((0, 1),), 0): (1.0, 64.0)}
    assert cost.flops == 2 * 4**3
    assert cost.bytes == (64 + 64 + 128) + 3 * 64


def test_a_collective_on_the_sparse_cores_is_counted():
    """XLA:TPU calls it as a computation of their thread: two devices send 64 bytes once."""
    text = """HloModule m

%on_them (p: f32[4,4], t: token[]) -> f32[8,4] {
  %p = f32[4,4]{1,0} parameter(0)
  %t = token[] parameter(1)
  ROOT %g = f32[8,4]{1,0} all-gather(%p), channel_id=7, replica_groups={{0,1}}, dimensions={0}
}

ENTRY %main (x: f32[4,4]) -> f32[8,4] {
  %x = f32[4,4]{1,0} parameter(0)
  %t = token[] after-all()
  %s = ((f32[4,4], token[]), f32[8,4]) call-start(%x, %t), async_execution_thread="sparsecore", to_apply=%on_them
  ROOT %d = f32[8,4]{1,0} call-done(%s)
}
"""
    cost = measure(parse(text), 2)[0]
    assert cost.exchanges == {("all-gather", ((0, 1),), 0): (1.0, 64.0)}
    assert cost.bytes == 64 + 128


def test_a_ragged_all_to_all_sends_what_it_reads_and_an_even_load_uses():
    """Its second operand is where it writes; the others say which rows."""
    text = """HloModule ragged

ENTRY %main (x: bf16[48,8], y: bf16[48,8], s: s32[4]) -> bf16[48,8] {
  %x = bf16[48,8]{1,0} parameter(0)
  %y = bf16[48,8]{1,0} parameter(1)
  %s = s32[4]{0} parameter(2)
  ROOT %r = bf16[48,8]{1,0} ragged-all-to-all(%x, %y, %s, %s, %s, /*index=5*/%s), channel_id=1, replica_groups={{0,1,2,3}}
}
"""  # noqa: E501
    cost = measure(parse(text), 4, filled=2 / 3)[0]
    assert cost.collectives == {"ragged-all-to-all": (1.0, pytest.approx(2 * 32 * 8 * 3 / 4))}
    assert cost.bytes == pytest.approx(2 * 2 * 32 * 8)
