"""What a person sees of a run: lines that fit, a plain line a step without a terminal, compilation named."""

import io
import re

import pytest

from jaxrl_llm.ground.phases import phase
from jaxrl_llm.objectives import make, names
from jaxrl_llm.records import screen as screen_module
from jaxrl_llm.records.run_log import RunLog, write_json
from jaxrl_llm.records.screen import Screen
from jaxrl_llm.run.assembly import build
from jaxrl_llm.run.blocks import CheckpointConfig
from jaxrl_llm.run.opening import closing, finished, folded, opening, parameter_counts
from jaxrl_llm.run.settings import validate
from tests.reference import tiny_run
from tests.reference.answers import corrected

ROW = {"reward/mean": 0.5, "rollout/length_mean": 11.25, "clip/low": 0.01, "clip/high": 0.02}
FULL = ROW | {"eval/greedy": 0.25, "rollout/tokens_per_s": 1234567.8}


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """time.monotonic of the screen, moved by hand."""
    now = [0.0]
    monkeypatch.setattr(screen_module.time, "monotonic", lambda: now[0])
    return now


def shown(stream):
    """The lines of a terminal's output without its control sequences."""
    return [
        line for line in re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())) if line.strip()
    ]


def test_without_a_terminal_there_is_one_plain_line_a_step(clock):
    stream = io.StringIO()
    screen = Screen(20, stream=stream)
    screen.step({"step": 1} | ROW)
    clock[0] = 6.0
    screen.step({"step": 2, "reward/mean": None, "rollout/tokens_per_s": 1234.5})
    screen.close()
    assert stream.getvalue() == (
        "step 1/20  reward 0.500  length 11.2  clip 3.00%\nstep 2/20  tokens/s 1,234  00:06<01:48\n"
    )


def test_supervised_training_shows_its_loss():
    stream = io.StringIO()
    screen = Screen(20, stream=stream)
    screen.step({"step": 1, "loss/policy": 0.25, "clip/low": 0.0, "clip/high": 0.0})
    screen.close()
    assert stream.getvalue() == "step 1/20  loss 0.250\n"


def test_the_time_that_is_left_leaves_compilation_out(clock):
    stream = io.StringIO()
    screen = Screen(10, stream=stream)
    for step, (now, compiled) in enumerate([(0, 0.0), (100, 95.0), (102, 0.0), (104, 0.0), (150, 44.0)], 1):
        clock[0] = now
        screen.progress.heard("/jax/core/compile/backend_compile_duration", compiled, "_update")
        screen.step({"step": step})
    lines = stream.getvalue().splitlines()
    assert lines[1] == "step 2/10"  # nothing is known yet
    assert lines[2] == "step 3/10  01:42<00:14"  # seven steps of two seconds
    assert lines[4] == "step 5/10  02:30<00:10"


@pytest.mark.parametrize("columns", [80, 120])
def test_nothing_wraps_on_a_terminal(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    screen = Screen(10_000, stream=stream)
    screen.step({"step": 0, "eval/greedy": 0.25})
    for step in (9_998, 9_999):
        screen.step({"step": step} | FULL)
    screen.note("a note")
    screen.end("next: report")
    lines = shown(stream)
    assert max(len(line) for line in lines) <= columns
    assert lines[-1] == "next: report"
    assert any("━" in line for line in lines)
    assert any("reward 0.500  held-out 0.250  length 11.2" in line for line in lines)
    assert "a note" in lines
    assert sum(line.startswith("step 9999 ") for line in lines) == 1  # an evaluation stays above the display


def test_compilation_is_named_while_it_lasts(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    screen = Screen(10, stream=stream)
    screen.begin()
    with phase("step 1"):
        screen.progress.heard("/jax/core/compile/jaxpr_to_mlir_module_duration", 0.1, "something_small")
        assert not any("compiling" in line for line in shown(stream))
        screen.progress.heard("/jax/core/compile/jaxpr_to_mlir_module_duration", 0.1, "_update")
        screen.step({"step": 1} | ROW)
        assert any(line.startswith("step 1: compiling update ... 00:0") for line in shown(stream))
        screen.progress.heard("/jax/core/compile/backend_compile_duration", 3.0, "_update")
    before = len(shown(stream))
    screen.step({"step": 2} | ROW)
    assert not any("compiling" in line for line in shown(stream)[before:])
    screen.close()
    screen.close()


def test_a_run_opens_with_what_it_is(tmp_path):
    text = opening(build(validate(tiny_run.make_config(tmp_path))), "runs/x")
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "not cut" not in text
    for word in (
        "task       sort: Write the digits of the prompt in ascending order\nsuch as    ",
        "parameters",
        "active (2 of 4 experts)",
        "cpu",
        "min(r A, clip(r, 0.8, 1.2) A)",
        "N = 2",
        "runs/x",
    ):
        assert word in text


def test_a_run_opens_with_what_its_meshes_do_not_divide(tmp_path):
    """Thirteen tokens on four devices of the rollout."""
    meshes = {"mesh.shape": (1, 4, 1, 1), "rollout.mesh_shape": (1, 1, 1, 4)}
    lines = opening(build(validate(tiny_run.make_config(tmp_path, **meshes))), "runs/x").splitlines()
    assert "not cut    vocab 13 by tensor 4" in lines


def test_active_parameters_are_those_of_the_top_k(tmp_path):
    settings = validate(tiny_run.make_config(tmp_path))
    total, active = parameter_counts(build(settings).model)
    # Two layers of four experts with three matrices of 32 x 16 each, of which a token goes through two.
    assert total - active == 2 * 2 * 3 * 32 * 16
    dense = validate(tiny_run.make_config(tmp_path, **{"model.num_experts": 0}))
    counts = parameter_counts(build(dense).model)
    assert counts[0] == counts[1]


def test_a_finished_dir_says_what_it_reached(tmp_path):
    assert finished(tmp_path, 3, CheckpointConfig()) == ""
    with RunLog(tmp_path, 3, stream=io.StringIO()) as log:
        log.metrics(3, {"reward/mean": 0.5})
    assert finished(tmp_path, 3, CheckpointConfig()) == ""
    write_json(tmp_path / "result.json", {"eval/greedy": 0.75, "eval/pass_at_1": 0.5, "eval/k": 4})
    assert (
        finished(tmp_path, 3, CheckpointConfig())
        == f"{tmp_path} is finished: 3 rollouts, held-out greedy 0.750, held-out sampled 0.500"
    )
    assert f"jaxrl_llm.report {tmp_path}" in closing(tmp_path)


@pytest.mark.parametrize(
    ("name", "everything"), [*((name, False) for name in names()), *((name, True) for name in names("rollouts"))]
)
def test_every_recipe_has_a_formula_that_fits(name, everything):
    """Mathematics and no class names; at 80 columns no line breaks inside a definition or a term."""
    changes: dict = {"max_length": 8} if name == "dr_grpo" else {}
    if everything:
        changes |= {"kl_coef": 0.001, "entropy_coef": 0.001} | corrected(name, "sequence_mask")
    terms, definitions = make(name, **changes).formula()
    lines = [*folded([f"{name}: max {terms[0]}", *terms[1:]], " "), *folded(definitions, "; ")]
    assert max(map(len, lines)) <= 69
    assert not re.search(r"[A-Z][a-z]\w*\(", "".join(lines))
    for piece in (*terms, *definitions):
        assert any(piece in line for line in lines), piece
