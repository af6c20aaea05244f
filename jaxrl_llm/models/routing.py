"""The router's logits, and which experts every token used: a forward returns the record, a later one can replay it."""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from jaxrl_llm.ground.array_typing import Array, Bool, Float, Integer
from jaxrl_llm.ground.declared import Block, declared


class Routing(flax.struct.PyTreeNode):
    """The routing of every MoE layer, [l b t k] and [l b t e] (dense layers have no row); inside a layer without l.

    experts: indices used when the token at t was FED; the dtype's maximum means "no record: the router chooses".
    logits: of the router. A forward that is given them replays them, so that indices and gate weights are both frozen.
    chosen: experts that the router chose in a forward that replayed others; None: those used.
    """

    experts: Integer[Array, "*batch k"]
    logits: Float[Array, "*batch e"] | None = None
    chosen: Integer[Array, "*batch k"] | None = None

    @property
    def choice(self) -> Integer[Array, "*batch k"]:
        """The router's own choice, which a replay may have overruled."""
        return self.experts if self.chosen is None else self.chosen

    def check(self, layers: int, tokens: tuple[int, ...], chosen: int, experts: int) -> None:
        """Raise ValueError unless this is a record of so many MoE layers, tokens [b t], experts a token and experts."""
        if not layers:
            raise ValueError("routing was given to a dense model; set replay.mode='off' or model.num_experts > 0")
        for name, width in (("experts", chosen), ("logits", experts)):
            given, expected = getattr(self, name), (layers, *tokens, width)
            if given is not None and given.shape != expected:
                raise ValueError(
                    f"routing.{name} has shape {given.shape}, this forward needs {expected} [MoE layers, rows, time, "
                    "experts per token or experts]; record it with the same model and the same tokens"
                )

    def limited_to(self, wanted: "Routing") -> "Routing":
        """Drop the fields that `wanted` lacks."""
        logits = None if wanted.logits is None else self.logits
        return Routing(self.experts, logits, None if wanted.chosen is None else self.chosen)

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


def no_record(experts: Integer[Array, "*any"]) -> int:
    """The value that stands for "no record" in this array's dtype."""
    return int(jnp.iinfo(experts.dtype).max)


def is_recorded(experts: Integer[Array, "*any k"]) -> Bool[Array, "*any"]:
    """Return whether a token has a record (its slots are recorded together)."""
    return experts[..., 0] != no_record(experts)
