"""Tiny checkpoints of every family: the logits that transformers gave once, and where it is installed, router, greedy
answers, and back again."""

import copy
import json
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrl_llm.models import ModelConfig, load_pretrained, read_published, save_pretrained
from jaxrl_llm.models.checkpoints.pretrained_config import family_of, from_published, to_published
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.sampling import Sampling
from tests.reference.families import FAMILIES, GOLDEN, TOKENS, config_of, logits_of, model_of, write_folder

GOLDENS = json.loads(GOLDEN.read_text())
# Their parts are in other quick tests: rotations and latents in those of their own, norms in gemma3_text.
REPEATED = {
    "qwen3_5_moe_text",
    *("llama-linear", "llama-dynamic", "qwen2-yarn", "smollm3", "olmo3", "glm4"),
    *("deepseek_v2-groups", "deepseek_v3", "deepseek_v3-moonlight", "glm4_moe_lite"),
}

needs_torch = pytest.mark.skipif(
    find_spec("torch") is None, reason="parity needs torch: pip install 'jaxrl_llm[bench]'"
)
needs_transformers = [pytest.mark.slow, needs_torch]


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.slow] * (name in REPEATED)) for name in GOLDENS]
)
def test_golden_logits(tmp_path, forward, family):
    """A published checkpoint gives the logits that transformers computed of it."""
    golden = GOLDENS[family]
    model, params = load_pretrained(write_folder(tmp_path, golden["config"], golden["shapes"]))
    with jax.default_matmul_precision("highest"):
        logits, _ = forward(model, params, jnp.asarray(TOKENS[:1]))
    np.testing.assert_allclose(logits[0], golden["logits"], atol=5e-5)


@pytest.fixture(scope="module", params=[pytest.param(name, marks=needs_transformers) for name in FAMILIES])
def checkpoint(request, tmp_path_factory):
    """(their model, the folder that they wrote)."""
    import torch

    torch.manual_seed(0)
    theirs = model_of(config_of(request.param))
    with torch.no_grad():
        for name, tensor in [*theirs.named_parameters(), *theirs.named_buffers()]:
            if "norm" in name or "bias" in name:  # ones and zeros would be no test of them
                tensor.copy_(torch.randn_like(tensor))
    folder = tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(folder)
    return theirs, folder


@pytest.fixture(scope="module")
def loaded(checkpoint):
    return load_pretrained(checkpoint[1])


def test_logits_and_router(checkpoint, loaded, forward):
    theirs, (model, params) = checkpoint[0], loaded
    chosen = []
    for module in theirs.modules():
        if type(module).__name__.lower().endswith("topkrouter"):  # gives logits, weights and experts
            module.register_forward_hook(lambda _, given, out: chosen.append(out[2].numpy()))
    with jax.default_matmul_precision("highest"):
        logits, routing = forward(model, params, jnp.asarray(TOKENS))
    np.testing.assert_allclose(logits, logits_of(theirs), rtol=1e-5, atol=1e-5)
    assert np.std(logits) > 0.1
    assert len(chosen) == model.config.num_moe_layers
    for layer, experts in enumerate(chosen):
        np.testing.assert_array_equal(np.sort(routing.experts[layer]), np.sort(experts.reshape(*TOKENS.shape, -1)))


def test_gradients(checkpoint, loaded, forward, tmp_path):
    """Gradients of a weighted sum of logits, compared in the files that both write of them."""
    import torch

    theirs, (model, params) = copy.deepcopy(checkpoint[0]), loaded
    weights = np.random.default_rng(2).standard_normal((*TOKENS.shape, model.config.vocab_size)).astype(np.float32)
    (theirs(torch.from_numpy(TOKENS)).logits * torch.from_numpy(weights)).sum().backward()
    with torch.no_grad():
        for tensor in theirs.parameters():
            tensor.copy_(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad)
        for name, tensor in theirs.named_buffers():
            tensor.mul_("bias" not in name)  # decides a choice, which has no gradient
    theirs.save_pretrained(tmp_path / "theirs")
    with jax.default_matmul_precision("highest"):
        gradients = jax.grad(lambda p: jnp.sum(forward(model, p, jnp.asarray(TOKENS))[0] * weights))(params)
    save_pretrained(gradients, model.config, tmp_path / "ours", published=read_published(checkpoint[1]))
    expected, found = (load_file(tmp_path / by / "model.safetensors") for by in ("theirs", "ours"))
    for name, tensor in found.items():
        np.testing.assert_allclose(tensor, expected[name], rtol=1e-4, atol=1e-5 * np.abs(expected[name]).max() + 1e-6)


