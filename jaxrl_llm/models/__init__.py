"""Transformers. In: parameters and tokens, perhaps a routing to replay. Out: log-probs or logits, and the routing used.
Arrays in, arrays out: nothing here knows reinforcement learning. Other rooms import what this page lists, and the
modules `lora` and `scoring`."""

from jaxrl_llm.ground.by_name import ByName
from jaxrl_llm.models.architecture import ModelConfig, Rows
from jaxrl_llm.models.attention import kv_cache
from jaxrl_llm.models.attention.choice import choose_attention, skips_blocks, time_multiple
from jaxrl_llm.models.attention.kv_cache import KVCache, Prefix
from jaxrl_llm.models.kernels import in_a_loop
from jaxrl_llm.models.routing import (
    EXACT,
    Router,
    Routing,
    is_recorded,
    no_record,
    routing_dtype,
)
from jaxrl_llm.models.scoring import score
from jaxrl_llm.models.selected_logprobs import from_chunks, in_chunks, kept_probabilities, score_chunk
from jaxrl_llm.models.softmax import log_softmax
from jaxrl_llm.models.transformer import Model, ModelOutput

_LATER = ByName(
    {
        "ADAPTER_CONFIG": "jaxrl_llm.models.checkpoints.adapter_files",
        "Published": "jaxrl_llm.models.checkpoints.published",
        "complete_fields": "jaxrl_llm.models.checkpoints.model_fields",
        "exact_logits": "jaxrl_llm.models.exact.exact_scores",
        "filled": "jaxrl_llm.models.experts.expert_parallel",
        "fingerprint": "jaxrl_llm.models.checkpoints.published",
        "load_params": "jaxrl_llm.models.checkpoints.pretrained",
        "load_pretrained": "jaxrl_llm.models.checkpoints.pretrained",
        "of_logits": "jaxrl_llm.models.exact.exact_scores",
        "on_rows": "jaxrl_llm.models.exact.tiles",
        "published_config": "jaxrl_llm.models.checkpoints.model_fields",
        "read_published": "jaxrl_llm.models.checkpoints.published",
        "save_adapters": "jaxrl_llm.models.checkpoints.adapter_files",
        "save_pretrained": "jaxrl_llm.models.checkpoints.pretrained",
        "stored_dtype": "jaxrl_llm.models.checkpoints.model_fields",
        "upcycled": "jaxrl_llm.models.checkpoints.upcycling",
    }
)
__getattr__ = _LATER.attribute

__all__ = [  # and what `_LATER` names
    "EXACT",
    "KVCache",
    "Model",
    "ModelConfig",
    "ModelOutput",
    "Prefix",
    "Router",
    "Routing",
    "Rows",
    "choose_attention",
    "from_chunks",
    "in_a_loop",
    "in_chunks",
    "is_recorded",
    "kept_probabilities",
    "kv_cache",
    "log_softmax",
    "no_record",
    "routing_dtype",
    "score",
    "score_chunk",
    "skips_blocks",
    "time_multiple",
]
