"""Tiny checkpoints of every published family, and what transformers computes of them.

`python -m tests.reference.families` writes tests/golden/families.json (needs the extra `bench`). The weights follow
from the names of the tensors, so only names, shapes and logits are kept.
"""

import json
import tempfile
import zlib
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

GOLDEN = Path(__file__).parents[1] / "golden" / "families.json"
TOKENS = np.random.default_rng(4).integers(0, 20, (3, 9))
SIZES = dict(
    vocab_size=24,
    hidden_size=32,
    intermediate_size=20,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=48,
    bos_token_id=None,
    eos_token_id=[21, 22],
    pad_token_id=23,
    initializer_range=0.3,
)
PLAIN = {"rope_type": "default", "rope_theta": 100.0}
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=100.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,  # the frequencies 1, 1/10 and two lower: kept, mixed, divided
)
MOE = dict(num_experts=4, num_experts_per_tok=2)
MIXED = dict(**MOE, head_dim=8, moe_intermediate_size=12, num_hidden_layers=3, mlp_only_layers=[1], norm_topk_prob=True)
FAMILIES = {
    "qwen3": ("Qwen3", dict(head_dim=12, num_key_value_heads=1)),
    "qwen3_moe": ("Qwen3Moe", MIXED),
    "llama": ("Llama", dict(head_dim=12)),
    "llama-tied": ("Llama", dict(tie_word_embeddings=True)),
    "llama3": ("Llama", dict(rope_parameters=LLAMA3)),
    "qwen2": ("Qwen2", dict()),
    "qwen2-tied": ("Qwen2", dict(tie_word_embeddings=True)),
    "olmoe": ("Olmoe", dict(MOE)),
    "mixtral": ("Mixtral", dict(num_local_experts=4, num_experts_per_tok=2)),
    "mistral": ("Mistral", dict(head_dim=12, sliding_window=None)),
}


def config_of(family):
    """The config of transformers for one of `FAMILIES`."""
    import transformers

    name, changes = FAMILIES[family]
    return getattr(transformers, f"{name}Config")(**{**SIZES, "rope_parameters": PLAIN, **changes})


def model_of(config):
    """A random model of transformers with plain attention."""
    import transformers

    config.get_text_config()._attn_implementation = "eager"
    architecture = type(config).__name__.removesuffix("Config")
    return getattr(transformers, f"{architecture}ForCausalLM")(config).eval()


def logits_of(model, tokens=TOKENS):
    import torch

    with torch.no_grad():
        return model(torch.from_numpy(tokens)).logits.numpy()


def write_folder(folder, config, shapes):
    """A checkpoint with these fields of config.json and tensors of these names and shapes; norms and biases are no
    ones and zeros, which would be no test of them."""
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {}
    for name, shape in shapes.items():
        scale = 0.3 if len(shape) > 1 else 1.0
        values = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
        tensors[name] = (scale * values).astype(np.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _golden(family):
    import transformers

    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        config = config_of(family)
        model_of(config).save_pretrained(folder)  # for its names and shapes alone
        published = json.loads((folder / "config.json").read_text())
        shapes = {name: list(x.shape) for name, x in sorted(load_file(folder / "model.safetensors").items())}
        write_folder(folder, published, shapes)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        logits = logits_of(model, TOKENS[:1])[0]
    published.pop("transformers_version")
    return {"config": published, "shapes": shapes, "logits": np.round(logits.astype(float), 5).tolist()}


if __name__ == "__main__":
    goldens = {family: _golden(family) for family in FAMILIES if not family.endswith("tied")}
    lines = [f"{json.dumps(name)}: {json.dumps(golden)}" for name, golden in goldens.items()]
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")
