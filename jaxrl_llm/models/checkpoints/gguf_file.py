"""A GGUF file as if it were a folder in the Hugging Face layout: a config.json, and tensors under their names there.

Quantised tensors are dequantised to float32 a few rows at a time. Files of architecture `llama` hold the rows of q and
k interleaved, (0, half, 1, half + 1, ...) of each head; they are put back here in the half-split order of `rotate`.
Needs the package `gguf` (extra `hf`).
"""

import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.ground.whole_gguf import whole_gguf

_MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}
_ENDS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    **{f"attn_{x}.{kind}": f"self_attn.{x}_proj.{kind}" for x in "qkv" for kind in ("weight", "bias")},
    **{f"attn_{x}_norm.weight": f"self_attn.{x}_norm.weight" for x in "qk"},
    **{f"ffn_{x}.weight": f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")},
    "ffn_gate_inp.weight": "mlp.gate.weight",
}
_EXPERTS = {f"ffn_{x}_exps.weight": f"mlp.experts.{{expert}}.{x}_proj.weight" for x in ("gate", "up", "down")}
_SIZES = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
_IDS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}


@dataclasses.dataclass(frozen=True)
class GGUFTensor:
    """A tensor of the file, or one expert's part of it. heads: how many q or k have if their rows are interleaved."""

    data: np.ndarray
    kind: Any
    shape: tuple[int, ...]
    heads: int = 0

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Rows start..stop of the first axis, float32."""
        from gguf import quants

        rows = slice(start, stop)
        if self.heads:
            half = self.shape[0] // self.heads // 2
            head, within = np.divmod(np.arange(start, stop), 2 * half)
            rows = head * 2 * half + within % half * 2 + within // half
        if len(self.shape) == 1:
            return quants.dequantize(self.data, self.kind)[rows]
        return quants.dequantize(self.data[rows], self.kind)


def open_gguf(path: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    """(what config.json would hold, tensors by their names in the Hugging Face layout); a tensor is read on access."""
    return _open(path, path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=1)  # decoding its token tables takes the reader seconds
def _open(path: Path, _modified: int) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    try:
        return _read(whole_gguf(path), path)
    except ImportError as error:
        raise ImportError(f"{path.name} needs the package gguf: pip install 'jaxrl_llm[hf]'") from error
    except (OSError, MemoryError):
        raise
    except Exception as error:  # the reader trusts the file's own lengths, types and offsets
        known = isinstance(error, ValueError) and path.name in str(error)
        if known:
            raise
        what = f"{path} is no GGUF file, or is cut off ({type(error).__name__}: {error})"
        raise ValueError(f"{what}; fetch it again") from error


def _read(reader: Any, path: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    def field(name: str) -> Any:
        entry = reader.get_field(name)
        return None if entry is None else entry.contents()

    architecture = field("general.architecture")
    if architecture not in _MODEL_TYPES:
        raise ValueError(
            f"{path.name}: general.architecture={architecture!r} is not one of {', '.join(_MODEL_TYPES)}; load the "
            "checkpoint from its Hugging Face folder if its family is supported there"
        )
    names = {tensor.name for tensor in reader.tensors}
    config = {ours: field(f"{architecture}.{theirs}") for ours, theirs in _SIZES.items()}
    config |= {ours: field(f"tokenizer.ggml.{theirs}") for ours, theirs in _IDS.items()}
    config = {name: _decimal(value) for name, value in config.items() if value is not None}
    config |= {"model_type": _MODEL_TYPES[architecture], "tie_word_embeddings": "output.weight" not in names}
    scaling = field(f"{architecture}.rope.scaling.type")
    if "rope_freqs.weight" in names or scaling not in (None, "none"):
        raise ValueError(
            f"{path.name} stores scaled RoPE frequencies without the numbers that they were made of; load the "
            "checkpoint from its Hugging Face folder"
        )
    if architecture == "llama" and config.pop("num_local_experts", 0):
        raise ValueError(f"{path.name} is a mixture of experts of architecture llama; load it from its folder")
    if architecture == "qwen3moe":
        config |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    tensors: dict[str, GGUFTensor] = {}
    for tensor in reader.tensors:
        interleaved = architecture == "llama" and re.search(r"attn_[qk]\.", tensor.name)
        heads = config["num_key_value_heads" if "attn_k" in tensor.name else "num_attention_heads"]
        shape = tuple(int(n) for n in reversed(tensor.shape))
        whole = GGUFTensor(tensor.data, tensor.tensor_type, shape, heads if interleaved else 0)
        tensors |= _named(tensor.name, whole)
    config["vocab_size"] = tensors["model.embed_tokens.weight"].shape[0]
    config["dtype"] = "bfloat16" if any(t.kind.name == "BF16" for t in tensors.values()) else "float32"
    return config, tensors


def _named(name: str, tensor: GGUFTensor) -> dict[str, GGUFTensor]:
    """The tensor under its name in the Hugging Face layout; stacked experts one by one."""
    if name in _ENDS:
        return {_ENDS[name]: tensor}
    match = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
    if match and match[2] in _LAYER:
        return {f"model.layers.{match[1]}.{_LAYER[match[2]]}": tensor}
    if match and match[2] in _EXPERTS:
        full = f"model.layers.{match[1]}.{_EXPERTS[match[2]]}"
        parts = enumerate(tensor.data)
        return {full.format(expert=e): GGUFTensor(part, tensor.kind, tensor.shape[1:]) for e, part in parts}
    return {name: tensor}  # the check of names reports it as left over


def _decimal(value: Any) -> Any:
    """A number as it was before it was stored in float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value
