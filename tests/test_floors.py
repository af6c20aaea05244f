"""The plan of the package, held against the imports of all its files: no circle, and no import of a higher room."""

import ast
import functools
import graphlib
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "jaxrl_llm"

# Each room may import those below it. What stands at the top of the package are the commands.
ROOMS = (
    "ground",
    "config",
    "objectives",
    "models",
    "tasks",
    "records",
    "rollout",
    "training",
    "run",
    "plan",
    "check",
    "audit",
    "report",
    "sweep",
)
COMMANDS = {"__init__", "__main__", "main", "evaluation", "generate", "export", "upcycle"}

# What a room may not import from outside the package either.
FOREIGN = {
    "objectives": {"flax.nnx", "optax", "ml_collections", "orbax", "grain", "jaxrl_llm.config"},
    "models": {"optax", "ml_collections", "jaxrl_llm.config", "jaxrl_llm.objectives"},
}


def sources() -> dict[str, str]:
    """{"training.step": source} of every file of the package; a room's __init__ is "training"."""
    paths = {path: path.relative_to(PACKAGE).with_suffix("").parts for path in PACKAGE.rglob("*.py")}
    return {".".join(parts).removesuffix(".__init__"): path.read_text() for path, parts in paths.items()}


@functools.cache
def imported(source: str) -> set[str]:
    """Every module that a source imports, at any depth of it; `from a import b` counts as a.b, and so do the
    places of a table of `ByName`."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "ByName":
            names |= {place.partition(":")[0] for place in ast.literal_eval(node.args[0]).values()}
    return names


def graph(files: dict[str, str]) -> dict[str, set[str]]:
    """{file: files of the package that it imports}; a package's __init__ imports its own parts for others to use."""
    out = {}
    for file, source in files.items():
        found = set()
        for name in imported(source):
            parts = name.split(".")
            if parts[0] == "jaxrl_llm":
                known = [".".join(parts[1:n]) for n in (len(parts), len(parts) - 1) if ".".join(parts[1:n]) in files]
                found |= set(known[:1])
        out[file] = found - {file}
    return out


def faults(files: dict[str, str]) -> list[str]:
    """What is wrong with the imports of these files: circles, imports of a higher room, relative or foreign ones."""
    found, arrows = [], graph(files)
    try:
        graphlib.TopologicalSorter(arrows).prepare()
    except graphlib.CycleError as error:
        found.append(f"circle: {' -> '.join(error.args[1])}")
    floor = {room: height for height, room in enumerate(ROOMS)}
    for file, others in sorted(arrows.items()):
        room = file.partition(".")[0]
        for other in sorted(others):
            theirs = other.partition(".")[0]
            if theirs not in floor and room in floor:
                found.append(f"{file} imports the command {other}")
            elif floor.get(room, len(ROOMS)) < floor.get(theirs, len(ROOMS)):
                found.append(f"{file} imports the higher room {theirs} ({other})")
    for file, source in sorted(files.items()):
        for name in sorted(imported(source)):
            barred = FOREIGN.get(file.partition(".")[0], set())
            if name.startswith("."):
                found.append(f"{file}: {name} is a relative import; write the full name")
            elif any(f"{name}.".startswith(f"{foreign}.") for foreign in barred):
                found.append(f"{file} may not import {name}")
    return found


def test_the_top_of_the_package_is_rooms_and_commands():
    top = {path.stem for path in PACKAGE.iterdir() if path.name not in {"__pycache__", "py.typed"}}
    assert top - {"configs"} == {*ROOMS, *COMMANDS}  # a wheel has the configs inside


def test_imports_go_down_and_in_no_circle():
    assert faults(sources()) == []


@pytest.mark.parametrize(
    ("file", "line", "fault"),
    [
        ("run.blocks", "from jaxrl_llm.run.settings import validate", "circle: "),
        ("run.settings", "from jaxrl_llm.run import trainer", "circle: "),
        ("objectives.parts", "from jaxrl_llm.objectives.recipes import RECIPES", "circle: "),
        ("objectives.ratios", "from jaxrl_llm import models", "objectives.ratios imports the higher room models"),
        ("objectives.ratios", "def f():\n    import optax", "objectives.ratios may not import optax"),
        ("models.experts.moe", "from jaxrl_llm.rollout.engine import Engine", "imports the higher room rollout"),
        ("models.transformer", "from jaxrl_llm.config import loading", "models.transformer may not import jaxrl_llm"),
        ("training.step", "import jaxrl_llm.evaluation", "training.step imports the command evaluation"),
        ("ground.metrics", "from . import masking", "is a relative import"),
        ("ground.metrics", "from jaxrl_llm.models.scoring import score", "imports the higher room models"),
    ],
)
def test_a_planted_import_is_seen(file, line, fault):
    files = sources()
    found = faults(files | {file: f"{files[file]}\n{line}\n"})
    assert any(fault in one for one in found), found


def test_every_room_says_what_flows_in_and_out():
    for path in PACKAGE.glob("*/__init__.py"):
        told = ast.get_docstring(ast.parse(path.read_text())) or ""
        assert 1 < len(told.splitlines()) <= 4, f"{path} says in three lines what flows in and out"


def test_config_dict_stops_at_settings():
    holders = {
        file for file, source in sources().items() if "ml_collections" in imported(source) or "ml_coll" in source
    }
    assert holders <= {"config.loading", "main", "records.recorded_config", "run.run_dir", "run.settings"}
