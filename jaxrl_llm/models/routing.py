"""The router's logits, and which experts every token used: a forward returns the record, a later one can replay it."""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from jaxrl_llm.ground.array_typing import Array, Bool, Float, Integer
from jaxrl_llm.ground.declared import Block, declared
from jaxrl_llm.models.architecture import ModelConfig


class Routing(flax.struct.PyTreeNode):
    """The routing of every MoE layer, [l b t k] and [l b t e] (dense layers have no row); inside a layer without l.

    experts: indices used when the token at t was FED; the dtype's maximum means "no record: the router chooses".
    logits: of the router. A forward that is given them replays them, so that indices and gate weights are both frozen.
    """

    experts: Integer[Array, "*batch k"]
    logits: Float[Array, "*batch e"] | None = None

    def __getitem__(self, index: object) -> "Routing":
        return jax.tree.map(lambda x: x[index], self)


@dataclasses.dataclass(frozen=True)
class Router(Block, prefix="rollout.router_"):
    """How a forward computes the router's logits. Another than the default makes a sampler differ on purpose.

        s = x W  in `dtype`,   s_i + noise z_i + bias b_i   with z_i and b_i standard normal

    z_i is a fixed function of the bits of s_i and of i, as rounding is a fixed function of its operands: an answer
    depends neither on its place in the batch nor on a key. Equal programs give equal noise; another batch shape, whose
    logits differ in their last bits, gives another draw. b_i is a function of i alone.
    """

    dtype: str = declared("float32", "of the sampler's router; bfloat16: a mismatch", among=("float32", "bfloat16"))
    noise: float = declared(0.0, "standard deviation of noise on the sampler's router logits, on purpose", least=0)
    bias: float = declared(0.0, "standard deviation over experts of a bias on them, fixed and equal by layer", least=0)
    gates: str = declared("same", among={"same": "of what chooses", "exact": "noise and bias move only the choice"})

    def check(self) -> None:
        if self.gates == "exact" and not (self.noise or self.bias):
            raise ValueError(
                "rollout.router_gates=exact keeps noise and bias from the gates, and there is neither; set "
                "rollout.router_noise or rollout.router_bias, or router_gates=same"
            )

    def logits(self, x: Float[Array, "*n d"], weight: Float[Array, "d e"]) -> Float[Array, "*n e"]:
        """The logits that gates are made of."""
        operands = x.astype(self.dtype).astype(jnp.float32), weight.astype(self.dtype).astype(jnp.float32)
        logits = jnp.matmul(*operands, precision=jax.lax.Precision.HIGHEST)
        if self.dtype != "float32":
            logits = logits.astype(self.dtype).astype(jnp.float32)
        return logits if self.gates == "exact" else self._moved(logits)

    def choosing(self, logits: Float[Array, "*n e"]) -> Float[Array, "*n e"]:
        """The logits whose largest choose the experts, from `logits`."""
        return self._moved(logits) if self.gates == "exact" else logits

    def _moved(self, logits: Float[Array, "*n e"]) -> Float[Array, "*n e"]:
        moved = logits + self.noise * _fixed_normal(logits) if self.noise else logits
        # Any bits will do that are the same for all experts, but for those of 0: the first number would be extreme.
        return moved + self.bias * _fixed_normal(jnp.ones_like(logits)) if self.bias else moved


EXACT = Router()


def _fixed_normal(x: Float[Array, "*n e"]) -> Float[Array, "*n e"]:
    """A standard normal number for every element, from its bits and its place in the last axis."""
    place = jax.lax.broadcasted_iota(jnp.uint32, x.shape, x.ndim - 1) * jnp.uint32(0x9E3779B1)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + place
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):  # bijections of 32 bits
        bits = (bits ^ (bits >> shift)) * jnp.uint32(factor)
    bits = bits ^ (bits >> 16)
    uniform = (bits >> 9).astype(jnp.float32) * 2.0**-22 - 1 + 2.0**-23  # 23 bits, inside (-1, 1)
    return jnp.sqrt(2.0) * jax.lax.erf_inv(uniform)


def routing_dtype(num_experts: int) -> jnp.dtype:
    """The narrowest unsigned type whose maximum stays free for "no record": uint8 up to 255 experts."""
    for dtype in (jnp.uint8, jnp.uint16):
        if num_experts <= jnp.iinfo(dtype).max:
            return jnp.dtype(dtype)
    return jnp.dtype(jnp.int32)


def blank_record(config: ModelConfig, rows: int, time: int, logits: bool = False) -> Routing:
    """An empty record in the shape of a rollout."""
    dtype = routing_dtype(config.num_experts)
    shape = (config.num_moe_layers, rows, time)
    experts = jnp.full((*shape, config.num_experts_per_tok), jnp.iinfo(dtype).max, dtype)
    return Routing(experts, jnp.zeros((*shape, config.num_experts), jnp.float32) if logits else None)


def no_record(experts: Integer[Array, "*any"]) -> int:
    """The value that stands for "no record" in this array's dtype."""
    return int(jnp.iinfo(experts.dtype).max)


def is_recorded(experts: Integer[Array, "*any k"]) -> Bool[Array, "*any"]:
    """Whether a token has a record (its slots are recorded together)."""
    return experts[..., 0] != no_record(experts)


def experts_of(logits: Float[Array, "l b t e"], num_chosen: int) -> Integer[Array, "l b t k"]:
    """The top k of the logits of all layers.

    Rows come first in the product, so that each device keeps its own: with layers before them XLA gathers all logits.
    """
    return jnp.swapaxes(jax.lax.top_k(jnp.swapaxes(logits, 0, 1), num_chosen)[1], 0, 1)


def select_experts(
    fresh_logits: Float[Array, "*n e"],
    num_chosen: int,
    normalise: bool,
    replay: Routing | None = None,
    choosing: Float[Array, "*n e"] | None = None,
) -> tuple[Integer[Array, "*n k"], Float[Array, "*n k"]]:
    """Experts and gates of every token, by one code path for routing and for replaying.

    e = top_k(s) or the recorded experts;   g_i = exp(s_i) / sum_{j in e} exp(s_j)   (normalise)
                                            g_i = softmax(s)_i                       (otherwise)

    s are the current logits, or the recorded ones where `replay.logits` is given. The gates are gathered from the
    logits, never from probabilities zeroed outside the top k, so the router keeps its gradient under index replay.
    choosing: the logits of the top_k, if others than s choose (`Router.choosing`).

    Source: Routing Replay as in R3 (arXiv 2510.11370), gate weights from the current router.
    """
    scores = fresh_logits
    experts = jax.lax.top_k(fresh_logits if choosing is None else choosing, num_chosen)[1]
    if replay is not None:
        recorded = is_recorded(replay.experts)[..., None]
        experts = jnp.where(recorded, replay.experts.astype(jnp.int32), experts)
        if replay.logits is not None:
            scores = jnp.where(recorded, replay.logits, fresh_logits)
    if normalise:
        return experts, jax.nn.softmax(jnp.take_along_axis(scores, experts, axis=-1), axis=-1)
    return experts, jnp.take_along_axis(jax.nn.softmax(scores, axis=-1), experts, axis=-1)
