"""Operations that a training step must compute, bytes that a decode step must read, and peak rates of devices."""

import re
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.models import Model, ModelConfig

__all__ = ["Device", "cache_bytes", "device_named", "parameters", "train_flops", "weight_bytes"]


class Device(NamedTuple):
    """peak_flops: dense bfloat16 FLOP/s; bandwidth: bytes/s of the device's memory. None: not known."""

    kind: str
    peak_flops: float | None
    bandwidth: float | None


# jax's device_kind; the first that matches. Vendors' data sheets, without sparsity.
_DEVICES = (
    (r"\bH100 PCIe", 756e12, 2.0e12),
    (r"\bH100 NVL", 835e12, 3.9e12),
    (r"\bH100\b", 989e12, 3.35e12),
    (r"\bH200\b", 989e12, 4.8e12),
    (r"\bA100.*40GB", 312e12, 1.555e12),
    (r"\bA100\b", 312e12, 2.0e12),
    (r"TPU v5 ?(lite|e)", 197e12, 0.82e12),
    (r"TPU v5p?$", 459e12, 2.76e12),
    (r"TPU v6 ?(lite|e)", 918e12, 1.64e12),
)


def device_named(kind: str, peak_flops: float | None = None, bandwidth: float | None = None) -> Device:
    """The device with the table's figures, or the given ones in their place."""
    known = next((rates for pattern, *rates in _DEVICES if re.search(pattern, kind)), (None, None))
    return Device(kind, peak_flops or known[0], bandwidth or known[1])


def parameters(model: Model) -> int:
    """All parameters, as the tree has them."""
    return sum(x.size for x in jax.tree.leaves(_shapes(model)))


def train_flops(config: ModelConfig, rows: int, length: int) -> float:
    """FLOPs of the forward and backward of `rows` whole rows of `length` tokens.

    6 A rows length + 12 L H h rows length (length + 1) / 2: A active parameters (2 forward, 4 backward a token), and in
    L layers for every pair of a token and one that it sees q k^T and w v over H heads of size h (4 H h forward, 8 H h
    backward). What the norms, the softmaxes, the router's top-k and AdamW compute is left out.
    Recomputation by rematerialisation does not count, nor does attention between pairs that do not see each other.
    """
    pairs = rows * length * (length + 1) / 2
    attention = 12 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * pairs
    return 6.0 * config.active_parameters * rows * length + attention


def weight_bytes(model: Model, experts_used: float = 0.0) -> float:
    """Bytes of the weights that one decode step reads, each once: the decode loop's own arrays.

    Left out: the experts that no token of the batch chose (experts_used a layer did), and the embedding table unless it
    is the output head too.
    """
    config = model.config
    decode = jax.eval_shape(lambda params: model.unstack(params, config.compute_dtype), _shapes(model))

    def read(path: Any, x: Any) -> float:
        name, size = jax.tree_util.keystr(path), x.size * np.dtype(x.dtype).itemsize
        if "embedding" in name and not config.tie_word_embeddings:
            return 0.0
        of_experts = name.startswith("['moe']") and "['mlp']" in name and "router" not in name
        return size * experts_used / config.num_experts if of_experts else float(size)

    return sum(jax.tree.leaves(jax.tree_util.tree_map_with_path(read, decode)))


def cache_bytes(config: ModelConfig, slots: int, columns: float) -> float:
    """Bytes of the keys and values that one decode step reads: `columns` of every slot, in the compute dtype."""
    column = 2 * config.num_key_value_heads * config.head_dim * config.compute_dtype.itemsize
    return config.num_hidden_layers * slots * columns * column


def _shapes(model: Model) -> Any:
    return jax.eval_shape(model.init, jax.random.key(0))
