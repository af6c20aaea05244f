"""The three kinds of `layer_types`, and checks of fields that few models have. Loaded where a config has them."""

from typing import Any

SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"


def check_layers(config: Any) -> None:
    """Raise ValueError where fields of a ModelConfig contradict each other or the number of layers."""
    layers, types, window = config.num_hidden_layers, config.layer_types, config.sliding_window
    if types and (len(types) != layers or set(types) - {SLIDING, FULL, LINEAR}):
        raise ValueError(
            f"model.layer_types={types} must be () or {SLIDING}, {FULL} or {LINEAR} for each of "
            f"model.num_hidden_layers={layers} layers"
        )
    if types and bool(window) != (SLIDING in types):
        raise ValueError(
            f"model.sliding_window={window} does not fit model.layer_types={types}; set both for layers that slide, "
            "and neither without"
        )
    if not all(0 <= layer < layers for layer in config.no_rope_layers):
        raise ValueError(
            f"model.no_rope_layers={config.no_rope_layers} must name layers below model.num_hidden_layers={layers}"
        )
    if config.kv_lora_rank or config.q_lora_rank or config.qk_rope_head_dim or config.v_head_dim:
        _check_latent(config)
    if LINEAR in types or config.linear_num_value_heads or config.attn_output_gate:
        _check_delta(config)
    of_experts = config.expert_bias or config.swiglu_limit
    if of_experts and config.experts_implementation not in ("auto", "grouped"):
        raise ValueError(
            f"model.experts_implementation={config.experts_implementation!r} has no form for experts with "
            "model.expert_bias or model.swiglu_limit; set it to 'auto'"
        )


def check_kernels(config: Any, shards_of_time: int) -> None:
    """Raise ValueError where a ModelConfig or a mesh that splits rows asks for a kernel that is not there."""
    further = {
        "kv_lora_rank": config.kv_lora_rank,
        "linear_num_value_heads": config.linear_num_value_heads,
        "attn_output_gate": config.attn_output_gate,
        "norm_placement": config.norm_placement != "pre",
        "norm_offset": config.norm_offset,
        "hidden_act": config.hidden_act != "silu",
    }
    if config.numerics == "exact" and any(further.values()):
        names = " and ".join(f"model.{name}={getattr(config, name)!r}" for name, has in further.items() if has)
        raise ValueError(f"model.numerics=exact has no form for {names}; set model.numerics=fast")
    if config.numerics == "exact" and (config.expert_bias or config.swiglu_limit):
        raise ValueError(
            "model.numerics=exact has no form for experts with model.expert_bias or model.swiglu_limit; set "
            "model.numerics=fast"
        )
    hides = config.sliding_window or config.attention_sinks
    if hides and config.attention_implementation == "flash":
        raise ValueError(
            "attention_implementation='flash' has no kernel here for model.sliding_window or model.attention_sinks; "
            "set it to 'auto'"
        )
    if (hides or config.kv_lora_rank or config.linear_num_value_heads) and shards_of_time > 1:
        raise ValueError(
            "rows of layers with model.sliding_window, model.attention_sinks, model.kv_lora_rank or linear_attention "
            "are not split over devices; set the context axis, the fifth size of mesh.shape, to 1"
        )


def _check_latent(config: Any) -> None:
    rope, head, value = config.qk_rope_head_dim, config.head_dim, config.v_head_dim
    if not config.kv_lora_rank:
        raise ValueError(
            f"model.q_lora_rank={config.q_lora_rank}, model.qk_rope_head_dim={rope} and model.v_head_dim={value} are "
            "of attention from a latent; set model.kv_lora_rank, or these to 0"
        )
    if rope % 2 or not 0 < rope < head or not 0 < value <= head:
        raise ValueError(
            f"model.kv_lora_rank={config.kv_lora_rank} needs an even model.qk_rope_head_dim={rope} below "
            f"model.head_dim={head}, and model.v_head_dim={value} of 1 to head_dim"
        )
    names = ("attention_bias", "attention_output_bias", "attention_sinks", "sliding_window", "no_rope_layers")
    has = [name for name in names if getattr(config, name)] + ["qk_norm"] * (config.qk_norm != "none")
    if wrong := [f"model.{name}={getattr(config, name)!r}" for name in has]:
        raise ValueError(
            f"attention from a latent (model.kv_lora_rank={config.kv_lora_rank}) has no form with "
            f"{', '.join(wrong)}; set them to their defaults, qk_norm to 'none'"
        )


def _check_delta(config: Any) -> None:
    sizes = {name: getattr(config, f"linear_{name}") for name in ("num_key_heads", "num_value_heads")}
    sizes |= {name: getattr(config, f"linear_{name}") for name in ("key_head_dim", "value_head_dim")}
    asked = [LINEAR in config.layer_types, *(size > 0 for size in sizes.values())]
    given = ", ".join(f"model.linear_{name}={size}" for name, size in sizes.items())
    if any(asked) != all(asked) or (all(asked) and sizes["num_value_heads"] % sizes["num_key_heads"]):
        raise ValueError(
            f"{LINEAR} in model.layer_types needs {given} above 0, the value heads a multiple of the key heads, and "
            "these need such layers; set all of them, or none"
        )
    names = ("kv_lora_rank", "sliding_window", "no_rope_layers")
    if wrong := [f"model.{name}={getattr(config, name)!r}" for name in names if getattr(config, name)]:
        raise ValueError(
            f"{LINEAR} in model.layer_types and model.attn_output_gate have no form with {', '.join(wrong)}; set them "
            "to their defaults"
        )


def further_parameters(config: Any, attention: int) -> int:
    """Parameters of linear attention in all layers beyond those of others, `attention` a layer, and of output gates."""
    d, layers, heads = config.hidden_size, config.layer_types.count(LINEAR), config.linear_num_value_heads
    keys, values = config.linear_num_key_heads * config.linear_key_head_dim, heads * config.linear_value_head_dim
    own = d * (2 * keys + 3 * values + 2 * heads) + (2 * keys + values) * config.linear_conv_kernel_dim + 2 * heads
    gates = d * config.num_attention_heads * config.head_dim * config.attn_output_gate
    return layers * (own - attention) + (config.num_hidden_layers - layers) * gates


def attention_parameters(config: Any) -> int:
    """Parameters of attention from a latent in one layer."""
    d, latent, of_q = config.hidden_size, config.kv_lora_rank, config.q_lora_rank
    q = config.num_attention_heads * config.head_dim
    values = config.num_attention_heads * config.v_head_dim
    keys = config.num_attention_heads * (config.head_dim - config.qk_rope_head_dim)
    queries = of_q * (d + q) if of_q else d * q
    return queries + d * (latent + config.qk_rope_head_dim) + latent * (keys + values) + values * d
