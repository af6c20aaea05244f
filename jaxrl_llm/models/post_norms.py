"""Blocks with norms behind their parts (OLMo 3, arXiv 2512.13961; GLM-4; Gemma 3). Loaded where a config has them."""

import functools
from typing import Any

from flax import nnx

from jaxrl_llm.ground import sharding
from jaxrl_llm.ground.array_typing import Array
from jaxrl_llm.models.architecture import ModelConfig
from jaxrl_llm.models.attention.kv_cache import LayerCache
from jaxrl_llm.models.kernels import Seen
from jaxrl_llm.models.layers import RMSNorm, scaled
from jaxrl_llm.models.routing import Routing


@functools.cache
def with_post_norms(block: Any) -> Any:
    """Return a subclass of `transformer.Block` with norms behind both parts."""

    class PostNormBlock(block):
        """x + norm(attention(x)), then x + norm(feed_forward(x)); `sandwich` has the norms of the block too."""

        def __init__(self, config: ModelConfig, kind: str, rngs: nnx.Rngs):
            super().__init__(config, kind, rngs)
            self.before = config.norm_placement == "sandwich"
            if not self.before:
                del self.attention_norm, self.mlp_norm
            self.attention_post_norm = RMSNorm(config.hidden_size, config)
            self.mlp_post_norm = RMSNorm(config.hidden_size, config)

        def __call__(
            self, x: Array, seen: Seen, cache: LayerCache | None, replay: Routing | None
        ) -> tuple[Array, Any, Routing | None]:
            place, mesh = (*seen.axes, None), seen.kernels.mesh
            y, kv = self.attention(self.attention_norm(x) if self.before else x, seen, cache)
            x = sharding.constrain(x + scaled(self.attention_post_norm(y), self.factor), place, mesh)
            y, route = self.mlp(self.mlp_norm(x) if self.before else x, seen, replay)
            return sharding.constrain(x + scaled(self.mlp_post_norm(y), self.factor), place, mesh), kv, route

    return PostNormBlock
