"""Transformers. In: parameters and tokens, perhaps a routing to replay. Out: log-probs or logits, and the routing used.
Arrays in, arrays out: nothing here knows reinforcement learning. Other rooms import what this page lists, and the
modules `lora` and `scoring`."""

from jaxrl_llm.models.architecture import ModelConfig, Rows
from jaxrl_llm.models.attention import kv_cache
from jaxrl_llm.models.attention.attend_blocks import skips_blocks
from jaxrl_llm.models.attention.flash import choose_attention, time_multiple
from jaxrl_llm.models.attention.kv_cache import KVCache, Prefix
from jaxrl_llm.models.checkpoints.model_fields import complete_fields
from jaxrl_llm.models.checkpoints.pretrained import load_params, load_pretrained, save_pretrained
from jaxrl_llm.models.checkpoints.published import Published, fingerprint, read_published
from jaxrl_llm.models.checkpoints.upcycling import upcycled
from jaxrl_llm.models.experts.expert_parallel import filled
from jaxrl_llm.models.experts.moe import load_balance_loss
from jaxrl_llm.models.routing import (
    EXACT,
    Router,
    Routing,
    blank_record,
    experts_of,
    is_recorded,
    no_record,
    routing_dtype,
)
from jaxrl_llm.models.selected_logprobs import kept_probabilities, score_chunk
from jaxrl_llm.models.transformer import Model, ModelOutput, in_a_loop

__all__ = [
    "EXACT",
    "KVCache",
    "Model",
    "ModelConfig",
    "ModelOutput",
    "Prefix",
    "Published",
    "Router",
    "Routing",
    "Rows",
    "blank_record",
    "choose_attention",
    "complete_fields",
    "experts_of",
    "filled",
    "fingerprint",
    "in_a_loop",
    "is_recorded",
    "kept_probabilities",
    "kv_cache",
    "load_balance_loss",
    "load_params",
    "load_pretrained",
    "no_record",
    "read_published",
    "routing_dtype",
    "save_pretrained",
    "score_chunk",
    "skips_blocks",
    "time_multiple",
    "upcycled",
]