def test_greedy_answers(checkpoint, loaded):
    """Through prefill and cache. Two ends of an answer are known to transformers; ours runs on past them."""
    import torch

    theirs, (model, params) = checkpoint[0], loaded
    with torch.no_grad():
        full = theirs.generate(
            torch.from_numpy(TOKENS), max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=23
        ).numpy()
    engine = Engine(model, Sampling(0.0, 0, 1.0), 1, 8, end_ids=(1000,))
    with jax.default_matmul_precision("highest"):
        ours = engine.generate(params, TOKENS, np.full(3, 9), np.arange(3), jax.random.key(0))
    np.testing.assert_array_equal(ours.tokens, full)


def test_export_is_what_was_imported(checkpoint, loaded, tmp_path):
    import transformers

    theirs, folder = checkpoint
    model, params = loaded
    save_pretrained(params, model.config, tmp_path / "ours", published=read_published(folder))
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "ours"))
    assert set(after) == set(before) - ({"lm_head.weight"} if model.config.tie_word_embeddings else set())
    for name, tensor in after.items():
        np.testing.assert_array_equal(tensor, before[name])
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    assert type(again) is type(theirs)
    np.testing.assert_allclose(logits_of(again), logits_of(theirs), rtol=0, atol=5e-6)  # torch sums by alignment
    assert again.config.max_position_embeddings == 48
    assert again.config.eos_token_id == again.generation_config.eos_token_id == [21, 22]
    assert again.config.rope_parameters == theirs.config.rope_parameters
    config, reread = load_pretrained(tmp_path / "ours")
    assert config == model
    jax.tree.map(np.testing.assert_array_equal, reread, params)


