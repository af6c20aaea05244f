"""Every command of every page is run in its smallest form, or only parsed (test_pages.py) for the reason of a table."""

import contextlib
import dataclasses
import importlib
import importlib.util
import io
import json
import os
import re
import subprocess
import sys

import pytest

import jaxrl_llm.__main__
from configs import stand_ins
from jaxrl_llm.config import loading, start_up
from jaxrl_llm.ground.machine import forget_programs
from jaxrl_llm.sweep import Sweep, launch
from tests.reference import page_commands

ROOT = page_commands.ROOT
# What every config that has these fields gets beside `:smoke`; a sweep gets its first runs of its first seed.
TINY = {
    "mesh.shape": (1, 1, 1, 1),  # as on a laptop: of eight fake devices every program would have collectives
    "steps": 2,
    "warm_start.steps": 50,
    "warm_start.learning_rate": 1e-2,
    "updates.minibatches": 2,
    "evaluation.prompts": 8,
    "evaluation.samples": 2,
    "task.options.digits": 3,
    "task.options.train_size": 512,
    "task.options.test_size": 64,
}
RUNS = 4
# Arguments that have these values here, or are left out.
SMALLER = dict.fromkeys(("--coordinator", "--processes", "--process", "--config.model.pretrained"), ()) | {
    "--workload": ("tiny.json",),
}
# The commands that cannot be run in a test, by their beginning, and why.
NOT_RUN = {
    "pip ": "index",
    ".venv/bin/pip ": "index",
    "python3 -m venv ": "index",
    "python -m experiments.performance.bench ": "torch",
    "python -m experiments.real_model.compare --seed ": "torch",
    "python -m experiments.real_model.compare --lengths ": "torch",
    "python -m experiments.turns.speed ": "torch",
    "python -m experiments.turns.curves ": "writes",
    "python -m experiments.performance.accelerator ": "GPU",
    "python -m experiments.scale.run ": "compilers",
    "python -m jaxrl_llm plan ": "compilers",
    "python -m jaxrl_llm.check --topology ": "compilers",
    "python -m experiments.routing_replay.scale ": "data",
    "python -m experiments.gates.tables --workdir ": "data",
    "python -m jaxrl_llm.main --config pretrained --config.model.pretrained=CHECKPOINT --workdir runs/gym ": "data",
    "python -m jaxrl_llm.report runs/full ": "minutes",
    ".venv-vllm/bin/python ": "vLLM",
    "sleep ": "vLLM",
    ".venv/bin/python -m jaxrl_llm.main --config sort_vllm ": "vLLM",
    "python -m jaxrl_llm.main --config sort_vllm --workdir runs/served ": "vLLM",
    "python -m experiments.mismatch.measure ": "vLLM",
    "python -m jaxrl_llm.export --workdir runs/adapters ": "base",  # here a warm start; see tests/test_push.py
    "make ": "installs",  # all but the commands of `make demo`
    "python -m tests.": "writes",
    "python experiments/routing_replay/tuned.py ": "writes",
    "python -m experiments.routing_replay.figures": "writes",
    "python -m experiments.results_page ": "minutes",  # these have tests of their own, or are loops over what has
    "python -m experiments.routing_replay.tables": "minutes",
    "python experiments/routing_replay/noise.py ": "minutes",
    "python -m experiments.performance.sweep ": "minutes",
    "python -m experiments.gates.measure ": "minutes",
    "python -m experiments.lineage.figures ": "minutes",
    "python -m experiments.numerics.dose_zero ": "minutes",
    "python -m experiments.numerics.excess_precision ": "minutes",
    "python -m experiments.numerics.sources ": "minutes",
    "python -m experiments.numerics.tile_costs ": "minutes",
    "python -m experiments.performance.loading ": "minutes",
    "python -m experiments.robustness.": "minutes",
    "python -m experiments.speedrun.race --entry ": "minutes",
    ".venv/bin/python -m jupytext ": "minutes",
}
DEMO = re.findall(
    r"^\t\$\(PY\) (-m .*)$", (ROOT / "Makefile").read_text().split("\ndemo:")[1].split("\n\n")[0], re.MULTILINE
)
COMMANDS = page_commands.commands() + [
    ("Makefile", "python", *line.replace("$(RUNS)", "runs/demo").split()) for line in DEMO
]
# Those of the experiments first: their sweeps are wanted by name later.
PAGES = sorted({page for page, *_ in COMMANDS}, key=lambda page: (not page.startswith("experiments"), page))


def reason(line):
    """Why a command is not run; "" for one that is."""
    return next((why for beginning, why in NOT_RUN.items() if line.startswith(beginning)), "")


def test_no_reason_is_idle():
    lines = [" ".join([*command, ""]) for _, *command in COMMANDS]
    assert [one for one in NOT_RUN if not any(line.startswith(one) for line in lines)] == []
    assert len([line for line in lines if not reason(line)]) > len(lines) / 2


def small(load):
    """`loading.load` of the smallest form of every config."""

    def loaded(source, fields=()):
        config = None
        if not source.variant:
            with contextlib.suppress(ValueError):  # there is no such variant
                config = load(dataclasses.replace(source, variant="smoke"), fields)
        config = load(source, fields) if config is None else config
        with config.unlocked():
            known = loading.flat(config)
            if "task.options.train_size" not in known:  # then fewer digits would hold too few prompts
                known = {name: value for name, value in known.items() if not name.startswith("task.options.")}
            config.update_from_flattened_dict({name: value for name, value in TINY.items() if name in known})
        return config

    return loaded


