"""The figures of docs/numerics.md are those of the stored results."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "numerics.md"
RESULTS = Path(__file__).parents[2] / "experiments" / "numerics" / "results"


def test_the_sources_of_differences():
    """A row of the table for each way in fast bfloat16; under exact nothing differs."""
    text, rows = PAGE.read_text(), json.loads((RESULTS / "sources.json").read_text())["rows"]
    by_way = {
        (row["way"], row["model"]): row for row in rows if (row["numerics"], row["dtype"]) == ("fast", "bfloat16")
    }
    ways = dict.fromkeys(way for way, _ in by_way)
    for way in ways:
        one, dense = by_way[way, "mixture"], by_way.get((way, "dense"))
        cells = [way, f"{one['equal']:.2%}", f"{one['k3']:.1e}", f"{one['experts_changed']:.2%}"]
        last = f"{dense['k3']:.1e} |" if dense else " |"
        assert " | ".join(["| " + cells[0], *cells[1:], last]) in text
    exact = json.loads((RESULTS / "sources_exact.json").read_text())["rows"]
    assert {row["dtype"] for row in exact} == {"float32", "bfloat16"}
    assert len(exact) >= 2 * len(ways)
    assert all(row["equal"] == 1 and row["k3"] == 0 and not row.get("experts_changed") for row in exact)


def test_the_cost():
    text = PAGE.read_text()
    for workload in ("S", "H"):
        for one in json.loads((RESULTS / f"cost_{workload}.json").read_text())["measured"]:
            cells = [f"{one['ratio'][part]:.2f}" for part in ("rollout_cpu_s", "train_cpu_s", "step")]
            assert " | ".join(["| " + workload, one["dtype"], *cells]) + " |" in text


def test_the_cost_of_a_tile():
    rows = json.loads((RESULTS / "tile_costs.json").read_text())
    for width, dtype in {(row["width"], row["dtype"]) for row in rows}:
        own = {row["rows"]: row for row in rows if (row["width"], row["dtype"]) == (width, dtype)}
        cells = [str(width), dtype, f"{own[32]['fast']:.0f}"]
        cells += [f"{own[size]['ratio']:.2f}" for size in (8, 16, 32, 64)]
        assert f"| {' | '.join(cells)} |" in PAGE.read_text()


@pytest.mark.long
@pytest.mark.slow
def test_the_measurement_itself(tmp_path):
    """A seed in bfloat16, as a user runs it on eight devices: fast differs in every way, exact in none.

    Without the flags of the tests, which break exactness from some number of rows on (docs/numerics.md).
    """
    to = tmp_path / "sources.json"
    command = [sys.executable, "-m", "experiments.numerics.sources", "--seeds=1", "--dtypes=bfloat16", f"--json={to}"]
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    subprocess.run(command, env=environment, cwd=PAGE.parents[1], check=True)
    rows = json.loads(to.read_text())["rows"]
    assert all((row["equal"] == 1) == (row["numerics"] == "exact") for row in rows)
    assert {row["model"] for row in rows} == {"mixture", "dense"}


def test_excess_precision():
    text = PAGE.read_text()
    rows = [json.loads(line) for line in (RESULTS / "excess_precision.jsonl").read_text().splitlines()]
    assert {row["xla_flags"] for row in rows} == {"", "--xla_allow_excess_precision=false"}
    blocks = [row for row in rows if row["model"] == "mixture, blocks"]
    words = [" and ".join(form(row) for row in blocks) for form in ("{k3:.1e}".format_map, "{changed:.2%}".format_map)]
    assert f"k3 is {words[0]}, and {words[1]} of experts" in text
    for row in (row for row in rows if row["model"] == "mixture"):
        name = "no excess precision" if row["xla_flags"] else "default"
        apart = ", ".join(f"{row['layers'][layer]['logits_apart'][0]:.3f}" for layer in (0, -1))
        cells = [name, str(row["seed"]), f"{row['equal']:.2%}", f"{row['k3']:.1e}", f"{row['changed']:.2%}", apart]
        assert f"| {' | '.join(cells)} |" in text
        assert f"on {row['gradient_equal']:.1%}" in text
        assert not any(layer["ties"] for layer in row["layers"])
        assert all(0.19 < layer["margin"] < 0.24 for layer in row["layers"])
        first, last = (row["layers"][layer]["logits_apart"][-1] for layer in (0, -1))
        assert 0.02 < first < 0.035
        assert 0.6 < last < 1.0
