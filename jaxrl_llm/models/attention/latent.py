"""Attention whose keys and values come from one latent of each token (DeepSeek-V2, arXiv 2405.04434, section 2.1).
Loaded where a config has it."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.ground import sharding
from jaxrl_llm.ground.array_typing import Array, Float
from jaxrl_llm.ground.by_name import ByName
from jaxrl_llm.models.architecture import ModelConfig
from jaxrl_llm.models.attention import kv_cache
from jaxrl_llm.models.attention.attend import attend_cached, attend_causal
from jaxrl_llm.models.attention.rotary import rotate
from jaxrl_llm.models.kernels import Seen
from jaxrl_llm.models.layers import RMSNorm, matrix, project, scaled, whole

_KERNELS = ByName({"flash_attention": "jaxrl_llm.models.attention.flash"})
_EPS = 1e-6  # of the norms of latents, whatever rms_norm_eps is


class LatentAttention(nnx.Module):
    """With z the latent of a token, r its rotated key, which all heads share, and W_h the part of `kv_b` of head h:

        [z, r] = x W_kv_a,   z = norm(z),   [k_h, v_h] = z W_h,   q_h = x W_q or norm(x W_q_a) W_q_b
        score_h = (q_h[nope] k_h + q_h[rope] r) s

    A cache holds z and r alone. Over it W_h is multiplied with queries and results instead: q_h W_h[k] scores z, the
    sum over columns is one of z, and W_h[v] makes the output of it (section 2.1.2).
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        d, heads, head = config.hidden_size, config.num_attention_heads, config.head_dim
        self.rank, self.rope, self.head, self.value = config.kv_lora_rank, config.rotary_dim, head, config.v_head_dim
        self.nope, self.of_latent = head - self.rope, config.q_lora_rank > 0
        if self.of_latent:
            self.q_a = matrix(rngs, (d, config.q_lora_rank), ("embed", "latent"), config)
            self.q_a_norm = RMSNorm(config.q_lora_rank, config, _EPS)
            self.q_b = matrix(rngs, (config.q_lora_rank, heads * head), ("latent", "heads"), config)
        else:
            self.q = matrix(rngs, (d, heads * head), ("embed", "heads"), config)
        self.kv_a = matrix(rngs, (d, self.rank + self.rope), ("embed", "latent"), config)
        self.kv_a_norm = RMSNorm(self.rank, config, _EPS)
        self.kv_b = matrix(rngs, (self.rank, heads * (self.nope + self.value)), ("latent", "heads"), config)
        self.o = matrix(rngs, (heads * self.value, d), ("heads", "embed"), config)
        self.pairs, self.scale = config.rope_interleave, config.attention_multiplier or head**-0.5

    def __call__(
        self, x: Float[Array, "b t d"], seen: Seen, cache: kv_cache.LayerCache | None
    ) -> tuple[Float[Array, "b t d"], Any]:
        """Return the output and this layer's rotated keys and latents, as `Attention` returns keys and values."""
        (b, t, _), axes, kernels = x.shape, seen.axes, seen.kernels

        def product(x: Array, weight: Any) -> Array:
            flat = project(sharding.flat(x, axes, kernels.mesh), weight[...])
            return sharding.unflat(flat, (b, t), axes, kernels.mesh)

        q = product(self.q_a_norm(product(x, self.q_a)), self.q_b) if self.of_latent else product(x, self.q)
        nope, turned = jnp.split(q.reshape(b, t, -1, self.head), [self.nope], axis=-1)
        latent, key = jnp.split(product(x, self.kv_a), [self.rank], axis=-1)
        latent, key = self.kv_a_norm(latent), rotate(key[:, :, None], seen.rotation, self.pairs)
        turned = rotate(turned, seen.rotation, self.pairs)
        if cache is None:
            k, v = jnp.split(product(latent, self.kv_b).reshape(b, t, -1, self.nope + self.value), [self.nope], axis=-1)
            k = jnp.concatenate([k, jnp.broadcast_to(key, turned.shape)], axis=-1)
            y = self._attend(
                jnp.concatenate([nope, turned], axis=-1), jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2), seen
            )
            kv = kv_cache.of_prefill(jnp.swapaxes(key, 1, 2), latent[:, None], kernels.cache)
        else:
            weight = whole(self.kv_b[...]).astype(x.dtype).reshape(self.rank, -1, self.nope + self.value)
            kv, keys, latents = kv_cache.extended(cache, key, latent[:, :, None], kernels.cache)
            if kernels.cache.stacked:  # or XLA:TPU copies the stacks of all layers, which are small, for each layer
                keys = jax.lax.optimization_barrier([whole(stretch) for stretch in keys])
            turned = turned * (self.scale * self.rope**0.5)  # `attend_cached` multiplies by rope^-1/2
            absorbed = self.scale * jnp.einsum("bthn,chn->bthc", nope, weight[..., : self.nope])
            y = attend_cached(turned, keys, latents, seen.visible, kernels.platform, kernels.cache, of_values=absorbed)
            y = jnp.einsum("bthc,chv->bthv", y, weight[..., self.nope :])
        return product(y.reshape(b, t, -1), self.o), kv

    def _attend(self, q: Array, keys: Array, values: Array, seen: Seen) -> Float[Array, "b t h v"]:
        """Attention of whole rows, which multiplies scores by head_dim^-1/2. The flash kernels have one size of a head:
        values are padded to that of keys."""
        q = scaled(q, self.scale * self.head**0.5)
        if seen.kernels.attention != "flash":
            return attend_causal(q, keys, values, seen.visible)
        values = jnp.pad(values, ((0, 0), (0, 0), (0, 0), (0, self.head - self.value)))
        of = seen.segment_ids, seen.kernels.mesh, seen.axes, seen.rows
        return _KERNELS["flash_attention"](q, keys, values, *of)[..., : self.value]
