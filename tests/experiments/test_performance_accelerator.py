"""The accelerator benchmark: its counts by hand, its identities on tiny models, its choices by platform."""

import dataclasses
import functools
import json
import subprocess
import sys

import jax
import pytest

from experiments.performance import accelerator, kernels, roofline, turns
from experiments.performance.accelerator import CASES, SMALLEST
from jaxrl_llm.ground import sharding
from jaxrl_llm.models.attention import flash_decode, kv_cache
from jaxrl_llm.models.transformer import Model

# By hand, d = 32, 2 query heads and 1 key head of size 16, vocabulary 128, tied, one layer:
# q, o: 2 * 32 * 32, k, v: 2 * 32 * 16 = 3072 in all; SwiGLU of width 64: 3 * 32 * 64 = 6144; embedding 128 * 32 = 4096;
# norms 2 * 32 + 2 * 16 + 32 = 128. Four experts of width 16: 4 * 3 * 32 * 16 = 6144; router 32 * 4 = 128.
ATTENTION, FEED_FORWARD, EMBEDDING, NORMS, EXPERT, ROUTER = 3072, 6144, 4096, 128, 1536, 128
# 4 rows of 8 + 24 tokens: 32 * 33 / 2 = 528 pairs a row, 12 FLOPs for each of the 2 * 16 places of the heads.
PAIRS = 12 * 2 * 16 * 4 * 528


def bytes_read(name, experts_used):
    """A decode step: bfloat16 weights, float32 norms and router; 4 slots see 8 + 12 columns on average, 2 x 16 each."""
    dense = 2 * (ATTENTION + FEED_FORWARD + EMBEDDING) + 4 * NORMS
    moe = 2 * (ATTENTION + experts_used * EXPERT + EMBEDDING) + 4 * (NORMS + ROUTER)
    return {"dense": dense, "moe": moe}[name], 4 * 20 * 2 * 16 * 2


@pytest.mark.parametrize("layout", [kv_cache.STRETCHES, kv_cache.STACKED])
def test_counts_follow_layers_ties_and_experts(layout, monkeypatch):
    monkeypatch.setattr(kv_cache, "layout_of", lambda config, platform: layout)
    config = SMALLEST["moe"].model
    deep = dataclasses.replace(config, num_hidden_layers=3, tie_word_embeddings=False)
    layer = ATTENTION + ROUTER + 4 * EXPERT + 96  # 96: the norms of a layer
    assert roofline.parameters(Model(deep)) == 3 * layer + 2 * EMBEDDING + 32
    assert roofline.train_flops(deep, 4, 32) == 6 * deep.active_parameters * 128 + 3 * PAIRS
    weights = 3 * (2 * (ATTENTION + 1.5 * EXPERT) + 4 * (ROUTER + 96)) + 2 * EMBEDDING + 4 * 32  # a head, no table
    assert roofline.weight_bytes(Model(deep), experts_used=1.5) == weights
    assert roofline.cache_bytes(deep, 4, 20) == 3 * bytes_read("moe", 0)[1]


@pytest.mark.parametrize(
    ("kind", "flops", "bandwidth"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12, 3.35e12),
        ("NVIDIA H100 PCIe", 756e12, 2.0e12),
        ("NVIDIA H200", 989e12, 4.8e12),
        ("NVIDIA A100-SXM4-80GB", 312e12, 2.0e12),
        ("NVIDIA A100-SXM4-40GB", 312e12, 1.555e12),
        ("TPU v5 lite", 197e12, 0.82e12),
        ("TPU v5", 459e12, 2.76e12),
        ("TPU v5p", 459e12, 2.76e12),
        ("TPU v6 lite", 918e12, 1.64e12),
        ("NVIDIA GH200 480GB", None, None),
        ("cpu", None, None),
    ],
)
def test_devices_by_their_kind(kind, flops, bandwidth):
    assert roofline.device_named(kind) == (kind, flops, bandwidth)
    assert roofline.device_named(kind, bandwidth=1.0) == (kind, flops, 1.0)