@pytest.mark.slow
@needs_torch
@pytest.mark.parametrize(("kind", "agree"), [("linear", True), ("dynamic", False)])
def test_why_a_dynamic_rope_is_refused_beyond_its_length(kind, agree):
    """With 8 positions, transformers' own logits of 9 tokens fed one by one are those of a whole row, except with a
    dynamic RoPE, which turns the ninth query by other frequencies than the keys that the cache holds."""
    import torch

    config = config_of(f"llama-{kind}")
    config.max_position_embeddings = 8
    torch.manual_seed(0)
    theirs, tokens, cache = model_of(config), torch.from_numpy(TOKENS), None
    with torch.no_grad():
        whole = theirs(tokens).logits
        for column in range(9):
            out = theirs(tokens[:, column : column + 1], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
    assert (float(abs(out.logits[:, -1] - whole[:, -1]).max()) < 1e-4) == agree


@pytest.mark.parametrize("family", GOLDENS)
def test_families_are_told_apart(family):
    """Each config.json gives a ModelConfig of the same family."""
    published = GOLDENS[family]["config"]
    config = from_published(published)
    alike = {"mistral": "llama", "qwen3_5_moe_text": "qwen3_next"}  # without a window; but for names of tensors
    assert family_of(config) == alike.get(family, published["model_type"])
    assert from_published(to_published(config)) == config
    assert to_published(config, published)["model_type"] == published["model_type"]
    assert json.dumps(to_published(config))


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 6, "rope_theta": 100.0}
OLD = {"rope_parameters": None, "rope_theta": 100.0}
BY_KIND = {"full_attention": {"rope_theta": 100.0}, "sliding_attention": {"rope_theta": 20.0}}


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen2_moe", dict(use_sliding_window=True), "use_sliding_window=True, which this model does not compute"),
        ("qwen2_moe", dict(partial_rotary_factor=0.5, rope_parameters=None, rope_theta=1e4), "partial_rotary_factor=0"),
        ("qwen2_moe", dict(shared_expert_intermediate_size="wide"), "shared_expert_intermediate_size='wide' must be a"),
        ("qwen3_next", dict(attention_bias=True), "attention_bias=True, which this model does not compute"),
        ("qwen3_next", dict(linear_key_head_dim=None), "config.json has no linear_key_head_dim; add it"),
        ("qwen3_next", dict(linear_num_value_heads=3), "the value heads a multiple of the key heads"),
        ("qwen3_next", dict(layer_types=["mamba"] * 3), "must be .* or linear_attention for each of"),
        ("qwen3_5_moe_text", dict(attn_output_gate=False), "attn_output_gate=False, which this model does not compute"),
        ("granitemoe", dict(attention_bias=True), "attention_bias=True, which this model does not compute"),
        ("granitemoe", dict(logits_scaling=None), "config.json has no logits_scaling; add it"),
        ("granitemoe", dict(residual_multiplier="x"), "residual_multiplier='x' must be a number"),
        ("granite", dict(mlp_bias=True), "mlp_bias=True, which this model does not compute"),
        ("glm4_moe", dict(n_group=3), r"n_group=3 must cut num_experts=8 into groups of at least 2"),
        ("glm4_moe", dict(n_group=8, topk_group=8), r"n_group=8 must cut num_experts=8 into groups of at least 2"),
        ("glm4_moe", dict(topk_group=1), r"of which topk_group=1 hold num_experts_per_tok=3"),
        ("glm4_moe", dict(topk_group=None), "config.json has no topk_group; add it"),
        ("glm4_moe", dict(hidden_act="gelu"), "hidden_act='gelu', which this model does not compute"),
        ("glm4_moe", dict(first_k_dense_replace=4), r"mlp_only_layers=\(0, 1, 2, 3\) must name layers below"),
        ("gpt_oss", dict(attention_bias=False), "attention_bias=False, which this model does not compute"),
        ("gpt_oss", dict(swiglu_alpha=1.0), r"swiglu_alpha=1\.0, which this model does not compute"),
        ("gpt_oss", dict(layer_types=["full_attention"]), "must be .* for each of model.num_hidden_layers=2 layers"),
        ("gpt_oss", dict(sliding_window="wide"), "sliding_window='wide' must be a whole number"),
        ("ernie4_5_moe", dict(use_bias=True), "use_bias=True, which this model does not compute"),
        ("smollm3", dict(use_sliding_window=True), "use_sliding_window=True, which this model does not compute"),
        ("minimax_m2", dict(use_qk_norm=False), "use_qk_norm=False, which this model does not compute"),
        ("minimax_m2", dict(scoring_func="softmax"), "scoring_func='softmax', which this model does not compute"),
        ("minimax_m2", dict(quantization_config={"quant_method": "fp8"}), "quantization_config='fp8', which this"),
        (
            "minimax_m2",
            dict(attn_type_list=[1, 0]),
            r"linear attention \(0 in attn_type_list\), which is not",
        ),
        ("qwen3", dict(is_causal=False), "is_causal=False, which this model does not compute"),
        ("qwen3", dict(rope_scaling=YARN), "has rope_type='yarn' in one place and None in another; leave one of them"),
        (
            "qwen3",
            dict(rope_parameters=YARN | {"factor": 2.0}, rope_scaling=YARN),
            "has factor=4.0 in one .* 2.0",
        ),
        ("qwen3", dict(rope_parameters=YARN | {"type": "linear"}), "rope_type='yarn' and type='linear' differ"),
        ("qwen3", dict(rope_parameters=YARN, original_max_position_embeddings=3), "has original_max_position_embeddi"),
        ("qwen3", dict(rope_parameters=BY_KIND), "rope_parameters of qwen3 must be those of one RoPE for all layers"),
        ("gemma3_text", dict(rope_parameters=YARN), "rope_parameters of gemma3_text must be by kind of layer"),
        (
            "gemma3_text",
            dict(rope_parameters=BY_KIND | {"sliding_attention": {}}),
            "config.json has no rope_theta; add",
        ),
        ("gemma3_text", OLD | dict(rope_scaling={"type": "linear", "factor": 4.0}), "reads otherwise; give rope_type"),
        ("olmo3", OLD | dict(rope_scaling=YARN | {"truncate": False}), "reads otherwise; give rope_type, no truncate"),
        ("gemma3_text", dict(query_pre_attn_scalar=None), "config.json has no query_pre_attn_scalar; add it"),
        ("gemma3_text", dict(query_pre_attn_scalar=0), "query_pre_attn_scalar=0 must be a whole number from 1"),
        ("gpt_oss", dict(rope_parameters={"rope_theta": 100.0}), "config.json has no rope_type or type; add it"),
        ("gpt_oss", dict(swiglu_limit=None), "config.json has no swiglu_limit; add it"),
        (
            "mistral",
            dict(layer_types=["full_attention"] * 3, sliding_window=4),
            "layer_types=.*, which this model",
        ),
        ("glm4_moe", dict(first_k_dense_replace=None), "config.json has no first_k_dense_replace; add it"),
        ("glm4_moe", dict(n_shared_experts=None), "config.json has no n_shared_experts; add it"),
        ("glm4_moe", dict(scoring_func="softmax"), "scoring_func='softmax', which this model does not compute"),
        ("glm4_moe", dict(use_qk_norm="yes"), "use_qk_norm='yes' must be true or false"),
        (
            "glm4_moe_lite",
            dict(mlp_layer_types=["dense", "none", "sparse"]),
            r"mlp_layer_types has \['none'\], which",
        ),
        ("deepseek_v2", dict(norm_topk_prob=True), "norm_topk_prob=True, which this model does not compute"),
        ("deepseek_v2", dict(rope_interleave=False), "rope_interleave=False, which this model does not compute"),
        ("deepseek_v2", dict(topk_method="group_limited_greedy", n_group=None), "config.json has no n_group; add it"),
        ("ernie4_5_moe", dict(moe_num_shared_experts=None), "config.json has no moe_num_shared_experts; add it"),
        ("ernie4_5_moe", dict(moe_layer_end_index="2"), "moe_layer_end_index='2' must be a whole number"),
        ("ernie4_5_moe", dict(moe_norm_min=0.9), "moe_norm_min=0.9, which this model does not compute"),
        ("smollm3", dict(no_rope_layers=[1]), r"no_rope_layers=\[1\] must have a 0 or 1 for each of"),
        ("smollm3", dict(no_rope_layers=["a"] * 4), "no_rope_layers=.* must have a 0 or 1 for each of"),
    ],
)
def test_variants_that_are_not_computed_are_refused_by_name(family, changes, message):
    with pytest.raises(ValueError, match=message):
        from_published(GOLDENS[family]["config"] | changes)