def run_here(runs, workdir, *, module, **_):
    """`launch.run_locally` in this process: the runs that failed."""
    main = importlib.import_module(module).main
    return [
        one for one in runs if main([f"--config={one.config}", f"--workdir={workdir / one.folder}", *one.overrides])
    ]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with what the commands are given: DIRs, a checkpoint, data, files of one's own, unpacked archives."""
    folder, docs = tmp_path_factory.mktemp("reader"), ROOT / "docs"
    planned = Sweep.planned
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setattr(start_up, "start_jax", lambda: None)
        patch.setattr(loading, "load", small(loading.load))
        patch.setattr(launch, "run_locally", run_here)
        patch.setattr(
            Sweep, "planned", lambda self: [run for run in planned(self) if run.seed == self.runs[0]["seed"]][:RUNS]
        )
        for name in ("configs", "experiments"):
            (folder / name).symlink_to(ROOT / name)
        for name in ("PATH", "DENSE", "CHECKPOINT"):
            (folder / name).symlink_to(stand_ins.checkpoint({"num_hidden_layers": 2, "hidden_size": 32}))
        for name, page, *parts in (
            ("reverse.py", "tasks.md", "tasks.register", "def get_config"),
            ("doors.py", "environments.md", "class Doors"),
            ("sweep.py", "sweeps.md", "def get_sweep"),
            ("reward.py", "tasks.md", "def score"),
        ):
            code = page_commands.blocks(docs / page, "python")
            (folder / name).write_text("\n".join(block for block in code if any(part in block for part in parts)))
        rows, reward = page_commands.blocks(docs / "your_model.md", "python")
        exec(rows, {})  # writes capitals.jsonl
        (folder / "reward.py").write_text(f"{(folder / 'reward.py').read_text()}\n{reward}")
        own = (folder / "reverse.py").read_text()  # of digits, so that DIR can be asked
        (folder / "my_task.py").write_text(own.replace("reverse", "my_task").replace("abcdefgh", "01234567"))
        lines = {
            "pairs.jsonl": [{"prompt": f"{n}21=", "chosen": f"12{n}", "rejected": f"{n}12"} for n in range(3, 10)] * 9,
            "questions.jsonl": [{"question": f"{n} and 1?", "answer": str(n + 1)} for n in range(300)],
        }
        for name, rows in lines.items():
            (folder / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        workload = dict(L=1, d=16, H=2, KV=1, hd=8, E=2, k=1, ff=16, V=97, P=8, C=8, NP=2, G=2)
        (folder / "tiny.json").write_text(json.dumps(workload))
        (folder / "batch.safetensors").symlink_to(ROOT / "tests" / "golden" / "captures" / "grpo-1.safetensors")
        (folder / "runs").mkdir()
        for name, config in (("DIR", "grpo"), ("OTHER", "gspo")):
            assert called(["-m", "jaxrl_llm.main", "--config", config, "--workdir", name]) == 0
        yield folder


def spelled(program, arguments):
    """The command as arguments of python, in its smallest form."""
    if program.endswith("jaxrl-llm"):
        arguments = ["-m", jaxrl_llm.__main__.COMMANDS[arguments[0]][0].removesuffix(".__main__"), *arguments[1:]]
    waiting, out = [re.sub(r"^gs://BUCKET", "place", argument) for argument in arguments], []
    while waiting:
        name, given, _ = waiting[0].partition("=")
        if name not in SMALLER:
            out.append(waiting.pop(0))
            continue
        waiting.pop(0)
        while not given and waiting and not waiting[0].startswith("--"):
            waiting.pop(0)
        out += [name, *SMALLER[name]] if SMALLER[name] else []
    if "jaxrl_llm.main" in out:  # pages name their DIRs alike
        out.append("--restart")
    if "jaxrl_llm.sweep" in out and out[-1] == "DIR":
        out[-1] = re.sub(r"\W+", "_", out[out.index("--sweep") + 1])
    return out


def called(arguments):
    """The exit code of `python ARGUMENTS`, in this process but for what counts time there."""
    if arguments[0] == "-c" or arguments[1].startswith("experiments.performance."):
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        return subprocess.run([sys.executable, *arguments], env=environment, check=False).returncode
    _, module, *given = arguments
    spec = importlib.util.find_spec(module)
    assert spec, module
    main = importlib.import_module(f"{module}.__main__" if spec.submodule_search_locations else module).main
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [module, *given])
        patch.setattr(sys, "stdin", io.StringIO("What is 2 and 3?\n"))
        try:
            return (main(given) if module.startswith("jaxrl_llm") else main()) or 0
        except SystemExit as end:
            return end.code or 0


DONE = set()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:constrained_layout not applied")  # `runs` has the unlike runs of all pages here
@pytest.mark.parametrize("page", PAGES)
def test_the_commands_run(page, place, monkeypatch, capfd):
    """What was run before, on any page, counts: but for its numbers, and of a sweep for its DIR."""
    monkeypatch.chdir(place)
    for of, program, *arguments in COMMANDS:
        line = " ".join([program, *arguments])
        if of != page or reason(f"{line} "):
            continue
        if program == "tar":
            assert subprocess.run([program, *arguments], check=False).returncode == 0, line
            continue
        small = spelled(program, arguments)
        known = small[small.index("--sweep") + 1] if "--sweep" in small else re.sub(r"\d+", "0", " ".join(small))
        if known not in DONE:
            DONE.add(known)
            forget_programs()
            assert called(small) == 0, f"{line}\n{capfd.readouterr().err[-2000:]}"
