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
SHAPED = dict(**MOE, moe_intermediate_size=12, num_hidden_layers=3)
DELTA = dict(
    **MOE,
    num_hidden_layers=3,
    head_dim=12,
    moe_intermediate_size=12,
    shared_expert_intermediate_size=10,
    layer_types=["linear_attention", "linear_attention", "full_attention"],
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=6,
    linear_value_head_dim=5,
    linear_conv_kernel_dim=3,
    rms_norm_eps=0.1,  # a norm does not make outputs large that nearly cancel,
    initializer_range=0.2,  # or rounding would move logits by more than 1e-5
    rope_parameters={**PLAIN, "partial_rotary_factor": 0.5},
)
GRANITE = dict(embedding_multiplier=3.0, residual_multiplier=0.4, attention_multiplier=0.2, logits_scaling=2.0)
GLM = dict(
    n_routed_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=12,
    num_hidden_layers=3,
    first_k_dense_replace=1,
    n_shared_experts=2,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=2.5,
    norm_topk_prob=True,
    use_qk_norm=True,
    attention_bias=True,
    head_dim=12,
    rope_parameters={"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
    num_nextn_predict_layers=0,
)
AIR = dict(n_group=1, topk_group=1, use_qk_norm=False, n_shared_experts=1, norm_topk_prob=False)
YARN = dict(
    rope_type="yarn",
    rope_theta=100.0,
    factor=8.0,
    original_max_position_embeddings=6,
    beta_fast=2.0,  # the pairs kept, mixed and divided
    beta_slow=0.1,
    truncate=False,
)
ERNIE = dict(
    moe_num_experts=4,
    moe_k=2,
    moe_intermediate_size=12,
    moe_num_shared_experts=2,
    moe_layer_start_index=1,
    moe_layer_interval=1,
    moe_layer_end_index=1,
    num_hidden_layers=3,
    tie_word_embeddings=False,
)
LATENT = dict(
    num_hidden_layers=3,
    num_key_value_heads=4,
    first_k_dense_replace=1,
    n_routed_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=12,
    n_shared_experts=2,
    routed_scaling_factor=2.5,
    kv_lora_rank=6,
    q_lora_rank=None,
    qk_nope_head_dim=6,
    qk_rope_head_dim=4,
    v_head_dim=8,
    rms_norm_eps=1e-3,  # the norms of latents have another
)
GROUPS = dict(n_group=4, topk_group=2)
MSCALES = {**YARN, "mscale": 1.0, "mscale_all_dim": 0.707, "truncate": True}
GEMMA = dict(
    num_hidden_layers=3,
    head_dim=12,
    sliding_window=3,
    layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    query_pre_attn_scalar=20,
    rope_parameters={
        "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0},
    },
)
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
    "mistral-window": ("Mistral", dict(head_dim=12, sliding_window=3)),
    "llama-linear": ("Llama", dict(rope_parameters={**PLAIN, "rope_type": "linear", "factor": 4.0})),
    "llama-dynamic": ("Llama", dict(rope_parameters={**PLAIN, "rope_type": "dynamic", "factor": 4.0})),
    "qwen2-yarn": ("Qwen2", dict(rope_parameters=YARN)),
    "ernie4_5_moe": ("Ernie4_5_Moe", ERNIE),
    "smollm3": ("SmolLM3", dict(num_hidden_layers=3, no_rope_layers=[1, 0, 1], tie_word_embeddings=False)),
    "gpt_oss": (
        "GptOss",
        dict(
            num_local_experts=4,
            num_experts_per_tok=2,
            head_dim=12,
            sliding_window=3,
            swiglu_limit=1.0,
            rope_parameters=YARN,
        ),
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        dict(**SHAPED, shared_expert_intermediate_size=10, norm_topk_prob=False, mlp_only_layers=[1]),
    ),
    "qwen3_next": ("Qwen3Next", {**DELTA, "mlp_only_layers": [1], "norm_topk_prob": True}),
    "qwen3_5_moe_text": ("Qwen3_5MoeText", DELTA),
    "granite": ("Granite", GRANITE),
    "granitemoe": ("GraniteMoe", dict(**GRANITE, num_local_experts=4, num_experts_per_tok=2)),
    "glm4_moe": ("Glm4Moe", GLM),
    "glm4_moe-air": ("Glm4Moe", {**GLM, **AIR}),
    "minimax_m2": (
        "MiniMaxM2",
        dict(head_dim=12, rotary_dim=6, num_local_experts=4, num_experts_per_tok=2),
    ),
    "deepseek_v2": ("DeepseekV2", {**LATENT, "rope_parameters": MSCALES}),
    "deepseek_v2-groups": (
        "DeepseekV2",
        {**LATENT, **GROUPS, "topk_method": "group_limited_greedy", "num_experts_per_tok": 3, "q_lora_rank": 10},
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {**LATENT, **GROUPS, "rope_parameters": MSCALES, "norm_topk_prob": True, "num_mtp_layers": 0},
    ),
    "deepseek_v3-moonlight": (
        "DeepseekV3",
        {
            **LATENT,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "rope_interleave": False,
            "num_mtp_layers": 0,
        },
    ),
    "glm4_moe_lite": (
        "Glm4MoeLite",
        {
            **{name: value for name, value in LATENT.items() if name != "first_k_dense_replace"},
            **dict(q_lora_rank=10, v_head_dim=10, norm_topk_prob=True, mlp_layer_types=["sparse", "dense", "sparse"]),
        },
    ),
    "gemma3_text": ("Gemma3Text", GEMMA),
    "olmo3": (
        "Olmo3",
        dict(
            num_hidden_layers=3,
            sliding_window=3,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            rope_parameters={"sliding_attention": PLAIN, "full_attention": {**YARN, "truncate": True}},
        ),
    ),
    "glm4": (
        "Glm4",
        dict(head_dim=12, rope_parameters={**PLAIN, "partial_rotary_factor": 0.5}, attention_bias=True),
    ),
}


def config_of(family):
    """The config of transformers for one of `FAMILIES`."""
    import transformers

    name, changes = FAMILIES[family]
    return getattr(transformers, f"{name}Config")(**{**SIZES, "rope_parameters": dict(PLAIN), **changes})


def model_of(config):
    """A random model of transformers with plain attention."""
    import transformers

    config.get_text_config()._attn_implementation = "eager"
    architecture = type(config).__name__.removesuffix("Config").removesuffix("Text")
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
