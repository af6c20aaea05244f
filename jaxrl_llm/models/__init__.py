"""Transformers. In: parameters and tokens, perhaps a routing to replay. Out: log-probs or logits, and the routing used.
Arrays in, arrays out: nothing here knows reinforcement learning. This page lists what other rooms import."""

from jaxrl_llm.models.architecture import ModelConfig
from jaxrl_llm.models.attention.kv_cache import KVCache
from jaxrl_llm.models.checkpoints.model_fields import complete_fields
from jaxrl_llm.models.checkpoints.pretrained import load_params, load_pretrained, save_pretrained
from jaxrl_llm.models.checkpoints.published import Published, fingerprint, read_published
from jaxrl_llm.models.routing import Routing
from jaxrl_llm.models.transformer import Model, ModelOutput

__all__ = [
    "KVCache",
    "Model",
    "ModelConfig",
    "ModelOutput",
    "Published",
    "Routing",
    "complete_fields",
    "fingerprint",
    "load_params",
    "load_pretrained",
    "read_published",
    "save_pretrained",
]
