"""The plan that reads the compiled text: its roofline with the network, and a table that fits a terminal."""

import pytest

from experiments.scale.hlo_cost import Cost
from experiments.scale.hlo_table import Compiled, Part, Program, as_rows, roofline, table
from experiments.scale.wires import LINKS, Wires
from jaxrl_llm.plan.chips import CHIPS
from tests.experiments.test_wires import tpus


def test_the_roofline_with_the_network():
    """100 GFLOP, 1 GB and 1 GB over a link of a v5e: 0.51, 1.2 and 20 ms; 2 x 3 x 1e6 x 8000 / 4 FLOPs of the model."""
    cost = Cost(1e11, 1e9, {("all-gather", ((0, 1), (2, 3)), 0): (1.0, 1e9)})
    wires = Wires(LINKS["v5e"], tpus((2, 2, 1), (1, 2, 2, 1, 1)))
    line = roofline(Part("update", cost, tokens=8000, times=2, passes=3), CHIPS["v5e"], wires, 10**6)
    assert (round(line.compute, 6), round(line.memory, 6), round(line.network, 6)) == (508e-6, 1.221e-3, 20e-3)
    assert line.bound == "network"
    assert line.excess == pytest.approx(1e11 / 1.2e10)
    assert line.mfu == pytest.approx(1.2e10 / (20e-3 * 197e12))


def test_the_table_fits_a_terminal():
    """At the size of a 30 B model; a kernel that is not counted is named."""
    kinds = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")
    exchanges = {(kind, ((0, 1, 2, 3),), 0): (12345.0, 1.26e12) for kind in kinds}
    cost = Cost(5.2e14, 9.5e12, exchanges, frozenset({"a_kernel.1"}))
    parts = tuple(Part(name, cost, 262144, 12288, 3) for name in ("prefill", "decode"))
    program = Program("rollout", 6 * 2**30, 2**30, 45 * 2**30, 2**20, 555.0, parts, tpus((4, 4, 4), (1, 4, 16, 1, 1)))
    made = Compiled("v5p:4x4x4", CHIPS["v5p"], (1, 4, 16, 1), (4, 1, 1, 16), 3_300_000_000, (program,))
    lines = table(made).splitlines()
    assert max(map(len, lines)) <= 80
    assert "a_kernel.1" in lines[-1]
    each = as_rows(made)[1]
    assert each["step_s"] == pytest.approx(12288 * max(each[f"{kind}_s"] for kind in ("compute", "memory", "network")))
    assert any(line.startswith("decode   expert   ") and line.endswith("*") for line in lines)
