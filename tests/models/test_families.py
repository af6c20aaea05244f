"""Tiny checkpoints of every family: the logits that transformers gave once, and where it is installed, router, greedy
answers, and back again."""

import json
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrl_llm.models import ModelConfig, load_pretrained, read_published, save_pretrained
from jaxrl_llm.models.checkpoints.pretrained_config import family_of, from_published, to_published
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.sampling import Sampling
from tests.reference.families import FAMILIES, GOLDEN, TOKENS, config_of, logits_of, model_of, write_folder

GOLDENS = json.loads(GOLDEN.read_text())

needs_transformers = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("torch") is None, reason="parity needs torch: pip install 'jaxrl_llm[bench]'"),
]


@pytest.mark.parametrize("family", GOLDENS)
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
        for parameter_name, parameter in theirs.named_parameters():
            if "norm" in parameter_name or "bias" in parameter_name:  # ones and zeros would be no test of them
                parameter.copy_(torch.randn_like(parameter))
    folder = tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(folder)
    return theirs, folder


@pytest.fixture(scope="module")
def loaded(checkpoint):
    return load_pretrained(checkpoint[1])


def test_logits_and_router(checkpoint, loaded, forward):
    import torch

    theirs, (model, params) = checkpoint[0], loaded
    with jax.default_matmul_precision("highest"):
        logits, routing = forward(model, params, jnp.asarray(TOKENS))
    np.testing.assert_allclose(logits, logits_of(theirs), rtol=2e-5, atol=2e-5)
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
    np.testing.assert_array_equal(logits_of(again), logits_of(theirs))
    assert again.config.max_position_embeddings == 48
    assert again.config.eos_token_id == again.generation_config.eos_token_id == [21, 22]
    assert again.config.rope_parameters == theirs.config.rope_parameters
    config, reread = load_pretrained(tmp_path / "ours")
    assert config == model
    jax.tree.map(np.testing.assert_array_equal, reread, params)


@pytest.mark.parametrize("family", GOLDENS)
def test_families_are_told_apart(family):
    """Each config.json gives a ModelConfig of the same family."""
    published = GOLDENS[family]["config"]
    config = from_published(published)
    assert family_of(config) == {"mistral": "llama"}.get(family, published["model_type"])
    assert from_published(to_published(config)) == config
    assert to_published(config, published)["model_type"] == published["model_type"]
    assert json.dumps(to_published(config))


def test_what_no_family_computes_is_refused():
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
