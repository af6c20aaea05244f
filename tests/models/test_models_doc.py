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
    shared = dict(shared_expert_intermediate_size=4, shared_expert_gate=True)
    experts = dict(num_experts=2, mlp_only_layers=(0,), selection_bias=True, **shared)
    biases = dict(attention_bias=True, attention_output_bias=True, attention_sinks=True, expert_bias=True)
    latent = dict(kv_lora_rank=4, q_lora_rank=4, qk_rope_head_dim=2, v_head_dim=4, qk_norm="none")
    expected = {}
    linear = {f"linear_{name}": 2 for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")}
    linear |= dict(layer_types=("full_attention",) * 3 + ("linear_attention",), attn_output_gate=True)
    for fields in (biases, {**latent, "norm_placement": "sandwich"}, linear):
        model = Model(ModelConfig(vocab_size=8, **fields, **experts))
        leaves = jax.tree_util.tree_leaves_with_path(model.axes(), is_leaf=lambda a: isinstance(a, tuple))
        named = {".".join(entry.key for entry in path): " ".join(axes) for path, axes in leaves}
        others = ("delta_moe.mlp", "delta_moe.attention_norm")  # as in KIND
        expected |= {name: axes for name, axes in named.items() if not name.startswith(others)}
    documented = {}
    for cells in (
        line.strip("|").split("|") for line in TEXT.splitlines() if re.match(r"\| `(ends|KIND|DELTA|dense|moe)\.", line)
    ):
        names = re.findall(r"`([\w.]+)`", cells[0])
        for name in names:
            if name.startswith("."):  # `.up` after `dense.mlp.gate`: as many last parts as it has
                parts = names[0].split(".")
                name = ".".join(parts[: len(parts) - name.count(".")]) + name
            for kind in ("dense", "moe") if name.startswith("KIND") else ("",):
                documented[name.replace("KIND", kind).replace("DELTA", "delta_moe")] = cells[2].strip()
    assert documented == expected
