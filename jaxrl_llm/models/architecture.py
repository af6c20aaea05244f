"""The shape of a transformer, as one frozen dataclass that checks itself."""

import dataclasses
import itertools
from typing import Literal

import jax.numpy as jnp

from jaxrl_llm.ground.declared import REQUIRED, Block, declared

Kind = Literal["dense", "moe"]
Rows = Literal["padded", "packed", "shared"]  # what a row of tokens holds, see `Model.apply`
_DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class ModelConfig(Block, prefix="model."):
    """Names as in the published configurations of Qwen3 and Qwen3-MoE."""

    vocab_size: int = declared(REQUIRED, "None: the tokenizer's, or the checkpoint's", least=1)
    num_hidden_layers: int = declared(4, least=1)
    hidden_size: int = declared(128, least=1)
    intermediate_size: int = declared(256, "SwiGLU width of dense layers", least=1)
    num_attention_heads: int = declared(4, least=1)
    num_key_value_heads: int = declared(2, "divides the number of attention heads", least=1)
    head_dim: int = declared(32, "even: RoPE rotates pairs", least=2)
    num_experts: int = declared(0, "0: a dense model", least=0)
    num_experts_per_tok: int = declared(2)
    moe_intermediate_size: int = declared(128, "SwiGLU width of one expert", least=1)
    norm_topk_prob: bool = declared(True, "the gates of a token's experts sum to 1")
    decoder_sparse_step: int = declared(1, "every n-th layer has experts", least=1)
    mlp_only_layers: tuple[int, ...] = declared((), "layers that stay dense")
    qk_norm: str = declared(
        "head", "RMSNorm of q and k", among={"none": "Llama, Qwen2", "head": "Qwen3", "full": "OLMoE"}
    )
    attention_bias: bool = declared(False, "biases of q, k and v (Qwen2)")
    rope_theta: float = declared(1_000_000.0, above=0)
    rope_scaling: tuple[float, ...] = declared(
        (), "Llama 3: factor, low and high frequency factor, original length; (): none"
    )
    rms_norm_eps: float = declared(1e-6, above=0)
    tie_word_embeddings: bool = declared(False)
    param_dtype: str = declared("float32", among=_DTYPES)
    dtype: str = declared("float32", "of the computation; router and logits stay float32", among=_DTYPES)
    remat: str = declared("none", "what the backward pass recomputes", among=("none", "block", "dots"))
    experts_implementation: str = declared("auto", among=("auto", "dense", "grouped", "blocks"))
    attention_implementation: str = declared("auto", among=("auto", "plain", "flash"))

    def check(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"model.num_key_value_heads={self.num_key_value_heads} must divide "
                f"model.num_attention_heads={self.num_attention_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"model.head_dim={self.head_dim} must be even: RoPE rotates pairs")
        if self.num_experts and not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ValueError(
                f"model.num_experts_per_tok={self.num_experts_per_tok} must lie in 1..num_experts={self.num_experts}"
            )
        if not all(0 <= layer < self.num_hidden_layers for layer in self.mlp_only_layers):
            raise ValueError(
                f"model.mlp_only_layers={self.mlp_only_layers} must name layers below "
                f"model.num_hidden_layers={self.num_hidden_layers}"
            )
        scaling = self.rope_scaling
        if scaling and (len(scaling) != 4 or not min(scaling) > 0 or not scaling[1] < scaling[2]):
            raise ValueError(
                f"model.rope_scaling={scaling} must be () or four positive numbers: factor, low_freq_factor, "
                "high_freq_factor (above the low one), original_max_position_embeddings"
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
    def runs(self) -> list[tuple[Kind, range]]:
        """Consecutive layers of one kind, and their places among all layers of that kind."""
        done, out = {"dense": 0, "moe": 0}, []
        for kind, group in itertools.groupby(self.kinds):
            start = done[kind]
            done[kind] += len(list(group))
            out.append((kind, range(start, done[kind])))
        return out

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
