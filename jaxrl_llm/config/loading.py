"""From `--config NAME[:variant]` and `--config.block.field=value` to a ConfigDict, or one line on what is wrong.

A config is a Python file with `get_config(variant) -> ConfigDict`. It is named by its path, or by a bare name when it
is one of the package's own (`grpo`, the same as `configs/grpo.py`), in a checkout and in an installed package. The name
of a recipe that has no file stands for base.py with that recipe, or for dpo.py if it is one on pairs. A file may `from
configs import base`, wherever it is, and import modules beside it.
"""

import contextlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from ml_collections import ConfigDict

from jaxrl_llm.config.field_names import unknown_field
from jaxrl_llm.config.listed import CONFIGS, recipes
from jaxrl_llm.ground.declared import Declaration
from jaxrl_llm.ground.ranges import suggestion

# Recipes on pairs that have no file of their own.
_ON_PAIRS = ("cdpo", "ipo", "simpo", "cpo", "orpo", "exo", "nca", "apo_zero", "apo_down", "kto")


@dataclass(frozen=True)
class Source:
    """The file and variant of a config, recorded by config.json: the file may register tasks and objectives."""

    file: str  # absolute path
    variant: str = ""
    recipe: str = ""  # objective.name, if it is not the file's


def find(name: str) -> Source:
    """The source that NAME[:variant] stands for; raises FileNotFoundError if there is none."""
    given, _, variant = name.partition(":")
    path = Path(given)
    if path.suffix == ".py" and path.is_file():
        return Source(str(path.absolute()), variant)
    own = sorted(path.stem for path in CONFIGS.glob("*.py") if path.stem != "__init__")
    bare = path.stem if path.suffix in ("", ".py") and path.parent in (Path(), Path("configs")) else ""
    if bare in own:
        return Source(str((CONFIGS / f"{bare}.py").absolute()), variant)
    known = recipes()
    if bare in known:
        return Source(str((CONFIGS / ("dpo.py" if bare in _ON_PAIRS else "base.py")).absolute()), variant, recipe=bare)
    raise FileNotFoundError(
        f"--config={name} is neither a file nor one of the package's configs ({', '.join(own)}) or recipes "
        f"({', '.join(recipe for recipe in known if recipe not in own)}){suggestion(path.stem, [*own, *known])}; "
        "give one of these names, or the path of a file that defines get_config(variant)"
    )


def load(source: Source, fields: Sequence[tuple[str, str]] = ()) -> ConfigDict:
    """The config of a source with fields set: [("optimizer.learning_rate", "1e-3"), ...].

    A `task.name` that differs from the file's drops the options that the file gave to its own task, but for the sizes
    of the splits, which every task has.

    Raises:
        ValueError: the file or its variant is wrong, a field does not exist, or a value is of another type.
    """
    module = load_module(Path(source.file))
    if not hasattr(module, "get_config"):
        raise ValueError(f"{source.file} defines no get_config(variant) -> ConfigDict; see the package's configs")
    with one_line(Path(source.file)):
        config = module.get_config(source.variant) if source.variant else module.get_config()
    if not isinstance(config, ConfigDict):
        raise ValueError(f"get_config of {source.file} returned {config!r:.80}; return a ml_collections.ConfigDict")
    recipe = [("objective.name", source.recipe)] if source.recipe else []
    return with_fields(config, [*recipe, *fields])


def with_fields(config: ConfigDict, fields: Sequence[tuple[str, str]]) -> ConfigDict:
    """The config itself, with fields set as in `load`."""
    inherited = _task_name(config)
    with config.unlocked():
        for path, text in fields:
            _set(config, path, text)
        if _task_name(config) != inherited and "task.options" not in dict(fields):
            kept = {"train_size", "test_size"} | {path.rpartition(".")[2] for path, _ in fields}
            task: Any = config["task"]
            task["options"] = ConfigDict({k: v for k, v in task["options"].items() if k in kept})
    return config


def _task_name(config: ConfigDict) -> Any:
    return config.to_dict().get("task", {}).get("name")


def load_module(path: Path) -> ModuleType:
    """Run a file of configs, sweeps or tasks as a module of its own; raises ValueError, with the line, if it fails."""
    _offer_configs()
    path = path.resolve()
    if path.suffix != ".py":
        raise ValueError(f"{path} is no Python file; name one, with the ending .py")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    name = f"file:{path}"  # one name per file, so that the same file may register its tasks and objectives again
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    with one_line(path):  # from the text: bytecode that Python keeps is stale where a file is edited twice in a second
        exec(compile(path.read_bytes(), path, "exec"), module.__dict__)
    return module


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """{"block.field": value} of nested dicts."""
    out: dict[str, Any] = {}
    for key, value in tree.items():
        nested = isinstance(value, dict | ConfigDict)
        out |= flat(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return out


def _offer_configs() -> None:
    """Let `from configs import base` mean the package's configs, and also find those of a folder ./configs."""
    known = sys.modules.get("configs")
    if known is None or str(CONFIGS) not in map(str, known.__path__):
        folders = [str(folder) for folder in (CONFIGS, Path("configs").absolute()) if folder.is_dir()]
        spec = importlib.util.spec_from_file_location(
            "configs", CONFIGS / "__init__.py", submodule_search_locations=list(dict.fromkeys(folders))
        )
        assert spec is not None
        sys.modules["configs"] = importlib.util.module_from_spec(spec)


@contextlib.contextmanager
def one_line(path: Path) -> Iterator[None]:
    """Turn whatever a file raises, an exit too, into a ValueError that names the file and the line."""
    try:
        yield
    except SyntaxError as error:
        where = f"{error.filename or path}{f', line {error.lineno}' if error.lineno else ''}"
        raise ValueError(f"{where}: {error.msg}; correct the file") from error
    except (Exception, SystemExit) as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == path.resolve()]
        where = f"{path}, line {frames[-1].lineno}" if frames else str(path)
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(f"{where}: {kind}{error}") from error


_WHOLE = ("task.options", "task.chat_options")  # dicts of whatever the task, or the chat template, knows


def _set(config: ConfigDict, path: str, text: str) -> None:
    *blocks, field = path.split(".")
    block: Any = config
    for name in blocks:
        if name not in block or not isinstance(block[name], ConfigDict):
            raise ValueError(unknown_field(path, flat(config)))
        block = block[name]
    if field not in block and path.rpartition(".")[0] not in _WHOLE:
        raise ValueError(unknown_field(path, flat(config)))
    if isinstance(block.get(field), ConfigDict) and path not in _WHOLE:
        raise ValueError(f"--config.{path} is a block; set one of its fields: {', '.join(sorted(block[field]))}")
    kind = block.get_type(field) if field in block else object
    value = Declaration(dict if issubclass(kind, ConfigDict) else kind).read(f"--config.{path}", text)
    block[field] = ConfigDict(value) if isinstance(value, dict) else value
