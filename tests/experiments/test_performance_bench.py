"""The benchmark on a workload small enough for a test: ours alone, the real rollout and training step in a process."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from experiments.performance import bench, ours, profile, sweep, turns
from experiments.performance import workload as workloads

TINY = {
    "L": 1,
    "d": 16,
    "H": 2,
    "KV": 1,
    "hd": 8,
    "E": 4,
    "k": 2,
    "ff": 16,
    "V": 100,
    "P": 20,
    "C": 20,
    "NP": 2,
    "G": 4,
}


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(TINY | {"lengths": "lognormal"}))
    return path


def test_shipped_workloads_have_the_published_sizes():
    """S 3.38 M parameters of which 1.00 M active; M 20.6 M and 6.19 M (what the peers' own models count)."""
    s, m = workloads.load("S"), workloads.load("M")
    assert [round(x / 1e4) for x in (s.parameters, s.active_parameters)] == [338, 100]
    assert [round(x / 1e4) for x in (m.parameters, m.active_parameters)] == [2061, 619]
    assert s.total_tokens() == 64 * (32 + 64)
    assert s.train_flops() == 6 * s.active_parameters * 6144


def test_lengths_have_ten_times_between_median_and_longest():
    w = workloads.Workload(**(TINY | {"C": 640, "NP": 64, "G": 16, "lengths": "lognormal:3"}))
    lengths = sorted(w.answer_lengths())
    assert lengths[-1] == 640
    assert 55 <= lengths[len(lengths) // 2] <= 75
    assert w.answer_lengths() == w.answer_lengths()


def test_summary_takes_the_best_step_after_the_first():
    steps = [
        {"rollout_cpu_s": r, "train_cpu_s": t, "peak_rss_mb": m, "wall_s": 9.0}
        for r, t, m in ((10.0, 20.0, 1.0), (2.0, 3.0, 5.0), (1.0, 4.0, 4.0))
    ]
    summary = turns.summary(steps, tokens=100)
    expected = {"rollout_cpu_s": 1.0, "rollout_tokens_per_cpu_s": 100.0, "train_cpu_s": 3.0, "peak_rss_mb": 5.0}
    assert {name: summary[name] for name in expected} == expected
    assert summary["compile_s"] == 10 + 20 - 1 - 3


@pytest.mark.slow
def test_a_step_of_ours(tiny):
    """Rollout and update as the trainer runs them: prescribed lengths, finite parameters, a time for each part."""
    w = workloads.load(str(tiny))
    system = ours.System(w)
    before = jax.tree.map(lambda x: x.copy(), system.state.trained.policy)
    figures = ours.timed_step(system, 0)
    assert figures["tokens"] == sum(w.answer_lengths())
    assert min(figures[name] for name in ("rollout_cpu_s", "train_cpu_s", "wall_s")) > 0
    moved = jax.tree.map(
        lambda a, b: bool(jnp.any(a != b) & jnp.all(jnp.isfinite(b))), before, system.state.trained.policy
    )
    assert all(jax.tree.leaves(moved))


def test_sweeps_vary_one_thing():
    w = workloads.load("S")
    assert [p.E for p, _ in sweep.points("experts", w).values()] == [8, 16, 32, 64]
    assert len({p.active_parameters - p.L * p.d * p.E for p, _ in sweep.points("experts", w).values()}) == 1
    even, waits, refilled, packed = (p for p, _ in sweep.points("lengths", w).values())
    assert waits == refilled == packed
    assert abs(even.answer_tokens() / waits.answer_tokens() - 1) < 0.05
    with pytest.raises(ValueError, match="sweep='depth'"):
        sweep.points("depth", w)


@pytest.mark.slow
def test_the_command(tiny, tmp_path):
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "experiments.performance.bench", "--workload", str(tiny), "--json", str(out)]
    done = subprocess.run(
        [*command, "--peers", "none", "--repeats", "1"], capture_output=True, text=True, cwd=turns.ROOT
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert all(result[name] > 0 for name in ("rollout_cpu_s", "train_cpu_s", "peak_rss_mb", "compile_s"))
    assert result["steps"][0]["tokens"] == sum(bench.workloads.load(str(tiny)).answer_lengths())
    assert "| jaxrl_llm |" in done.stdout


def test_a_draw_is_timed_by_the_samplers_settings():
    timed = profile.draws(2, 2048, repeats=1)
    assert list(timed) == ["temperature 1", "top_k 50", "top_p 0.95", "top_p 0.95, flat"]
    assert all(seconds > 0 for seconds in timed.values())
