"""MXFP4 as the standard describes it, number by number, and a checkpoint that holds its experts so."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrl_llm.models import load_pretrained, read_published, save_pretrained
from jaxrl_llm.models.checkpoints.interleaved_experts import dequantised
from jaxrl_llm.models.checkpoints.pretrained_config import from_published
from tests.reference.families import GOLDEN, write_folder


def number(nibble, scale):
    """E2M1: a sign, two bits of exponent with bias 1, and one of fraction, alone where the exponent is 0."""
    sign, exponent, fraction = -1 if nibble & 8 else 1, nibble >> 1 & 3, nibble & 1
    size = (1 + fraction / 2) * 2.0 ** (exponent - 1) if exponent else fraction / 2
    return sign * size * 2.0 ** (scale - 127)


def test_every_number_of_four_bits():
    """One block of 32: the low half of a byte comes first, and a block's scale is a power of two."""
    nibbles = [(7 * i + 3) % 16 for i in range(32)]
    assert set(nibbles) == set(range(16))
    blocks = np.array([[[a | b << 4 for a, b in zip(nibbles[::2], nibbles[1::2], strict=True)]]], np.uint8)
    for scale in (127, 120, 130):
        found = dequantised(blocks, np.array([[scale]], np.uint8))
        assert found.astype(np.float32).tolist() == [[number(nibble, scale) for nibble in nibbles]]


def test_a_checkpoint_in_mxfp4_is_read_and_exported_without(tmp_path):
    """d = f = 32, one block a row: gate and up alternate among the outputs, and down is [outputs, in] too."""
    golden = json.loads(GOLDEN.read_text())["gpt_oss"]
    config = golden["config"] | {"hidden_size": 32, "intermediate_size": 32, "dtype": "bfloat16"}
    config["quantization_config"] = {"quant_method": "mxfp4"}
    shapes = {
        name: [32 if size == golden["config"]["intermediate_size"] else 64 if size == 40 else size for size in shape]
        for name, shape in golden["shapes"].items()
    }
    folder = write_folder(tmp_path, config, shapes)
    tensors, rng, numbers = load_file(folder / "model.safetensors"), np.random.default_rng(0), {}
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, _, outputs = tensors.pop(name).shape
        blocks, scales = rng.integers(0, 256, (experts, outputs, 1, 16)), rng.integers(122, 126, (experts, outputs, 1))
        tensors |= {f"{name}_blocks": blocks.astype(np.uint8), f"{name}_scales": scales.astype(np.uint8)}
        pairs = np.stack([blocks & 15, blocks >> 4], -1).reshape(experts, outputs, 32)
        numbers[name] = np.vectorize(number)(pairs, scales).swapaxes(1, 2)  # [experts, in, outputs]
    save_file(tensors, folder / "model.safetensors")
    _, params = load_pretrained(folder)
    mlp = params["moe"]["mlp"]
    for layer in range(2):
        both, down = (numbers[f"model.layers.{layer}.mlp.experts.{name}"] for name in ("gate_up_proj", "down_proj"))
        for ours, theirs in (("gate", both[..., ::2]), ("up", both[..., 1::2]), ("down", down)):
            np.testing.assert_array_equal(np.asarray(mlp[ours][layer], np.float32), theirs)
    model, params = load_pretrained(folder)
    save_pretrained(params, model.config, tmp_path / "ours", published=read_published(folder))
    assert "quantization_config" not in json.loads((tmp_path / "ours" / "config.json").read_text())
    jax.tree.map(np.testing.assert_array_equal, load_pretrained(tmp_path / "ours")[1], params)


def test_other_quantised_weights_are_refused():
    config = json.loads(GOLDEN.read_text())["gpt_oss"]["config"]
    with pytest.raises(ValueError, match="quantization_config='fp8'"):
        from_published(config | {"quantization_config": {"quant_method": "fp8"}})