def test_layers_that_predict_further_tokens_are_not_read(tmp_path):
    golden = GOLDENS["glm4_moe"]
    further = {"model.layers.3.eh_proj.weight": [32, 64], "model.layers.3.mlp.gate.weight": [8, 32]}
    config = golden["config"] | {"num_nextn_predict_layers": 1}
    model, params = load_pretrained(write_folder(tmp_path, config, golden["shapes"] | further))
    assert len(params["moe"]["mlp"]["router"]) == model.config.num_hidden_layers - 1 == 2
    assert to_published(model.config, config)["num_nextn_predict_layers"] == 0


def test_the_language_model_beside_one_for_pictures(tmp_path):
    """As Qwen3.5 is published: nested fields, other names, all experts of a layer in one tensor, further layers."""
    golden = GOLDENS["qwen3_5_moe_text"]
    (tmp_path / "text").mkdir()
    model, params = load_pretrained(write_folder(tmp_path / "text", golden["config"], golden["shapes"]))
    tensors = load_file(tmp_path / "text" / "model.safetensors")
    count, within = golden["config"]["num_experts"], {}
    for name, tensor in tensors.items():
        name = name.replace("model.", "model.language_model.", 1)
        if ".experts." not in name:
            within[name] = tensor
            continue
        place = name.partition(".experts.")[0] + ".experts"
        names = [[f"model.{place[21:]}.{e}.{part}_proj.weight" for part in ("gate", "up")] for e in range(count)]
        within[f"{place}.gate_up_proj"] = np.stack([np.concatenate([tensors[n] for n in of]) for of in names])
        downs = [tensors[f"model.{place[21:]}.{e}.down_proj.weight"] for e in range(count)]
        within[f"{place}.down_proj"] = np.stack(downs)
    within |= {"model.visual.patch": np.ones((2, 2), np.float32), "mtp.norm.weight": np.ones(2, np.float32)}
    save_file(within, tmp_path / "model.safetensors", metadata={"format": "pt"})
    text = golden["config"] | {"full_attention_interval": 3, "layer_types": None}
    config = {"model_type": "qwen3_5_moe", "text_config": text, "vision_config": {}, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    again, found = load_pretrained(tmp_path)
    assert again == model
    jax.tree.map(np.testing.assert_array_equal, found, params)
    assert to_published(again.config, read_published(tmp_path).config)["model_type"] == "qwen3_5_moe_text"


def test_a_part_of_a_head_is_rotated_by_either_name():
    config = GOLDENS["minimax_m2"]["config"] | {"rope_parameters": {"rope_theta": 100.0}}
    assert from_published(config | {"rotary_dim": 4}).rotary_dim == 4  # as published
    assert from_published(config | {"rotary_dim": None, "partial_rotary_factor": 0.5}).rotary_dim == 6
    glm = GOLDENS["glm4_moe"]["config"] | {"rope_parameters": {"rope_theta": 100.0}}
    assert from_published({name: x for name, x in glm.items() if name != "partial_rotary_factor"}).rotary_dim == 6


def test_what_no_family_computes_is_refused():
    sizes = dict(vocab_size=8, hidden_size=32, num_attention_heads=4, head_dim=8)
    for changes in (
        dict(qk_norm="full"),
        dict(qk_norm="head", attention_bias=True),
        dict(qk_norm="full", num_experts=4, mlp_only_layers=(0,)),
        dict(qk_norm="none", num_experts=4, norm_topk_prob=False),
        dict(qk_norm="none", scoring_func="sigmoid", num_experts=4),
        dict(qk_norm="none", shared_expert_intermediate_size=8, num_experts=4),
        dict(qk_norm="head", partial_rotary_factor=0.5),
        dict(qk_norm="head", logits_scaling=6.0),
    ):
        with pytest.raises(ValueError, match=r"no published family has model\.qk_norm=.*families are qwen3, qwen3_moe"):
            family_of(ModelConfig(**{**sizes, **changes}))
