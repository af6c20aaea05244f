"""Adapters in PEFT's files: every name and shape by hand, and the logits that PEFT itself computes with them."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrl_llm.models import Model, ModelConfig, save_pretrained
from jaxrl_llm.models.checkpoints.adapter_files import save_adapters
from jaxrl_llm.models.lora import LoRAConfig, init_adapters, merge

SIZES = dict(
    vocab_size=24,
    num_hidden_layers=2,
    hidden_size=16,
    intermediate_size=12,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    qk_norm="head",
)
EXPERTS = dict(num_experts=3, num_experts_per_tok=2, moe_intermediate_size=8)
FAMILIES = {
    "qwen3": {},
    "llama": {"qk_norm": "none"},
    "qwen2": {"qk_norm": "none", "attention_bias": True},
    "qwen3_moe": EXPERTS,
    "olmoe": {**EXPERTS, "qk_norm": "full"},
    "mixtral": {**EXPERTS, "qk_norm": "none"},
}


def adapted(name, config):
    """(model, parameters, adapters): of a family, with changes as large as the weights."""
    model = Model(ModelConfig(**SIZES | FAMILIES[name]))
    adapters = init_adapters(config, model, jax.random.key(1))
    adapters = jax.tree.map(lambda x: x + 0.2 * jax.random.normal(jax.random.key(x.size), x.shape), adapters)
    return model, model.init(jax.random.key(0)), adapters


def test_every_tensor_has_peft_s_name_and_shape(tmp_path):
    """Two layers of experts: A [r in] and B [out r] of each matrix of each expert, and what multiplies them."""
    config = LoRAConfig(rank=2, alpha=6.0, targets="attention, mlp, router")
    model, _, adapters = adapted("qwen3_moe", config)
    save_adapters(adapters, config, model, tmp_path, base="owner/tiny", revision="main")
    outputs, shapes = {"q": 16, "k": 8, "v": 8, "o": 16}, {}
    for layer in (0, 1):
        shapes |= {f"{layer}.self_attn.{x}_proj": (16, outputs[x]) for x in "qkvo"}
        shapes[f"{layer}.mlp.gate"] = (16, 3)  # the router
        for e in range(3):
            shapes |= {f"{layer}.mlp.experts.{e}.{x}_proj": (16, 8) for x in ("gate", "up")}
            shapes[f"{layer}.mlp.experts.{e}.down_proj"] = (8, 16)
    expected = {}
    for module, (inside, outside) in shapes.items():
        expected[f"base_model.model.model.layers.{module}.lora_A.weight"] = (2, inside)
        expected[f"base_model.model.model.layers.{module}.lora_B.weight"] = (outside, 2)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert {name: tensor.shape for name, tensor in tensors.items()} == expected
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    projections = ["down_proj", "gate", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    said = {"peft_type": "LORA", "base_model_name_or_path": "owner/tiny", "revision": "main"}
    said |= {"r": 2, "lora_alpha": 6.0, "target_modules": projections}
    assert said.items() <= written.items()
    a, b = (tensors[f"base_model.model.model.layers.1.mlp.experts.2.up_proj.lora_{x}.weight"] for x in "AB")
    ours = adapters["moe"]["mlp"]["up"]
    np.testing.assert_allclose(b @ a, (ours["a"][1, 2] @ ours["b"][1, 2]).T, rtol=1e-6)
    with pytest.raises(FileExistsError, match="holds a checkpoint already; give an empty folder"):
        save_adapters(adapters, config, model, tmp_path, base="", revision=None)


def test_what_peft_would_leave_out_is_refused(tmp_path):
    """Dense layers beside experts: PEFT reads the adapters of their mlp as those of experts, and drops them."""
    config = LoRAConfig(rank=2)
    mixed = Model(ModelConfig(**SIZES, **EXPERTS, decoder_sparse_step=2))
    shapes = jax.eval_shape(lambda key: init_adapters(config, mixed, key), jax.random.key(0))
    with pytest.raises(ValueError, match="the adapters of the model's dense layers and shared expert; export the"):
        save_adapters(shapes, config, mixed, tmp_path, base="", revision=None)
    multipliers = dict(logits_scaling=6.0, attention_multiplier=0.1)
    granite = Model(ModelConfig(**{**SIZES, "qk_norm": "none"}, **EXPERTS, **multipliers))
    shapes = jax.eval_shape(lambda key: init_adapters(config, granite, key), jax.random.key(0))
    with pytest.raises(ValueError, match=r"_linear\.weight holds several matrices, .*export the policy with"):
        save_adapters(shapes, config, granite, tmp_path, base="", revision=None)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # in peft itself
@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning")  # of its own patterns
@pytest.mark.parametrize("targets", ["attention,mlp", "attention,mlp,router"])
@pytest.mark.parametrize("family", FAMILIES)
def test_peft_computes_what_we_do(tmp_path, family, targets):
    """From the two folders alone: logits of the base and its adapters, in float32."""
    peft, torch = pytest.importorskip("peft"), pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = LoRAConfig(rank=2, alpha=6.0, targets=targets)
    model, params, adapters = adapted(family, config)
    save_pretrained(params, model.config, tmp_path / "base")
    save_adapters(adapters, config, model, tmp_path / "adapter", base=str(tmp_path / "base"), revision=None)
    tokens = np.random.default_rng(0).integers(0, 24, (2, 9))
    with jax.default_matmul_precision("highest"):
        hidden = model.apply(merge(params, adapters, config.scale), jnp.asarray(tokens, jnp.int32)).hidden
        ours = model.logits(merge(params, adapters, config.scale), hidden)
        plain = model.logits(params, model.apply(params, jnp.asarray(tokens, jnp.int32)).hidden)
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    with torch.no_grad():
        logits = theirs(torch.tensor(tokens)).logits.numpy()
    assert np.abs(ours - plain).max() > 0.5
    np.testing.assert_allclose(logits, ours, atol=2e-5)
