"""Published checkpoints: what is written is read back exactly, in every spelling; what does not fit says so."""

import contextlib
import json
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrl_llm.ground import sharding
from jaxrl_llm.models import ModelConfig, fingerprint, load_pretrained, save_pretrained
from jaxrl_llm.models.checkpoints import published

MIXED = dict(num_experts=4, num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=(1,), norm_topk_prob=False)
EVERY = pytest.mark.parametrize(
    "changes", [dict(), dict(tie_word_embeddings=True), MIXED], ids=["dense", "tied", "mixed"]
)
DENSE_LAYER = {
    "input_layernorm": (16,),
    "post_attention_layernorm": (16,),
    "self_attn.q_proj": (32, 16),
    "self_attn.k_proj": (16, 16),
    "self_attn.v_proj": (16, 16),
    "self_attn.o_proj": (16, 32),
    "self_attn.q_norm": (8,),
    "self_attn.k_norm": (8,),
}


def _equal(a, b):
    def same(x, y):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)

    jax.tree.map(same, a, b)


def _edit(path, **changes):
    """Change config.json; None removes a field."""
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps({name: x for name, x in config.items() if x is not None}))


@pytest.fixture
def saved(tiny, params_of, tmp_path):
    """saved(**changes) -> (model, params, folder)."""

    def save(**changes):
        model = tiny(**changes)
        save_pretrained(params_of(model), model.config, tmp_path / "checkpoint")
        return model, params_of(model), tmp_path / "checkpoint"

    return save


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_are_not_finite_are_refused_by_name(saved, value, dtype):
    _, _, folder = saved(param_dtype=dtype)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = tensors[name].copy()
    tensors[name][-1, 3] = value
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=rf"{name} holds weights that are not finite \(NaN or infinity\).*fetch"):
        load_pretrained(folder)
    tensors[name][-1, 3] = 3e38  # the largest numbers are numbers
    save_file(tensors, folder / "model.safetensors")
    load_pretrained(folder)


@EVERY
def test_round_trip_is_exact(saved, changes):
    model, params, path = saved(**changes)
    loaded, again = load_pretrained(path)
    _equal(again, params)
    ours = {**vars(model.config), "experts_implementation": "auto"}
    if not model.config.num_experts:
        ours["moe_intermediate_size"] = ModelConfig(vocab_size=1).moe_intermediate_size  # of no use, not written
    assert vars(loaded.config) == ours
    assert loaded.mesh is None


def test_the_files_are_as_published(saved):
    """Names, [out, in] orientation, experts one by one, no head where tied."""
    _, params, path = saved(num_experts=2, mlp_only_layers=(0,), tie_word_embeddings=True)
    tensors = load_file(path / "model.safetensors")
    expected = {
        "model.embed_tokens.weight": (24, 16),
        "model.norm.weight": (16,),
        "model.layers.1.mlp.gate.weight": (2, 16),
    }
    for layer in range(2):
        expected |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in DENSE_LAYER.items()}
    for place, width in (("0.mlp", 20), ("1.mlp.experts.0", 12), ("1.mlp.experts.1", 12)):
        for name, shape in (("gate", (width, 16)), ("up", (width, 16)), ("down", (16, width))):
            expected[f"model.layers.{place}.{name}_proj.weight"] = shape
    assert {name: tensor.shape for name, tensor in tensors.items()} == expected
    x = np.random.default_rng(0).standard_normal(16)
    np.testing.assert_allclose(
        tensors["model.layers.1.mlp.experts.1.up_proj.weight"] @ x,
        x @ params["moe"]["mlp"]["up"][0, 1],
        rtol=1e-5,
        atol=1e-6,
    )
    config = json.loads((path / "config.json").read_text())
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
    assert (path / "model.safetensors").stat().st_mode == (path / "config.json").stat().st_mode  # that of the umask


