"""The model block of a run with a checkpoint: what it leaves open is the checkpoint's, what it says must agree."""

import dataclasses
import json
from pathlib import Path

import pytest

from configs import base, pretrained
from jaxrl_llm.models import ModelConfig, complete_fields, save_pretrained
from jaxrl_llm.run.settings import config_hash, validate

NAMES = [field.name for field in dataclasses.fields(ModelConfig)]


@pytest.fixture
def saved(tiny, params_of, tmp_path):
    """(the ModelConfig of a Llama-like checkpoint with 24 tokens, its folder)."""
    model = tiny(
        qk_norm="none", attention_bias=False, rope_scaling=(8.0, 1.0, 4.0, 64.0), experts_implementation="auto"
    )
    save_pretrained(params_of(model), model.config, tmp_path / "checkpoint")
    return model.config, str(tmp_path / "checkpoint")


def empty(path, **changes):
    run = dict(remat="none", experts_implementation="auto", attention_implementation="auto")
    return {**dict.fromkeys(NAMES), **run, **changes, "pretrained": path}


def test_open_fields_are_the_checkpoints(saved):
    config, path = saved
    fields = complete_fields(empty(path), 20)
    moe = ModelConfig(vocab_size=1).moe_intermediate_size  # of no use in a dense model, not in the file
    assert ModelConfig(**fields) == dataclasses.replace(config, moe_intermediate_size=moe)
    fields = complete_fields(empty(path, param_dtype="float32", dtype="bfloat16", remat="block"), 20)
    assert (fields["param_dtype"], fields["dtype"], fields["remat"]) == ("float32", "bfloat16", "block")


@pytest.mark.parametrize(
    ("stored", "given", "trained", "frozen", "computed"),
    [
        ("bfloat16", {}, "float32", "bfloat16", "bfloat16"),
        ("bfloat16", {"dtype": "float32"}, "float32", "bfloat16", "float32"),
        ("bfloat16", {"param_dtype": "float32"}, "float32", "float32", "bfloat16"),
        ("float32", {"param_dtype": "bfloat16"}, "bfloat16", "bfloat16", "float32"),
        ("float16", {}, "float32", "float32", "float32"),
        (None, {}, "float32", "float32", "float32"),
    ],
)
def test_what_is_trained_is_float32_and_what_is_frozen_as_stored(saved, stored, given, trained, frozen, computed):
    place = Path(saved[1]) / "config.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | {"dtype": stored, "torch_dtype": stored}))
    for is_frozen, held in ((False, trained), (True, frozen)):
        fields = complete_fields(empty(saved[1], **given), 20, frozen=is_frozen)
        assert (fields["param_dtype"], fields["dtype"]) == (held, computed)


def test_fields_that_agree_may_be_written_down(saved):
    config, path = saved
    given = {**dataclasses.asdict(config), "num_experts_per_tok": 7, "pretrained": path}  # of no use in a dense model
    assert complete_fields(given, 24)["hidden_size"] == 16


@pytest.mark.parametrize(
    ("changes", "tokens", "message"),
    [
        (
            dict(hidden_size=64, qk_norm="head"),
            20,
            r"contradicts model\.hidden_size=64 \(the checkpoint: 16\), .*qk_norm='head' \(the checkpoint: 'none'\)",
        ),
        (dict(vocab_size=20), 20, r"model\.vocab_size=20 \(the checkpoint: 24\); set them to None"),
        (dict(), 25, r"model\.vocab_size=24 is less than the tokenizer's 25 tokens"),
    ],
)
def test_contradictions_name_the_field(saved, changes, tokens, message):
    with pytest.raises(ValueError, match=message):
        complete_fields(empty(saved[1], **changes), tokens)


def test_without_a_checkpoint_nothing_is_open():
    with pytest.raises(ValueError, match=r"model\.attention_bias=None is taken from a checkpoint.*"):
        complete_fields(empty("", hidden_size=8), 20)
    with pytest.raises(ValueError, match=r"model\.pretrained=None must be the path"):
        complete_fields(empty(None), 20)
    with pytest.raises(FileNotFoundError, match=r"'nowhere' is neither a folder nor a \.gguf file, nor OWNER/NAME"):
        complete_fields(empty("nowhere"), 20)


def test_a_run_takes_its_model_from_the_checkpoint(saved, tmp_path):
    """The whole way through the settings; the run's identity follows the weights, not their place."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs tokenizers: pip install 'jaxrl_llm[hf]'")
    letters = {token: i for i, token in enumerate(["<end>", *"0123456789>,=: "])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(letters, []))
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(tmp_path / "checkpoint" / "tokenizer.json"))
    (tmp_path / "checkpoint" / "generation_config.json").write_text('{"eos_token_id": 0}')
    config = pretrained.get_config()
    config.model.pretrained = saved[1]
    settings = validate(config)
    assert settings.model.num_hidden_layers == 2
    assert settings.model.rope_scaling == (8.0, 1.0, 4.0, 64.0)
    assert (settings.model.vocab_size, settings.pretrained) == (24, saved[1])
    first = config_hash(config)
    (tmp_path / "checkpoint").rename(tmp_path / "moved")
    config.model.pretrained = str(tmp_path / "moved")
    assert config_hash(config) == first
    weights = bytearray((tmp_path / "moved" / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (tmp_path / "moved" / "model.safetensors").write_bytes(weights)
    assert config_hash(config) != first
    known = base.get_config()
    known.model.pretrained = config.model.pretrained
    with pytest.raises(ValueError, match=r"contradicts model\.num_hidden_layers=3 \(the checkpoint: 2\)"):
        validate(known)
    with pytest.raises(ValueError, match=r"model\.attention_bias=None is taken from a checkpoint, and there is none"):
        validate(pretrained.get_config())
