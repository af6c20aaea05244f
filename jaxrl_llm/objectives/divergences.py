"""Divergences of two policies, per token at the sampled prefixes: k3 for metrics, and the ones for a loss."""

import jax
import jax.numpy as jnp

from jaxrl_llm.ground.array_typing import Array, Float, PerToken

ESTIMATORS = ("k2", "k3", "k3_unbiased")


def k3(log_q: Float[Array, "*any"]) -> Float[Array, "*any"]:
    """q - 1 - log q, which is at least 0 and has mean KL(p, p q) under samples of p.

    Near log q = 0 the series takes over: in float32 the difference itself would lose every digit. There is no bound:
    `low_var_kl` of verl, SkyRL, OpenRLHF, NeMo-RL and slime is cut at 10, with zero gradient from log q = 2.6 on.

    Source: Schulman, "Approximating KL divergence", 2020.
    """
    near = jnp.abs(log_q) < 0.1
    small = jnp.where(near, log_q, 0)
    series = small**2 / 2 * (1 + small / 3 * (1 + small / 4 * (1 + small / 5 * (1 + small / 6))))
    return jnp.where(near, series, jnp.expm1(log_q) - log_q)


def kl_loss(log_q: PerToken, log_ratio: PerToken, estimator: str) -> PerToken:
    """KL(pi_theta, pi_ref) as a quantity to minimise, per token [b t].

    k3           q - log q - 1, as in GRPO: its gradient is biased, on-policy too.
    k2           sg(r) (log q)^2 / 2: the exact gradient, on and off the policy.
    k3_unbiased  r k3 with a live r: the exact gradient and an unbiased value.

    q = pi_ref / pi_theta and r = pi_theta / pi_old.

    Source: k3: GRPO, arXiv 2402.03300 eq. 4; the other two by enumeration over the vocabulary, see the tests.
    """
    if estimator == "k2":
        return jax.lax.stop_gradient(jnp.exp(log_ratio)) * log_q**2 / 2
    return jnp.exp(log_ratio) * k3(log_q) if estimator == "k3_unbiased" else k3(log_q)
