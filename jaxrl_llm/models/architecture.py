"""The shape of a transformer, as one frozen dataclass that checks itself."""

import dataclasses
from typing import Literal

import jax.numpy as jnp

Kind = Literal["dense", "moe"]
_DTYPES = ("float32", "bfloat16")
_REMAT = ("none", "block", "dots")
_EXPERTS = ("auto", "dense", "grouped", "blocks")
_ATTENTION = ("auto", "plain", "flash")
_QK_NORM = ("none", "head", "full")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Names follow the published configurations of Qwen3 and Qwen3-MoE, as do the defaults of the fields that differ
    between families (`qk_norm`, `attention_bias`, `rope_scaling`); `num_experts=0` is a dense model."""

    vocab_size: int
    num_hidden_layers: int = 4
    hidden_size: int = 128
    intermediate_size: int = 256  # SwiGLU width of dense layers
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    num_experts: int = 0
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 128  # SwiGLU width of one expert
    norm_topk_prob: bool = True  # the gates of a token's experts sum to 1
    decoder_sparse_step: int = 1  # every n-th layer has experts
    mlp_only_layers: tuple[int, ...] = ()  # layers that stay dense
    qk_norm: str = "head"  # RMSNorm of q and k: none (Llama, Qwen2) | head (Qwen3) | full, over all heads (OLMoE)
    attention_bias: bool = False  # on q, k and v (Qwen2)
    rope_theta: float = 1_000_000.0
    rope_scaling: tuple[float, ...] = ()  # Llama 3: factor, low and high frequency factor, original length; (): none
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    param_dtype: str = "float32"
    dtype: str = "float32"  # compute; the router, its softmax and the logits are always float32
    remat: str = "none"  # none | block (recompute each block) | dots (keep matmul results)
    experts_implementation: str = "auto"  # auto | dense | grouped | blocks
    attention_implementation: str = "auto"  # auto | plain | flash

    def __post_init__(self) -> None:
        self._check_sizes()
        for name, value, allowed in (
            ("param_dtype", self.param_dtype, _DTYPES),
            ("dtype", self.dtype, _DTYPES),
            ("remat", self.remat, _REMAT),
            ("experts_implementation", self.experts_implementation, _EXPERTS),
            ("attention_implementation", self.attention_implementation, _ATTENTION),
            ("qk_norm", self.qk_norm, _QK_NORM),
        ):
            if value not in allowed:
                raise ValueError(f"model.{name}={value!r} is not one of {', '.join(allowed)}")
        scaling = self.rope_scaling
        if scaling and (len(scaling) != 4 or not min(scaling) > 0 or not scaling[1] < scaling[2]):
            raise ValueError(
                f"model.rope_scaling={scaling} must be () or four positive numbers: factor, low_freq_factor, "
                "high_freq_factor (above the low one), original_max_position_embeddings"
            )

    def _check_sizes(self) -> None:
        sizes = ("vocab_size", "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads")
        for name in (*sizes, "intermediate_size", "moe_intermediate_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name}={getattr(self, name)} must be at least 1")
        for name in ("rope_theta", "rms_norm_eps"):
            if not getattr(self, name) > 0:
                raise ValueError(f"model.{name}={getattr(self, name)} must be positive")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"model.num_key_value_heads={self.num_key_value_heads} must divide "
                f"model.num_attention_heads={self.num_attention_heads}"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"model.head_dim={self.head_dim} must be even: RoPE rotates pairs")
        if self.num_experts and not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ValueError(
                f"model.num_experts_per_tok={self.num_experts_per_tok} must lie in 1..num_experts={self.num_experts}"
            )
        if self.num_experts < 0 or self.decoder_sparse_step < 1:
            raise ValueError(
                f"model.num_experts={self.num_experts} must be >= 0 and "
                f"model.decoder_sparse_step={self.decoder_sparse_step} >= 1"
            )
        if not all(0 <= layer < self.num_hidden_layers for layer in self.mlp_only_layers):
            raise ValueError(
                f"model.mlp_only_layers={self.mlp_only_layers} must name layers below "
                f"model.num_hidden_layers={self.num_hidden_layers}"
            )

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kind of every layer, by Qwen3-MoE's rule."""
        return tuple(
            "moe"
            if self.num_experts and layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0
            else "dense"
            for layer in range(self.num_hidden_layers)
        )

    @property
    def num_moe_layers(self) -> int:
        return self.kinds.count("moe")

    @property
    def compute_dtype(self) -> jnp.dtype:
        return jnp.dtype(self.dtype)

    @property
    def active_parameters(self) -> int:
        """Parameters that act on one token: with the output head, without the embedding table."""
        attention = 2 * self.hidden_size * self.head_dim * (self.num_attention_heads + self.num_key_value_heads)
        expert = 3 * self.hidden_size * self.moe_intermediate_size
        moe = self.num_experts_per_tok * expert + self.hidden_size * self.num_experts
        dense = 3 * self.hidden_size * self.intermediate_size
        layers = sum(attention + (moe if kind == "moe" else dense) for kind in self.kinds)
        return layers + self.vocab_size * self.hidden_size
