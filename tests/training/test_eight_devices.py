"""Eight devices against one: answers, log-probs, routing, loss and gradients, on every kind of mesh and with replay."""

import itertools
import json
import os
import subprocess
import sys

import pytest

MESHES = [
    (8, 1, 1, 1),
    (1, 8, 1, 1),
    (2, 4, 1, 1),
    (1, 4, 1, 2),
    (1, 1, 8, 1),
    (1, 2, 4, 1),
    (2, 1, 2, 2),
    (1, 2, 2, 2),
    (2, 2, 2, 1),
    (1, 1, 4, 2),
]
IMPLEMENTATIONS = ("dense", "grouped", "blocks")  # with experts over devices, tokens move in the last two


def check(*cells):
    """Compared in a process of its own, since the number of devices is fixed when jax starts."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    ran = subprocess.run(
        [sys.executable, "-m", "tests.reference.eight_devices", json.dumps(cells)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"XLA_FLAGS": flags},
    )
    assert ran.returncode == 0, ran.stderr
    for cell, line in zip(cells, ran.stdout.splitlines(), strict=True):
        found = json.loads(line)
        assert all(found["same"].values()), (cell, found)
        assert found["trained"], cell
        assert max(found["errors"].values()) < 5e-5, (cell, found)


@pytest.mark.slow
def test_every_axis_at_once():
    """Rows, slices of parameters, experts and width over devices; the rollout's routing replayed."""
    check(("moe", "blocks", "R3", (1, 2, 2, 2), "padded"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "cell",
    [
        ("moe", "blocks", "R3", (1, 2, 2, 1, 2), "padded"),
        ("moe", "grouped", "R2", (1, 1, 2, 1, 4), "packed"),
        ("dense", "auto", "off", (1, 2, 1, 2, 2), "packed"),
        ("dense", "auto", "off", (2, 1, 1, 1, 4), "padded"),
    ],
    ids=str,
)
def test_rows_split_over_devices(cell):
    """Rows of 12 tokens, padded to 16 where four devices share one."""
    check(cell)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_mesh(mesh):
    experts = itertools.product(("moe",), IMPLEMENTATIONS, ("R2", "R3"), (mesh,), ("padded",))
    check(("dense", "auto", "off", mesh, "padded"), *experts)
