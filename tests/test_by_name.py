"""Values by name: every place of every table of the package is there, and a run reads only the files that it uses."""

import ast
import importlib
import subprocess
import sys

import pytest

from jaxrl_llm.ground.by_name import ByName
from tests.reference.loaded import reachable
from tests.test_floors import sources


def _tables() -> list[tuple[str, str, str]]:
    """(file, name, place) of every entry of every `ByName({...})` of the package."""
    found = []
    for file, source in sources().items():
        for node in ast.walk(ast.parse(source if "ByName(" in source else "")):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "ByName":
                (table,) = node.args
                found += [(file, name, place) for name, place in ast.literal_eval(table).items()]
    return found


@pytest.mark.parametrize(("file", "name", "place"), _tables())
def test_every_place_holds_its_value(file, name, place):
    module, _, attribute = place.partition(":")
    assert hasattr(importlib.import_module(module), attribute or name)


def test_a_name_is_imported_at_its_first_use():
    table = ByName({"parse": "urllib.parse:urlsplit", "loads": "json"})
    assert table["parse"]("a://b").netloc == "b"
    assert table.attribute("loads")("[1]") == [1]
    assert list(table) == ["parse", "loads"]
    with pytest.raises(AttributeError, match="no 'dumps' here; there are parse, loads"):
        table.attribute("dumps")


def test_what_a_run_of_fresh_parameters_does_not_use_is_not_read():
    """Imports reach what checkpoints, hubs, data files, pairs, meshes and reopened runs need; it is not read yet."""
    code = "import sys, jaxrl_llm.main, jaxrl_llm.config.start_up, jaxrl_llm.run.trainer, jaxrl_llm.check.doubts"
    code += "; print(list(sys.modules))"
    read = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for file in (
        "models.checkpoints.pretrained",
        "tasks.tokenizers.text_tokenizer",
        "tasks.verifiers.named_verifiers",
        "training.pairs",
        "training.rollouts_ahead",
        "rollout.refilled_slots",
        "tasks.data_files",
        "tasks.drawn_splits",
        "tasks.gold_fields",
        "check.split_table",
        "config.joining",
        "ground.hub",
        "records.checkpoint_reader",
        "records.recorded_config",
        "records.wandb_writer",
        "rollout.parameter_moves",
        "run.joint_facts",
        "training.exchange",
    ):
        assert f"'jaxrl_llm.{file}'" not in read
        assert file in reachable()
