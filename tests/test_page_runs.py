"""Every command of every page is run: in its smallest form, or for the reason of a table only parsed (test_pages.py)."""

import contextlib
import dataclasses
import importlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import jaxrl_llm.__main__
from jaxrl_llm.config import loading, start_up
from jaxrl_llm.records.run_log import read_rows
from jaxrl_llm.run import stand_ins
from jaxrl_llm.sweep import Sweep, branching, launch
from tests.reference import page_commands

# What every config gets beside `:smoke`, where it has that variant.
TINY = {"steps": 2, "warm_start.steps": 2, "evaluation.prompts": 8, "evaluation.samples": 2, "log.samples": 2}
# Arguments that a small machine, or this one alone, takes otherwise; None: left out, with its value if it has one.
SMALLER = {
    **dict.fromkeys(("--coordinator", "--processes", "--process", "--core", "--write", "--workload"), None),
    **dict.fromkeys(("--seeds", "--levels"), None),
}
# What is parsed and not run, by the beginning of the command, and why not.
NOT_RUN = {
    "pip ": "index",
    "python3 -m venv": "index",
    "python -m tests.": "writes",
    "python -m experiments.results_page": "minutes",
    "python -m experiments.routing_replay.figures": "writes",
    "python experiments/routing_replay/tuned.py": "writes",
    "python -m experiments.routing_replay.scale": "data",
    "python -m experiments.performance.bench": "torch",
    "python -m experiments.performance.accelerator": "GPU",
    "python -m experiments.performance.loading": "minutes",
    "python -m experiments.real_model.compare --seed": "torch",
    "python -m experiments.robustness": "minutes",
    "python -m experiments.scale": "plugins",
    "python -m experiments.speedrun.race --entry": "minutes",
    ".venv/bin/python -m jupytext": "minutes",
    ".venv/bin/pip": "index",
}
TEXT = {page.name: page.read_text() for page in page_commands.PAGES}
COMMANDS = page_commands.noted()


def shrunk(arguments):
    """The arguments in their smallest form."""
    out, waiting = [], list(arguments)
    while waiting:
        word = waiting.pop(0)
        name, given, _ = word.partition("=")
        if name not in SMALLER:
            out.append(word)
            continue
        while not given and waiting and not waiting[0].startswith("--"):
            waiting.pop(0)
    return out


def written(page, *containing):
    """The code blocks of a page that hold one of these texts, in one file."""
    found = [block for block in page_commands.blocks(page, "python") if any(text in block for text in containing)]
    return "\n".join(found)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with what the pages' commands are given: DIRs, a checkpoint, data, files of one's own."""
    folder = tmp_path_factory.mktemp("reader")
    docs = page_commands.ROOT / "docs"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(start_up, "start_jax", lambda: None)
        patch.setattr(loading, "load", small(loading.load))
        patch.setattr(Sweep, "planned", of_one_seed(Sweep.planned))
        patch.setattr(launch, "run_locally", run_here)
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        for name in ("configs", "experiments"):
            (folder / name).symlink_to(page_commands.ROOT / name)
        for name in ("PATH", "DENSE", "CHECKPOINT"):
            (folder / name).symlink_to(stand_ins.checkpoint({"num_hidden_layers": 2, "hidden_size": 32}))
        task = written(docs / "tasks.md", "tasks.register", "def get_config")
        (folder / "my_task.py").write_text(task)
        (folder / "reverse.py").write_text(task)
        (folder / "sweep.py").write_text(written(docs / "sweeps.md", "def get_sweep"))
        pairs = [{"prompt": f"{n}21=", "chosen": f"12{n}", "rejected": f"{n}12"} for n in range(3, 10)]
        (folder / "pairs.jsonl").write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs * 10))
        questions = [{"question": f"What is {n} and 1?", "answer": str(n + 1)} for n in range(300)]
        (folder / "questions.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in questions))
        (folder / "runs").mkdir()
        for _, program, *arguments in COMMANDS:
            if program == "tar":
                subprocess.run([program, *arguments], check=True)
        for name, config in (("DIR", "grpo:smoke"), ("OTHER", "gspo:smoke")):
            run(["-m", "jaxrl_llm.main", "--config", config, "--workdir", name])
        yield folder


def small(load):
    """`loading.load` in the smallest form of every config."""

    def loaded(source, fields=()):
        tiny = [(name, str(value)) for name, value in TINY.items()]
        with contextlib.suppress(ValueError):
            if not source.variant:
                return load(dataclasses.replace(source, variant="smoke"), [*fields, *tiny])
        return load(source, [*fields, *tiny])

    return loaded


def of_one_seed(planned):
    return lambda self: [run for run in planned(self) if run.seed == self.runs[0]["seed"]][:12]


def run_here(runs, workdir, *, module, **_):
    """The runs of a sweep in this process, one after the other; those that failed."""
    main = branching.main if module == branching.__name__ else importlib.import_module(module).main
    return [
        one for one in runs if main([f"--config={one.config}", f"--workdir={workdir / one.folder}", *one.overrides])
    ]


def run(arguments):
    """Call the command as `python arguments` would; the exit code."""
    if arguments[0] == "-c":
        return subprocess.run([sys.executable, *arguments], check=False).returncode
    module, given = arguments[1], list(arguments[2:])
    spec = importlib.util.find_spec(module)
    module = f"{module}.__main__" if spec.submodule_search_locations else module
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [module, *given])
        patch.setattr(sys, "stdin", io.StringIO("What is 2 and 3?\n"))
        main = importlib.import_module(module).main
        try:
            return (main(given) if module.startswith("jaxrl_llm") else main()) or 0
        except SystemExit as end:
            return end.code


def called(program, arguments):
    if program.endswith("jaxrl-llm"):
        return ["-m", jaxrl_llm.__main__.COMMANDS[arguments[0]][0], *arguments[1:]]
    if arguments[0].endswith(".py"):
        return ["-m", arguments[0].removesuffix(".py").replace("/", "."), *arguments[1:]]
    return list(arguments)


DONE = set()


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted({page for page, *_ in COMMANDS}, key=lambda page: ("experiments" not in page, page)))
def test_the_commands_run(page, place, monkeypatch, capsys):
    import time
    monkeypatch.chdir(place)
    failed = []
    for of, program, *arguments in COMMANDS:
        line = " ".join([program, *arguments])
        if of != page or any(line.startswith(k) for k in NOT_RUN):
            continue
        if program == "make":
            subprocess.run([program, "-n", "-C", page_commands.ROOT, *arguments], check=True, stdout=subprocess.DEVNULL)
            continue
        if program == "tar":
            continue
        small = shrunk(called(program, arguments))
        if "jaxrl_llm.sweep" in small and small[-1] == "DIR":
            small[-1] = re.sub(r"\W", "_", small[small.index("--sweep") + 1])
        key = re.sub(r"\d+", "0", " ".join(small))
        if "jaxrl_llm.sweep" in small:
            key = small[small.index("--sweep") + 1]
        if key in DONE:
            continue
        DONE.add(key)
        began = time.monotonic()
        try:
            code = run(small)
        except BaseException as error:
            import traceback; code = traceback.format_exc()[-1500:]
        said = capsys.readouterr()
        with open("/tmp/pages/log.txt", "a") as f:
            f.write(f"{time.monotonic() - began:6.1f} s  {code}  {page}  {line}\n")
            if code:
                f.write("      " + " ".join(small) + "\n" + said.out[-600:] + said.err[-1500:] + "\n")
        if code:
            failed.append(line)
    assert failed == []
