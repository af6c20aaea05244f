"""Divergences of two policies, per token at the sampled prefixes: k3 for metrics, and the ones for a loss."""

import jax
import jax.numpy as jnp

from jaxrl_llm.ground.array_typing import Array, Float, PerToken

ESTIMATORS = ("k2", "k3", "k3_unbiased", "low_var_kl", "abs")
_LOW_VAR_BOUND = 10.0


def k3(log_q: Float[Array, "*any"]) -> Float[Array, "*any"]:
    """q - 1 - log q, which is at least 0 and has mean KL(p, p q) under samples of p.

    Near log q = 0 the series takes over: in float32 the difference itself would lose every digit. There is no bound;
    `low_var_kl` has one.

    Source: Schulman, "Approximating KL divergence", 2020.
    """
    near = jnp.abs(log_q) < 0.1
    small = jnp.where(near, log_q, 0)
    series = small**2 / 2 * (1 + small / 3 * (1 + small / 4 * (1 + small / 5 * (1 + small / 6))))
    return jnp.where(near, series, jnp.expm1(log_q) - log_q)


def kl_loss(log_q: PerToken, log_ratio: PerToken, estimator: str) -> PerToken:
    """A distance of pi_theta from pi_ref as a quantity to minimise, per token [b t].

    k3           q - log q - 1, as in GRPO: its gradient is biased, on-policy too.
    k2           sg(r) (log q)^2 / 2: the exact gradient, on and off the policy.
    k3_unbiased  r k3 with a live r: the exact gradient and an unbiased value.
    low_var_kl   min(k3, 10): as k3, but no gradient where log q > 2.6, farthest below the reference.
    abs          sg(r) |log q|: the exact gradient of sum |pi_theta - pi_ref|, twice the total variation, and not of KL.

    q = pi_ref / pi_theta and r = pi_theta / pi_old.

    Source: k3: GRPO, arXiv 2402.03300 eq. 4; low_var_kl: verl, SkyRL, OpenRLHF, NeMo-RL and slime; abs: verl and
    SkyRL, without r; the gradients by enumeration over the vocabulary, see the tests.
    """
    ratio = jnp.exp(log_ratio)
    match estimator:
        case "k2":
            return jax.lax.stop_gradient(ratio) * log_q**2 / 2
        case "abs":
            return jax.lax.stop_gradient(ratio) * jnp.abs(log_q)
        case "k3_unbiased":
            return ratio * k3(log_q)
        case "low_var_kl":
            return jnp.minimum(k3(log_q), _LOW_VAR_BOUND)
    return k3(log_q)
