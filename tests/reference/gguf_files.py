"""GGUF files written for tests: parameters of a model, the tokenizer of a folder, or both."""

import json

import jax
import numpy as np


def add_tokenizer(writer, folder, pre):
    """The metadata of a folder's tokenizer, with one end of turn beside EOS; returns (vocabulary, merges)."""
    model = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = sorted(model["model"]["vocab"], key=model["model"]["vocab"].get)
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocabulary)
    writer.add_token_types([3 if i < 3 else 1 for i in range(len(vocabulary))])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(0)
    writer.add_add_bos_token(pre == "llama-bpe")
    writer.add_chat_template("{{ bos_token }}!")
    return vocabulary, merges


def finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleave(rows, heads):
    """Of each head, row i of the first half and row i of the second side by side: how `llama` files hold q and k."""
    return np.stack(np.split(rows.reshape(heads, -1, *rows.shape[1:]), 2, axis=1), axis=2).reshape(rows.shape)


def write(path, model, params, architecture, kind=None, leave_out=(), extra=None, tokenizer=None):
    """A GGUF file of these parameters; matrices of 32 columns or more quantised to `kind` if there is one.

    tokenizer: a folder with tokenizer.json, of the pre-tokenizer of SmolLM2.
    """
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(48)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if tokenizer is None:
        writer.add_eos_token_id(2)
    else:
        add_tokenizer(writer, tokenizer, "smollm")
    if config.num_experts:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    tensors = {"token_embd.weight": params["ends"]["embedding"], "output_norm.weight": params["ends"]["norm"]["scale"]}
    if not config.tie_word_embeddings:
        tensors["output.weight"] = params["ends"]["head"].T
    (kind_of_layer,) = set(config.kinds)
    blocks = params[kind_of_layer]
    names = {"q": config.num_attention_heads, "k": config.num_key_value_heads, "v": 0, "o": 0}
    for i in range(config.num_hidden_layers):
        block = jax.tree.map(lambda x, i=i: np.asarray(x[i]), blocks)
        attention, mlp = block["attention"], block["mlp"]
        layer = {"attn_norm.weight": block["attention_norm"]["scale"], "ffn_norm.weight": block["mlp_norm"]["scale"]}
        for name, heads in names.items():
            theirs = f"attn_{'output' if name == 'o' else name}"
            for suffix, value in (("weight", attention[name].T), ("bias", attention.get(f"{name}_bias"))):
                if value is not None:
                    layer[f"{theirs}.{suffix}"] = (
                        interleave(value, heads) if architecture == "llama" and heads else value
                    )
            if f"{name}_norm" in attention:
                layer[f"{theirs}_norm.weight"] = attention[f"{name}_norm"]["scale"]
        for name in ("gate", "up", "down"):
            suffix = "_exps" if config.num_experts else ""
            layer[f"ffn_{name}{suffix}.weight"] = np.swapaxes(mlp[name], -1, -2)
        if config.num_experts:
            layer["ffn_gate_inp.weight"] = mlp["router"].T
        tensors |= {f"blk.{i}.{name}": value for name, value in layer.items()}
    for name, value in (tensors | (extra or {})).items():
        if name in leave_out:
            continue
        value = np.ascontiguousarray(np.asarray(value, np.float32))
        if kind is not None and value.ndim > 1:
            writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, value)
    finish(writer)
    return path
