"""VESPO's surrogate: a smooth weight of the importance weight of a whole answer, which is used as a logarithm."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from jaxrl_llm.ground.array_typing import PerToken
from jaxrl_llm.ground.ranges import in_range
from jaxrl_llm.objectives.batch import Batch
from jaxrl_llm.objectives.parts import hyperparameter
from jaxrl_llm.objectives.surrogates import Surrogate

Powers = tuple[float, float]


def vespo(
    log_product: PerToken, logprobs: PerToken, advantages: PerToken, phi_pos: Powers, phi_neg: Powers
) -> PerToken:
    """sg(phi(W)) A log pi with phi(W) = W^c1 exp(c2 (1 - W)), computed in log space; phi(1) = 1.

    log_product is log W of its answer at every token (`ratios.sequence_product`); phi_pos and phi_neg are (c1, c2).

    Source: VESPO, arXiv 2602.10693.
    """
    good = advantages > 0
    power, decay = (jnp.where(good, positive, negative) for positive, negative in zip(phi_pos, phi_neg, strict=True))
    phi = jnp.exp(power * log_product - decay * jnp.expm1(log_product))
    return jax.lax.stop_gradient(phi) * advantages * logprobs


@dataclasses.dataclass(frozen=True)
class Vespo(Surrogate):
    """`vespo`: a smooth weight of the answer's importance weight."""

    phi_pos: tuple[float, float] = hyperparameter((2.0, 3.0), "VESPO's (c1, c2) for positive advantages")
    phi_neg: tuple[float, float] = hyperparameter((3.0, 2.0), "VESPO's (c1, c2) for negative advantages")
    units: ClassVar[tuple[str, ...]] = ("product",)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, pair in (("phi_pos", self.phi_pos), ("phi_neg", self.phi_neg)):
            if len(pair) != 2:
                raise ValueError(f"{name}={pair!r} is not a pair; give (c1, c2)")
            for value in pair:
                in_range(name, value, above=0)

    def __call__(self, log_ratio: PerToken, batch: Batch) -> PerToken:
        return vespo(log_ratio, batch.masked("logprobs"), batch.advantages, self.phi_pos, self.phi_neg)

    def formula(self) -> str:
        (a, b), (c, d) = self.phi_pos, self.phi_neg
        return f"sg(r^c1 e^(c2 (1 - r))) A log pi; (c1, c2) = ({a:g}, {b:g}) (A > 0), ({c:g}, {d:g}) (A < 0)"