def test_kernels_are_chosen_by_platform(monkeypatch):
    def of(platform, **fields):
        monkeypatch.setattr(sharding, "platform", lambda mesh: platform)
        return accelerator.implementations(dataclasses.replace(SMALLEST["moe"].model, **fields))

    assert of("cpu") == {"attention": "plain", "experts": "blocks"}
    assert of("gpu") == {"attention": "flash", "experts": "grouped"}
    assert of("tpu") == {"attention": "plain", "experts": "grouped"}  # a head of 16: too small for its kernel
    assert of("tpu", head_dim=128) == {"attention": "flash", "experts": "grouped"}
    assert of("gpu", attention_implementation="plain", experts_implementation="dense") == {
        "attention": "plain",
        "experts": "dense",
    }
    with pytest.raises(ValueError, match=r"needs a GPU .* this is cpu with bfloat16"):
        of("cpu", attention_implementation="flash")


def test_a_grouped_matmul_is_held_to_the_dense_form(monkeypatch):
    """The check of an accelerator's kernel, with this machine's; one that forgets a group is found."""
    sizes, right = (48, 8, 16, 24), kernels.grouped_matmul
    for kernel in kernels.grouped(sizes, repeats=1).values():
        assert max(kernel["errors"]) < 1e-2
        assert kernel["forward"] > 0 < kernel["forward_and_backward"]

    def forgetful(rows, weights, counts, platform):
        return right(rows, weights.at[0].set(0), counts, platform)

    monkeypatch.setattr(kernels, "grouped_matmul", forgetful)
    with pytest.raises(
        RuntimeError, match=r"in bfloat16 is wrong on cpu: its result is off by .*model.experts_implementation=dense"
    ):
        kernels.grouped(sizes, repeats=1)


@pytest.mark.slow
def test_the_kernels_of_attention_are_held_to_plain_products(monkeypatch):
    """XLA stands in for cuDNN and an interpreter for the GPU; one that sees later tokens is found. A CPU has none."""
    sizes, library = (4, 258, 4, 2, 16), jax.nn.dot_product_attention
    assert kernels.attention(sizes, repeats=1) == {}

    def stand_in(*arrays, implementation, is_causal, **mask):
        assert implementation == "cudnn"
        return library(*arrays, is_causal=is_causal, **mask)

    interpreted = functools.partial(flash_decode.attend_filled, interpret=True)
    monkeypatch.setattr(sharding, "platform", lambda mesh: "gpu")
    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    monkeypatch.setattr(flash_decode, "attend_filled", interpreted)
    found = kernels.attention(sizes, repeats=1)
    counts = {name: len(kernel["errors"]) for name, kernel in found.items()}
    assert counts == {"flash": 4, "flash_padded": 4, "decode": 1}

    monkeypatch.setattr(
        flash_decode, "attend_filled", lambda q, k, v, seen, filled: interpreted(q, k, v, seen, filled * 0 + 256)
    )
    with pytest.raises(
        RuntimeError, match=r"decode over a cache is wrong on gpu: its result .*attention_impl\w+=plain"
    ):
        kernels.attention(sizes, repeats=1)
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *arrays, **_: library(*arrays))
    with pytest.raises(RuntimeError, match="flash attention of packed rows is wrong on gpu: its result is off by"):
        kernels.attention(sizes, repeats=1)


@pytest.mark.slow
def test_the_accelerator_command(tmp_path):
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "experiments.performance.accelerator", "--smallest", "--json", str(out)]
    done = subprocess.run(
        [*command, "--remat", "block", "--repeats", "1", "--slots", "2"], capture_output=True, text=True, cwd=turns.ROOT
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert list(result) == list(CASES)
    assert all(found["remat"] == "block" and found["decode"]["slots"] == 2 for found in result.values())
    assert "| dense |" in done.stdout
    refused = subprocess.run([*command, "--remat", "all"], capture_output=True, text=True, cwd=turns.ROOT)
    assert refused.returncode == 1
    assert "model.remat='all' is unknown" in refused.stderr


def test_the_page_has_the_measured_table():
    folder = turns.ROOT / "experiments/performance"
    of_h100, of_h200 = (json.loads((folder / f"results/{name}.json").read_text()) for name in ("h100", "h200"))
    measured = [part for model in of_h100.values() for part in (model["train"], model["decode"])]
    measured += of_h200["updates and decode steps"].values()
    assert len(measured) == 4 + 8

    def cells(part):
        step, share = (part["seconds"], part["mfu"]) if "mfu" in part else (None, part["bandwidth_share"])
        time = f"{1e3 * part['seconds_per_step']:.3f}" if step is None else f"{step:.4g}"
        return f"| {time} | {part['tokens_per_s']:.0f} | {share:.1%} |"

    page = (folder / "details.md").read_text()
    assert [part for part in measured if cells(part) not in page] == []
