"""Transformers: arrays in, arrays out; they know nothing of reinforcement learning."""

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.kv_cache import KVCache
from jaxrl_llm.models.model_fields import complete_fields
from jaxrl_llm.models.pretrained import load_params, load_pretrained, save_pretrained
from jaxrl_llm.models.published import Published, fingerprint, read_published
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
