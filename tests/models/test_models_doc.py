"""docs/models.md is executed, and its table of parameters compared with the parameters."""

import re
from pathlib import Path

import jax
import pytest

from jaxrl_llm.models import Model, ModelConfig

TEXT = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_code_runs():
    namespace: dict = {}
    for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL):
        exec(block, namespace)
    assert namespace["logits"].shape == (2, 6, 32)
    assert isinstance(namespace["model"], Model)


def test_the_table_names_every_parameter_and_its_axes():
    model = Model(ModelConfig(vocab_size=8, num_experts=2, mlp_only_layers=(0,), attention_bias=True))
    leaves = jax.tree_util.tree_leaves_with_path(model.axes(), is_leaf=lambda a: isinstance(a, tuple))
    expected = {".".join(entry.key for entry in path): " ".join(axes) for path, axes in leaves}
    documented = {}
    for cells in (
        line.strip("|").split("|") for line in TEXT.splitlines() if re.match(r"\| `(ends|KIND|dense|moe)\.", line)
    ):
        names = re.findall(r"`([\w.]+)`", cells[0])
        for name in names:
            if name.startswith("."):  # `.up` after `dense.mlp.gate`: as many last parts as it has
                parts = names[0].split(".")
                name = ".".join(parts[: len(parts) - name.count(".")]) + name
            for kind in ("dense", "moe") if name.startswith("KIND") else ("",):
                documented[name.replace("KIND", kind)] = cells[2].strip()
    assert documented == expected
