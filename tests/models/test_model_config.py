"""The configuration: Qwen3-MoE's layer rule, the parameter count, and what it refuses."""

import dataclasses

import jax
import pytest

from jaxrl_llm.models import ModelConfig


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        (dict(), "dddd"),
        (dict(num_experts=4), "mmmm"),
        (dict(num_experts=4, decoder_sparse_step=2), "dmdm"),
        (dict(num_experts=4, decoder_sparse_step=3), "ddmd"),
        (dict(num_experts=4, mlp_only_layers=(0, 3)), "dmmd"),
        (dict(num_experts=4, decoder_sparse_step=2, mlp_only_layers=(3,)), "dmdd"),
        (dict(num_experts=4, decoder_sparse_step=5), "dddd"),
    ],
)
def test_kinds(changes, kinds):
    config = ModelConfig(vocab_size=8, **changes)
    assert "".join(kind[0] for kind in config.kinds) == kinds
    assert config.num_moe_layers == kinds.count("m")


@pytest.mark.parametrize("experts", [0, 4], ids=["dense", "moe"])
def test_active_parameters_are_the_matrices_that_a_token_meets(tiny, experts):
    """All matrices but the embedding; of the experts' the two that are chosen of four."""
    model = tiny(num_experts=experts)
    met = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(jax.eval_shape(model.init, jax.random.key(0))):
        name = jax.tree_util.keystr(path)
        if "norm" not in name and "embedding" not in name:
            met += leaf.size * (2 / 4 if leaf.ndim == 4 else 1)
    assert model.config.active_parameters == met


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(vocab_size=0), r"model\.vocab_size=0 must be at least 1"),
        (dict(num_hidden_layers=0), r"model\.num_hidden_layers=0"),
        (dict(intermediate_size=0), r"model\.intermediate_size=0"),
        (dict(num_experts=4, moe_intermediate_size=0), r"model\.moe_intermediate_size=0"),
        (dict(num_attention_heads=4, num_key_value_heads=3), r"num_key_value_heads=3 must divide .*=4"),
        (dict(head_dim=7), r"model\.head_dim=7 must be even"),
        (dict(num_experts=4, num_experts_per_tok=5), r"num_experts_per_tok=5 must lie in 1\.\.num_experts=4"),
        (dict(num_experts=4, num_experts_per_tok=0), r"num_experts_per_tok=0"),
        (dict(num_experts=-1), r"num_experts"),
        (dict(decoder_sparse_step=0), r"decoder_sparse_step"),
        (dict(mlp_only_layers=(4,)), r"model\.mlp_only_layers=\(4,\) .*num_hidden_layers=4"),
        (dict(rope_theta=0.0), r"model\.rope_theta=0\.0 is out of range; give model\.rope_theta above 0"),
        (dict(rms_norm_eps=0.0), r"model\.rms_norm_eps=0\.0 is out of range"),
        (dict(dtype="float16"), r"model\.dtype='float16' is unknown.*; use one of float32, bfloat16"),
        (dict(remat="all"), r"model\.remat='all' is unknown; use one of none, block, dots"),
        (dict(experts_implementation="sparse"), r"experts_implementation='sparse' is unknown; use one of auto"),
        (
            dict(attention_implementation="fast"),
            r"attention_implementation='fast' is unknown.*; use one of auto, plain, flash",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**{"vocab_size": 8, **changes})


def test_is_frozen_and_hashable():
    config = ModelConfig(vocab_size=8)
    assert hash(config) == hash(dataclasses.replace(config))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.vocab_size = 9
