"""A file imports strictly lower floors; files of one folder may import one another on the same floor."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "jaxrl_llm"

# A new module or folder gets its floor here and nowhere else.
FLOORS = (
    {"array_typing", "buckets", "cache_folder", "cores", "field_names", "masking", "metrics", "processes", "ranges"}
    | {"sharding"},
    {"configuration", "objectives", "models", "tasks"},
    {"rollout", "scoring", "checkpointing", "run_log", "screen", "stand_ins", "writers"},
    {"command_line", "training", "provenance", "reporting", "start_up", "stopping", "sweeping"},
    {
        "agreement",
        "batches",
        "blocks",
        "forks",
        "memory",
        "opening",
        "policy",
        "recorded",
        "report",
        "reward_model",
        "run_dir",
        "settings",
        "sweep",
        "trainer",
    },
    {"main", "branching", "evaluation", "export", "generate", "planning"},
    {"plan"},
    {"__main__"},
)
FLOOR = {room: height for height, rooms in enumerate(FLOORS) for room in rooms} | {"__init__": 0}
FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))

# What a folder may not import from outside the package either: objectives are functions of arrays.
FOREIGN = {
    "objectives": {"flax.nnx", "optax", "ml_collections", "orbax", "grain"},
    "models": {"optax", "ml_collections"},
}


def imported(source: str) -> set[str]:
    """Every module that a source imports, at any depth of it; `from a import b` counts as a.b."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names}
    return names


def violations(file: Path, source: str) -> list[str]:
    own = file.parts[0].removesuffix(".py")
    found = []
    for name in sorted(imported(source)):
        top, *rest = name.split(".")
        if not top:
            found.append(f"{file}: {name} is a relative import; write the full name")
        elif any(f"{name}.".startswith(f"{foreign}.") for foreign in FOREIGN.get(own, ())):
            found.append(f"{file}: {own}/ may not import {name}")
        elif top == "jaxrl_llm" and rest and rest[0] not in {own, "__version__"}:
            siblings = len(file.parts) == 1 and (PACKAGE / f"{rest[0]}.py").exists()
            if not FLOOR[rest[0]] < FLOOR[own] + siblings:
                found.append(f"{file} (floor {FLOOR[own]}) imports {rest[0]} (floor {FLOOR[rest[0]]})")
    return found


@pytest.mark.parametrize("file", FILES, ids=str)
def test_imports_go_down(file):
    assert file.parts[0].removesuffix(".py") in FLOOR, f"{file} has no floor: give it one in FLOORS"
    assert violations(file, (PACKAGE / file).read_text()) == []


@pytest.mark.parametrize(
    ("file", "source", "count"),
    [
        ("objectives/ratios.py", "from jaxrl_llm import masking\nfrom jaxrl_llm.objectives import advantages", 0),
        ("objectives/ratios.py", "from jaxrl_llm import models", 1),
        ("objectives/ratios.py", "def f():\n    import optax", 1),
        ("models/moe.py", "from jaxrl_llm.rollout.engine import Engine", 1),
        ("training/step.py", "import jaxrl_llm.evaluation", 1),
        ("metrics.py", "from . import masking", 1),
        ("metrics.py", "from jaxrl_llm.masking import masked_sum", 0),
        ("metrics.py", "from jaxrl_llm.scoring import logprobs", 1),
    ],
)
def test_the_rule_sees(file, source, count):
    assert len(violations(Path(file), source)) == count


def test_config_dict_stops_at_settings():
    holders = {str(file) for file in FILES if "ml_collections" in (PACKAGE / file).read_text()}
    assert holders <= {"configuration.py", "recorded.py", "run_dir.py", "settings.py"}


def test_main_is_short():
    assert len((PACKAGE / "main.py").read_text().splitlines()) <= 60
