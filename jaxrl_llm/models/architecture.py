"""The shape of a transformer, as one frozen dataclass that checks itself."""

import dataclasses
import itertools
from typing import Literal

import jax.numpy as jnp

from jaxrl_llm.ground.by_name import ByName
from jaxrl_llm.ground.declared import REQUIRED, Block, declared
from jaxrl_llm.models.attention.rotary import Rope
from jaxrl_llm.models.gate import Gate

Kind = str  # of a layer, an entry of `transformer.LAYERS`
Rows = Literal["padded", "packed", "shared"]  # what a row of tokens holds, see `Model.apply`
DELTA = ("delta_dense", "delta_moe")  # kinds of layers with `models/attention/delta_net.py`
_DTYPES = ("float32", "bfloat16")
OF_THE_RUN = ("param_dtype", "dtype", "numerics", "remat", "experts_implementation", "attention_implementation")
_OF_SOME = ByName(
    {
        "check_scaling": "jaxrl_llm.models.attention.rope_scaling",
        "check_length": "jaxrl_llm.models.attention.rope_scaling",
        "check_layers": "jaxrl_llm.models.attention.layer_kinds",
        "attention_parameters": "jaxrl_llm.models.attention.layer_kinds",
        "further_parameters": "jaxrl_llm.models.attention.layer_kinds",
    }
)
_RARE = ("expert_bias", "swiglu_limit", "kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "v_head_dim", "layer_types")
_RARE += ("attn_output_gate", "linear_num_value_heads")
_OF_EXPERTS = (
    *("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step"),
    *("mlp_only_layers", "scoring_func", "selection_bias", "n_group", "topk_group", "routed_scaling_factor"),
    *("group_score",),
    *("shared_expert_intermediate_size", "shared_expert_gate", "expert_bias", "swiglu_limit"),
)


@dataclasses.dataclass(frozen=True)
class ModelConfig(Block, prefix="model."):
    """Names as in the published configurations of Qwen3-MoE, GLM-4.5 and Granite."""

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
    scoring_func: str = declared("softmax", "of router logits", among=("softmax", "sigmoid"))
    selection_bias: bool = declared(False, "a frozen bias of each expert that decides the choice, never the gates")
    n_group: int = declared(1, "groups of experts, of which a token uses the best", least=1)
    topk_group: int = declared(1, "groups that a token uses", least=1)
    group_score: str = declared("top2", "a group's two best scores, or its best (DeepSeek-V2)", among=("top2", "max"))
    routed_scaling_factor: float = declared(1.0, "factor of the gates", above=0)
    shared_expert_intermediate_size: int = declared(0, "width of an expert that every token uses; 0: none", least=0)
    shared_expert_gate: bool = declared(False, "its output is weighted by a sigmoid of the state (Qwen2-MoE)")
    expert_bias: bool = declared(False, "biases of the router and of experts (gpt-oss)")
    swiglu_limit: float = declared(0.0, "clamp of the experts' SwiGLU of gpt-oss; 0: SwiGLU as it is", least=0)
    qk_norm: str = declared(
        "head", "RMSNorm of q and k", among={"none": "Llama, Qwen2", "head": "Qwen3", "full": "OLMoE"}
    )
    attention_bias: bool = declared(False, "biases of q, k and v (Qwen2)")
    attention_output_bias: bool = declared(False, "a bias of o (gpt-oss)")
    attention_sinks: bool = declared(False, "a learned score of each head for no column at all (gpt-oss)")
    sliding_window: int = declared(0, "columns that a token of a sliding layer sees; 0: all", least=0)
    layer_types: tuple[str, ...] = declared(
        (), "sliding_attention, full_attention or linear_attention; (): all are alike"
    )
    attn_output_gate: bool = declared(False, "attention's output is weighted by a sigmoid of the state (Qwen3-Next)")
    linear_num_key_heads: int = declared(0, "of layers with linear_attention, the gated delta rule; 0: none", least=0)
    linear_num_value_heads: int = declared(0, "a multiple of linear_num_key_heads", least=0)
    linear_key_head_dim: int = declared(0, "rows of a head's state", least=0)
    linear_value_head_dim: int = declared(0, "columns of a head's state", least=0)
    linear_conv_kernel_dim: int = declared(4, "tokens that their convolution sees", least=2)
    kv_lora_rank: int = declared(0, "width of the latent that keys and values come from (DeepSeek); 0: none", least=0)
    q_lora_rank: int = declared(0, "width of a latent that queries come from; 0: none", least=0)
    qk_rope_head_dim: int = declared(0, "with a latent: the last of head_dim, which RoPE rotates", least=0)
    v_head_dim: int = declared(0, "with a latent: the size of a head's values", least=0)
    attention_multiplier: float = declared(0.0, "factor of attention scores; 0: head_dim^-1/2", least=0)
    rope_theta: float = declared(1_000_000.0, above=0)
    partial_rotary_factor: float = declared(1.0, "share of head_dim that RoPE rotates, the first", above=0, most=1)
    rope_scaling: tuple[float, ...] = declared(
        (), "Llama 3: factor, low and high frequency factor, original length; (): none"
    )
    rope_type: str = declared(
        "llama3", "of rope_scaling, see docs/models.md", among=("llama3", "linear", "yarn", "dynamic")
    )
    rope_interleave: bool = declared(False, "RoPE rotates neighbours, not the halves of a head (ERNIE)")
    sliding_rope_theta: float = declared(0.0, "of sliding layers, without scaling; 0: that of others", least=0)
    no_rope_layers: tuple[int, ...] = declared((), "layers without RoPE (SmolLM3)")
    rms_norm_eps: float = declared(1e-6, above=0)
    norm_offset: bool = declared(False, "norms multiply by 1 + scale (Gemma 3)")
    norm_placement: str = declared(
        "pre", "before parts of a block, behind (OLMo 3), both (GLM-4)", among=("pre", "post", "sandwich")
    )
    hidden_act: str = declared("silu", "of dense layers", among={"silu": "SwiGLU", "gelu_tanh": "Gemma 3"})
    tie_word_embeddings: bool = declared(False)
    embedding_multiplier: float = declared(1.0, "factor of embeddings (Granite)", above=0)
    residual_multiplier: float = declared(1.0, "factor of what a block adds (Granite)", above=0)
    logits_scaling: float = declared(1.0, "divisor of logits (Granite)", above=0)
    param_dtype: str = declared("float32", "in bfloat16 small updates are lost", among=_DTYPES)
    dtype: str = declared("float32", "of the computation; router and logits stay float32", among=_DTYPES)
    numerics: str = declared(
        "fast",
        among={
            "fast": "the quickest kernels",
            "exact": "sampler and trainer agree to the last bit",
        },
    )
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
        if not self.kv_lora_rank and (self.rotary_dim % 2 or not self.rotary_dim):
            raise ValueError(
                f"model.partial_rotary_factor={self.partial_rotary_factor} of head_dim={self.head_dim} must be an even "
                "number: RoPE rotates pairs"
            )
        if self.num_experts and not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ValueError(
                f"model.num_experts_per_tok={self.num_experts_per_tok} must lie in 1..num_experts={self.num_experts}"
            )
        size, rest = divmod(self.num_experts, self.n_group)
        if self.n_group > 1 and (rest or size < 2 or not self.num_experts_per_tok <= self.topk_group * size):
            raise ValueError(
                f"model.n_group={self.n_group} must cut num_experts={self.num_experts} into groups of at least 2, of "
                f"which topk_group={self.topk_group} hold num_experts_per_tok={self.num_experts_per_tok}"
            )
        if self.topk_group > self.n_group:
            raise ValueError(f"model.topk_group={self.topk_group} must be at most n_group={self.n_group}")
        if self.shared_expert_gate and not self.shared_expert_intermediate_size:
            raise ValueError(
                "model.shared_expert_gate weights a shared expert and there is none; set "
                "model.shared_expert_intermediate_size, or shared_expert_gate=False"
            )
        if not all(0 <= layer < self.num_hidden_layers for layer in self.mlp_only_layers):
            raise ValueError(
                f"model.mlp_only_layers={self.mlp_only_layers} must name layers below "
                f"model.num_hidden_layers={self.num_hidden_layers}"
            )
        if self.rope_scaling:
            _OF_SOME["check_scaling"](self.rope_type, self.rope_scaling)
        if any(getattr(self, name) for name in _RARE) or not self.alike:
            _OF_SOME["check_layers"](self)

    def check_length(self, length: int) -> None:
        """Raise ValueError where rotary positions do not reach as far as the longest sequence."""
        if self.rope_scaling and self.rope_type == "dynamic":
            _OF_SOME["check_length"](length, self.rope_scaling)

    @property
    def alike(self) -> bool:
        """Every layer sees all columns and has the same RoPE."""
        return not (self.sliding_window or self.no_rope_layers)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kind of every layer, by Qwen3-MoE's rule; one of `DELTA` with linear attention."""
        kinds = [
            "moe"
            if self.num_experts and layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0
            else "dense"
            for layer in range(self.num_hidden_layers)
        ]
        if not self.linear_num_value_heads:
            return tuple(kinds)
        types = zip(kinds, self.layer_types, strict=True)
        return tuple(f"delta_{kind}" if of == "linear_attention" else kind for kind, of in types)

    @property
    def of_no_layer(self) -> tuple[str, ...]:
        """Fields that no layer reads: those of experts in a dense model, the width of dense layers if none is dense."""
        if not self.num_moe_layers:
            return _OF_EXPERTS
        return () if self.num_moe_layers < self.num_hidden_layers else ("intermediate_size",)

    @property
    def runs(self) -> list[tuple[Kind, range]]:
        """Consecutive layers of one kind, and their places among all layers of that kind."""
        done, out = dict.fromkeys(self.kinds, 0), []
        for kind, group in itertools.groupby(self.kinds):
            start = done[kind]
            done[kind] += len(list(group))
            out.append((kind, range(start, done[kind])))
        return out

    @property
    def gate(self) -> Gate:
        """The gate of every layer with experts."""
        return Gate(
            num_experts=self.num_experts,
            num_chosen=self.num_experts_per_tok,
            normalise=self.norm_topk_prob,
            scoring=self.scoring_func,
            selection_bias=self.selection_bias,
            groups=self.n_group,
            kept_groups=self.topk_group,
            group_score=self.group_score,
            scale=self.routed_scaling_factor,
            logit_bias=self.expert_bias,
        )

    @property
    def rotary_dim(self) -> int:
        """The numbers of a head that RoPE rotates."""
        return self.qk_rope_head_dim or int(self.head_dim * self.partial_rotary_factor)

    @property
    def cached(self) -> tuple[int, int, int]:
        """Heads of a layer's cache, and the sizes of a key and of a value."""
        if self.kv_lora_rank:
            return 1, self.qk_rope_head_dim, self.kv_lora_rank
        return self.num_key_value_heads, self.head_dim, self.head_dim

    @property
    def rope(self) -> Rope:
        """The rotary positions of layers that do not differ."""
        return Rope(self.rotary_dim, self.rope_theta, self.rope_scaling, self.rope_type)

    @property
    def num_moe_layers(self) -> int:
        return sum(kind.endswith("moe") for kind in self.kinds)

    @property
    def compute_dtype(self) -> jnp.dtype:
        return jnp.dtype(self.dtype)

    @property
    def active_parameters(self) -> int:
        """Parameters that act on one token: with the output head, without the embedding table."""
        attention = 2 * self.hidden_size * self.head_dim * (self.num_attention_heads + self.num_key_value_heads)
        if self.kv_lora_rank:
            attention = _OF_SOME["attention_parameters"](self)
        expert = 3 * self.hidden_size * self.moe_intermediate_size
        shared = self.hidden_size * (3 * self.shared_expert_intermediate_size + self.shared_expert_gate)
        moe = self.num_experts_per_tok * expert + shared + self.hidden_size * self.num_experts
        dense = 3 * self.hidden_size * self.intermediate_size
        layers = sum(attention + (moe if kind.endswith("moe") else dense) for kind in self.kinds)
        if any(getattr(self, name) for name in _RARE[-2:]):
            layers += _OF_SOME["further_parameters"](self, attention)
        return layers + self.vocab_size * self.hidden_size
