"""Random tiny checkpoints of every family, written by transformers: logits, router, greedy answers, and back again."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrl_llm.models import ModelConfig, load_pretrained, read_published, save_pretrained
from jaxrl_llm.models.checkpoints.pretrained_config import family_of, from_published, to_published
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.sampling import Sampling

torch = pytest.importorskip("torch", reason="parity needs torch: pip install 'jaxrl_llm[bench]'")
transformers = pytest.importorskip("transformers", reason="parity needs transformers: pip install 'jaxrl_llm[bench]'")

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
PLAIN, THETA = {"rope_type": "default", "rope_theta": 100.0}, 100.0
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
}


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=[pytest.mark.slow] * (name == "qwen2-tied")) for name in FAMILIES]
)
def checkpoint(request, tmp_path_factory):
    """(their model, the folder that they wrote)."""
    name, changes = FAMILIES[request.param]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, "rope_parameters": PLAIN, **changes})
    config.get_text_config()._attn_implementation = "eager"
    theirs = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in theirs.named_parameters():
            if "norm" in parameter_name or "bias" in parameter_name:  # ones and zeros would be no test of them
                parameter.copy_(torch.randn_like(parameter))
    folder = tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(folder)
    return theirs, folder


@pytest.fixture(scope="module")
def loaded(checkpoint):
    return load_pretrained(checkpoint[1])


TOKENS = np.random.default_rng(4).integers(0, 20, (3, 9))


def their_logits(model):
    with torch.no_grad():
        return model(torch.from_numpy(TOKENS)).logits.numpy()


def test_logits_and_router(checkpoint, loaded, forward):
    theirs, (model, params) = checkpoint[0], loaded
    with jax.default_matmul_precision("highest"):
        logits, routing = forward(model, params, jnp.asarray(TOKENS))
    np.testing.assert_allclose(logits, their_logits(theirs), rtol=2e-5, atol=2e-5)
    assert np.std(logits) > 0.1
    if model.config.num_moe_layers:
        with torch.no_grad():
            routers = theirs(torch.from_numpy(TOKENS), output_router_logits=True).router_logits
        assert len(routers) == model.config.num_moe_layers
        for layer, expected in enumerate(routers):
            expected = expected.reshape(*TOKENS.shape, -1)
            chosen = torch.topk(expected, 2).indices.numpy()
            np.testing.assert_array_equal(np.sort(routing.experts[layer]), np.sort(chosen))


def test_greedy_answers(checkpoint, loaded):
    """Through prefill and cache. Two ends of an answer are known to transformers; ours runs on past them."""
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
    theirs, folder = checkpoint
    model, params = loaded
    save_pretrained(params, model.config, tmp_path / "ours", published=read_published(folder))
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "ours"))
    assert set(after) == set(before) - ({"lm_head.weight"} if model.config.tie_word_embeddings else set())
    for name, tensor in after.items():
        np.testing.assert_array_equal(tensor, before[name])
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    assert type(again) is type(theirs)
    np.testing.assert_array_equal(their_logits(again), their_logits(theirs))
    assert again.config.max_position_embeddings == 48
    assert again.config.eos_token_id == again.generation_config.eos_token_id == [21, 22]
    assert again.config.rope_parameters == theirs.config.rope_parameters
    config, reread = load_pretrained(tmp_path / "ours")
    assert config == model
    jax.tree.map(np.testing.assert_array_equal, reread, params)


def test_families_are_told_apart():
    """Each config.json gives a ModelConfig of the same family; what no family computes is refused."""
    for name, (theirs, changes) in FAMILIES.items():
        make = getattr(transformers, f"{theirs}Config")
        published = make(**{**SIZES, "rope_parameters": PLAIN, **changes}).to_dict()
        config = from_published(published, "float32")
        assert family_of(config) == published["model_type"], name
        assert from_published(to_published(config)) == config
        assert json.dumps(to_published(config))
    sizes = dict(vocab_size=8, hidden_size=32, num_attention_heads=4, head_dim=8)
    for changes in (
        dict(qk_norm="full"),
        dict(qk_norm="head", attention_bias=True),
        dict(qk_norm="none", attention_bias=True, head_dim=16),
        dict(qk_norm="full", num_experts=4, mlp_only_layers=(0,)),
        dict(qk_norm="none", num_experts=4, norm_topk_prob=False),
    ):
        with pytest.raises(ValueError, match=r"no published family has model\.qk_norm=.*families are qwen3, qwen3_moe"):
            family_of(ModelConfig(**{**sizes, **changes}))
