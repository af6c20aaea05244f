"""The terms of a loss by token and their gradients, from the project's objectives on the arrays of a capture."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.audit.capture import Capture
from jaxrl_llm.objectives import Batch, Objective
from jaxrl_llm.objectives.batch import token_log_ratio
from jaxrl_llm.objectives.divergences import kl_loss

Pullback = Callable[[np.ndarray], np.ndarray]


class Column(NamedTuple):
    """A term of the loss by token, [b t], and the gradient by the current log-probs of any weighted sum of it."""

    value: np.ndarray
    pullback: Pullback


@dataclasses.dataclass(frozen=True, eq=False)
class Inputs:
    """Arrays that a loss reads: those of a capture, or those that a faulty loss would take in their place.

    advantages: [b t].
    weight: [b t], a detached factor of the policy term.
    power: log-ratios are taken this many times; -1 is the ratio upside down.
    """

    logprobs: np.ndarray
    old: np.ndarray
    advantages: np.ndarray
    mask: np.ndarray
    ref: np.ndarray | None
    sampler: np.ndarray | None
    weight: np.ndarray
    power: float = 1.0

    @classmethod
    def of(cls, capture: Capture) -> "Inputs":
        """The arrays as they are, without a weight."""
        optional = {"ref": capture.get("ref_logprobs"), "sampler": capture.get("sampler_logprobs")}
        arrays = capture["logprobs"], capture.old, capture.advantages, capture.mask
        return cls(*arrays, **optional, weight=np.ones(capture.mask.shape))

    def replace(self, **changes: Any) -> "Inputs":
        return dataclasses.replace(self, **changes)

    @functools.cached_property
    def key(self) -> int:
        """A number for the arrays that the KL reads."""
        arrays = [x.tobytes() for x in (self.logprobs, self.old, self.mask, self.ref) if x is not None]
        return hash((*arrays, self.power))

    def batch(self, objective: Objective, logprobs: Any = None) -> Batch:
        """The batch that an objective reads, at these log-probs or at the current ones."""
        now = jnp.asarray(self.logprobs) if logprobs is None else logprobs
        arrays: dict[str, Any] = {"ref_logprobs": self.ref, "sampler_logprobs": self.sampler}
        if "age" in objective.needs:
            arrays["age"] = np.ones(self.mask.shape)
        if self.power != 1:
            now = self.old + self.power * (now - self.old)
        given = {"logprobs": now, "old_logprobs": self.old, "advantages": self.advantages, "mask": self.mask}
        return Batch.of(objective.needs, **given, **arrays)


def apart(inputs: Inputs, now: np.ndarray, other: np.ndarray | None) -> Any:
    """log p - log q of two policies at the tokens of the inputs, 0 where masked."""
    return token_log_ratio(jnp.asarray(now), jnp.asarray(other), jnp.asarray(inputs.mask))


def policy(objective: Objective, inputs: Inputs) -> Column:
    """The policy term of an objective, to be minimised, with the weight of the inputs."""
    return _column(lambda logprobs: -objective.policy(inputs.batch(objective, logprobs)) * inputs.weight, inputs)


def log_ratio(objective: Objective, inputs: Inputs) -> np.ndarray:
    """The logarithm of the objective's ratio, [b t]; 0 where masked."""
    return np.asarray(objective.ratio(inputs.batch(objective)))


# Estimators of the KL to the reference. Those of `divergences.kl_loss` by their names; others are conventions of other
# stacks, or mistakes. Each takes log q = log(pi_ref / pi), the token's log-ratio and the ratio that the policy uses.
ESTIMATORS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "k3": lambda log_q, token, own: kl_loss(log_q, token, "k3"),
    "k3_unbiased": lambda log_q, token, own: kl_loss(log_q, token, "k3_unbiased"),
    "k3_times_sequence_ratio": lambda log_q, token, own: kl_loss(log_q, own, "k3_unbiased"),
    "low_var_kl": lambda log_q, token, own: kl_loss(log_q, token, "low_var_kl"),
    "k2": lambda log_q, token, own: kl_loss(log_q, token, "k2"),
    "k2_without_ratio": lambda log_q, token, own: kl_loss(log_q, 0 * token, "k2"),
    "k1": lambda log_q, token, own: -log_q,
    "abs": lambda log_q, token, own: kl_loss(log_q, token, "abs"),
    "abs_without_ratio": lambda log_q, token, own: kl_loss(log_q, 0 * token, "abs"),
    "k3_of_the_inverse": lambda log_q, token, own: kl_loss(-log_q, token, "k3"),
    "k3_of_the_inverse_times_ratio": lambda log_q, token, own: kl_loss(-log_q, token, "k3_unbiased"),
}  # fmt: skip
SOUND = ("k3", "k3_unbiased", "k3_times_sequence_ratio", "k2")
# Their gradient is not the KL's.
DOUBTFUL = ("k1", "abs", "abs_without_ratio", "k3_of_the_inverse", "k3_of_the_inverse_times_ratio")


def kl(estimator: str, objective: Objective, inputs: Inputs) -> Column:
    """KL to the reference by an estimator; the ratio is that of the objective where the estimator takes one."""
    assert inputs.ref is not None

    def term(logprobs: Any) -> Any:
        batch = inputs.batch(objective, logprobs)
        log_q = token_log_ratio(jnp.asarray(inputs.ref), logprobs, batch.mask)
        return ESTIMATORS[estimator](log_q, batch.log_ratio, objective.ratio(batch))

    return _column(term, inputs)


def _column(term: Callable[[Any], Any], inputs: Inputs) -> Column:
    value, pullback = jax.vjp(term, jnp.asarray(inputs.logprobs))
    return Column(np.asarray(value), lambda weights: np.asarray(pullback(jnp.asarray(weights, value.dtype))[0]))