def test_bfloat16_round_trip_and_conversion(tiny, params_of, tmp_path):
    model = tiny(num_experts=4, param_dtype="bfloat16", dtype="bfloat16")
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params_of(model))
    save_pretrained(params, model.config, tmp_path)
    loaded, again = load_pretrained(tmp_path)
    assert (loaded.config.param_dtype, loaded.config.dtype) == ("bfloat16", "bfloat16")
    _equal(again, params)
    loaded, again = load_pretrained(tmp_path, dtype="float32")
    assert (loaded.config.param_dtype, loaded.config.dtype) == ("float32", "float32")
    _equal(again, jax.tree.map(lambda x: x.astype(jnp.float32), params))


def test_sharded_files(tiny, params_of, tmp_path):
    model = tiny(**MIXED)
    save_pretrained(params_of(model), model.config, tmp_path, shard_bytes=20_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 2
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert {f.name for f in files} == set(index["weight_map"].values())
    assert all(file.stat().st_size < 20_000 + 8_000 for file in files)  # a header beside the tensors
    assert index["metadata"]["total_size"] == 4 * sum(x.size for x in jax.tree.leaves(params_of(model)))
    _equal(load_pretrained(tmp_path)[1], params_of(model))
    files[1].unlink()
    with pytest.raises(FileNotFoundError, match=rf"{files[1].name}.* does not exist; the checkpoint is incomplete"):
        load_pretrained(tmp_path)


OLD = dict(rope_parameters=None, dtype=None, num_local_experts=None)
NEW = dict(rope_theta=None, torch_dtype=None, num_experts=None)


@pytest.mark.parametrize("spelling", [OLD, NEW], ids=["old", "new"])
def test_both_spellings_of_the_config(saved, spelling):
    model, params, path = saved(**MIXED)
    _edit(path, **spelling)
    loaded, again = load_pretrained(path)
    assert (loaded.config.rope_theta, loaded.config.num_experts) == (100.0, 4)
    assert loaded.config.param_dtype == model.config.param_dtype
    _equal(again, params)


INV_FREQ = "self_attn.rotary_emb.inv_freq"
FORMS = {
    "float16": (dict(dtype="float16"), {}),
    "no type": (dict(dtype=None, torch_dtype=None), {}),
    "old Llama": (dict(OLD, torch_dtype="float16"), {f"model.layers.{i}.{INV_FREQ}": np.ones(4) for i in range(2)}),
}


@pytest.mark.parametrize("form", FORMS)
def test_older_and_other_forms_of_a_llama(saved, form):
    """Weights in half precision, or of no type that config.json names, are float32 here."""
    _, params, path = saved(qk_norm="none")
    changes, buffers = FORMS[form]
    tensors = load_file(path / "model.safetensors") | buffers
    save_file({name: tensor.astype(np.float16) for name, tensor in tensors.items()}, path / "model.safetensors")
    _edit(path, **changes)
    loaded, again = load_pretrained(path)
    assert (loaded.config.param_dtype, loaded.config.dtype, loaded.config.qk_norm) == ("float32", "float32", "none")
    _equal(again, jax.tree.map(lambda x: x.astype(np.float16).astype(np.float32), params))


def test_a_window_of_mistral_that_config_json_does_not_name_is_4096(saved):
    _, _, path = saved(qk_norm="none")
    for given, window in ((8, 8), (None, 4096)):
        _edit(path, model_type="mistral", sliding_window=given)
        assert load_pretrained(path)[0].config.sliding_window == window


@pytest.mark.parametrize("shape", [(1, 2, 2, 1), (2, 1, 1, 2)], ids=["fsdp-expert", "data-tensor"])
def test_loads_onto_a_mesh(saved, shape):
    model, params, path = saved(**MIXED)
    mesh = sharding.make_mesh(shape)
    loaded, again = load_pretrained(path, mesh=mesh)
    assert loaded.mesh is mesh
    _equal(again, params)
    expected = sharding.shardings(model.axes(), params, mesh)
    assert jax.tree.all(jax.tree.map(lambda x, s: x.sharding == s, again, expected))
    assert not again["moe"]["mlp"]["gate"].sharding.is_fully_replicated


def test_a_sharded_model_is_saved_whole(tiny, params_of, tmp_path):
    mesh = sharding.make_mesh((1, 2, 2, 1))
    model = tiny(mesh, num_experts=4)
    params = params_of(model)
    sharded = jax.device_put(params, sharding.shardings(model.axes(), params, mesh))
    save_pretrained(sharded, model.config, tmp_path)
    _equal(load_pretrained(tmp_path)[1], params)


@pytest.mark.slow
def test_loading_holds_little_beside_the_parameters(tiny, params_of, tmp_path):
    """The peak stays below the parameters and twice the largest tensor, far below a second copy of a stacked array."""
    model = tiny(hidden_size=256, intermediate_size=2048, num_hidden_layers=4)
    save_pretrained(params_of(model), model.config, tmp_path)
    size = sum(x.nbytes for x in jax.tree.leaves(params_of(model)))
    largest = 4 * 256 * 2048
    tracemalloc.start()
    loaded = load_pretrained(tmp_path)[1]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    _equal(loaded, params_of(model))
    assert size < peak < size + 2 * largest


def test_the_fingerprint_is_that_of_the_weights(saved, tmp_path, monkeypatch):
    """Whole for a small checkpoint; of a large one its header and both ends of every tensor."""
    _, _, path = saved()
    monkeypatch.setattr(published, "_SAMPLE", 16)
    for whole in (2**20, 0):
        monkeypatch.setattr(published, "_WHOLE", whole)
        first = fingerprint(path)
        assert first == fingerprint(path.rename(tmp_path / "elsewhere"))
        (tmp_path / "elsewhere").rename(path)
        content = (path / "model.safetensors").read_bytes()
        seen = set()
        for place in (9, len(content) // 2, len(content) - 1):
            changed = bytearray(content)
            changed[place] ^= 1
            (path / "model.safetensors").write_bytes(changed)
            with contextlib.suppress(ValueError):  # a header that is no longer JSON
                seen.add(fingerprint(path))
        assert first not in seen or not whole
        assert len(seen) >= 2
        (path / "model.safetensors").write_bytes(content)
    _edit(path, rope_theta=7.0)
    assert fingerprint(path) != first


def test_a_file_that_is_cut_off(saved):
    _, _, path = saved()
    content = (path / "model.safetensors").read_bytes()
    for size, message in (
        (len(content) - 1, r"bytes and its header asks for \d+: fetch it again"),
        (20, r"is cut off"),
    ):
        (path / "model.safetensors").write_bytes(content[:size])
        with pytest.raises(ValueError, match=message):
            load_pretrained(path)


def test_a_tied_checkpoint_may_repeat_the_embedding_as_its_head(saved):
    _, params, path = saved(tie_word_embeddings=True)
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}, path / "model.safetensors")
    _equal(load_pretrained(path)[1], params)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, path / "model.safetensors")
    with pytest.raises(ValueError, match=r"tie_word_embeddings=True but lm_head\.weight is not"):
        load_pretrained(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop("model.layers.1.self_attn.q_norm.weight"),
            r"missing model\.layers\.1\.self_attn\.q_norm\.weight;",
        ),
        (lambda t: t.pop("lm_head.weight"), r"missing lm_head\.weight; left over none"),
        (lambda t: t.update(a=np.zeros(1, np.float32)), r"missing none; left over a$"),
        (lambda t: t.update({f"x{i}": np.zeros(1, np.float32) for i in range(5)}), r"left over x0, x1, x2 and 2 more"),
        (
            lambda t: t.update({"model.norm.weight": np.zeros(15, np.float32)}),
            r"model\.norm\.weight has shape \(15,\), config\.json asks for \(16,\)",
        ),
        (
            lambda t: t.update({"model.norm.weight": np.zeros(16, np.int8)}),
            r"model\.norm\.weight has type I8; only F32, BF16, F16 and U8",
        ),
    ],
    ids=["missing", "no-head", "extra", "extras", "shape", "type"],
)
def test_tensors_that_do_not_fit(saved, change, message):
    _, _, path = saved()
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load_pretrained(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            dict(model_type="gpt2"),
            r"model_type='gpt2' is not one of qwen3, .*, mistral",
        ),
        (dict(attention_bias=True), r"attention_bias=True, which this model does not compute"),
        (dict(mlp_bias=True), r"mlp_bias=True"),
        (dict(clip_qkv=8.0), r"clip_qkv=8\.0"),
        (dict(use_sliding_window=True), r"use_sliding_window=True"),
        (dict(layer_types=["full_attention", "sliding_attention"]), r"use_sliding_window=True"),
        (
            dict(rope_scaling={"type": "yarn", "factor": 4}, rope_parameters=None),
            r"has no original_max_position_embeddings; add it",
        ),
        (
            dict(rope_scaling={"type": "dynamic", "factor": 4}, rope_parameters=None),
            r"has no max_position_embeddings; add it",
        ),
        (dict(rope_parameters={"rope_type": "longrope", "rope_theta": 1e4}), r"rope scaling='longrope'"),
        (dict(rope_parameters={"partial_rotary_factor": 0.5}), r"partial_rotary_factor=0\.5"),
        (dict(hidden_act="gelu"), r"hidden_act='gelu'"),
        (dict(quantization_config={"quant_method": "fp8"}), r"quantization_config"),
        (dict(head_dim=None), r"config\.json has no head_dim; add it"),
        (dict(num_experts=None, num_local_experts=None), r"config\.json has no num_local_experts or num_experts"),
        (dict(dtype="float8_e4m3fn", torch_dtype=None), r"dtype='float8_e4m3fn' is not float32, .*; pass dtype="),
        (dict(head_dim=3), r"model\.head_dim=3 must be even"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_configs_that_are_refused(saved, changes, message):
    _, _, path = saved(num_experts=4)
    _edit(path, **changes)
    with pytest.raises(ValueError, match=message):
        load_pretrained(path)


def test_missing_folders_and_files_name_the_remedy(saved, tmp_path):
    for path in (tmp_path / "none", "none/model.gguf", f"{tmp_path.name}/../x", "~/none/none"):
        with pytest.raises(FileNotFoundError, match=r"is neither a folder nor a \.gguf file, nor OWNER/NAME"):
            load_pretrained(path)
    _, _, path = saved()
    (path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors' does not exist; the checkpoint is incomplete"):
        load_pretrained(path)
    (path / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config\.json' does not exist"):
        load_pretrained(path)


def test_saving_refuses_to_mix_and_to_misname(tiny, params_of, saved, tmp_path):
    model, params, path = saved()
    with pytest.raises(FileExistsError, match=r"holds a checkpoint already; give an empty folder"):
        save_pretrained(params, model.config, path)
    with pytest.raises(ValueError, match=r"params are not those of this config.*\['ends'\]\['head'\] differ"):
        save_pretrained(params, tiny(tie_word_embeddings=True).config, tmp_path / "other")
    with pytest.raises(ValueError, match=r"params are not those of this config.*and \d+ more differ"):
        save_pretrained(params, tiny(hidden_size=8).config, tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@EVERY
def test_equals_transformers(saved, forward, tmp_path, changes, dtype):
    """Our file through Hugging Face's code and back: the same logits, the same tensors. Needs the extra `bench`."""
    torch = pytest.importorskip("torch", reason="parity needs torch: pip install 'jaxrl_llm[bench]'")
    transformers = pytest.importorskip(
        "transformers", reason="parity needs transformers: pip install 'jaxrl_llm[bench]'"
    )
    model, params, path = saved(**changes)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    name = "Qwen3MoeForCausalLM" if model.config.num_experts else "Qwen3ForCausalLM"
    assert type(theirs).__name__ == name
    tokens = np.random.default_rng(4).integers(0, 24, (3, 8))
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens)).logits.numpy()
    with jax.default_matmul_precision("highest"):
        logits, _ = forward(model, params, jnp.asarray(tokens))
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)

    theirs.to(getattr(torch, dtype)).save_pretrained(tmp_path / "theirs")
    loaded, again = load_pretrained(tmp_path / "theirs")
    assert loaded.config.param_dtype == dtype
    _equal(again, jax.tree.map(lambda x: x.astype(dtype), params))
