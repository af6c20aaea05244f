"""The losses of twenty steps under exact numerics, equal to stored ones on the processor that stored them.

`python -m tests.run.test_exact_losses` stores them anew.
"""

import json
import os
from importlib.metadata import version
from pathlib import Path

import pytest

import jaxrl_llm
from jaxrl_llm.ground import machine

STORED = Path(__file__).parents[1] / "golden" / "exact_losses.json"
FIELDS = {
    "model.numerics": "exact",
    "model.dtype": "bfloat16",
    "rollout.dtype": "bfloat16",
    "replay.mode": "R3",
    "mesh.shape": "(1,1,1,1)",
    "steps": 20,
    "evaluation.every": 20,
}


def here() -> dict[str, object]:
    """Return what decides the bits of a program: another processor or flag is given another kernel."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().split("\n\n")[0].splitlines() if info.exists() else []
    told = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    processor = " ".join(told.get(name, "?") for name in ("model name", "cpu family", "model", "stepping"))
    flags = os.environ.get("XLA_FLAGS", "")
    return {"processor": processor, "cores": len(machine.usable_cores()), "jaxlib": version("jaxlib"), "flags": flags}


def losses(workdir: Path) -> list[float]:
    # A warm start of its own: the cached one may be of a process with other flags.
    jaxrl_llm.train("grpo:smoke", workdir, FIELDS | {"warm_start.cache_dir": str(workdir.parent / "warm_start")})
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss/total" in row]
    assert len(steps) == 20
    assert all(row["check/sampler_equal"] == 1 for row in steps)
    return [row["loss/total"] for row in steps]


@pytest.mark.slow
def test_twenty_steps(tmp_path):
    stored = json.loads(STORED.read_text())
    found = losses(tmp_path / "run")
    if stored["on"] != here():
        pytest.skip(f"losses are stored for {stored['on']}, this is {here()}")
    assert found == stored["losses"]


if __name__ == "__main__":
    import tempfile

    from tests import conftest  # noqa: F401 (its flags)

    with tempfile.TemporaryDirectory() as folder:
        STORED.write_text(json.dumps({"on": here(), "losses": losses(Path(folder) / "run")}, indent=1) + "\n")
