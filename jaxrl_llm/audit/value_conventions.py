"""The arrays of a critic: the GAE that made advantages and returns, and the convention of the value loss."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.audit.advantage_conventions import Convention
from jaxrl_llm.audit.batch_faults import moved
from jaxrl_llm.audit.capture import Capture, Fault
from jaxrl_llm.objectives.advantages import gae, whiten
from jaxrl_llm.objectives.value import value_loss

_GAE = {"gamma": (1.0, 0.99, 0.95, 0.9), "lam": (1.0, 0.95, 0.97, 0.98, 0.99, 0.9, 0.0), "whitened": (True, False)}
_LOSS = {
    "value_clip": (0.2, None, 0.1, 0.3, 0.4, 0.5),
    "value_coef": (1.0, 0.1, 0.5, 2.0, 0.2, 0.05, 1.5),
    "value_aggregation": ("token_mean", "sequence_mean_token_mean"),
}
_TOLERANCE = 2e-5


def _rows(table: dict[str, tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    return (dict(zip(table, values, strict=True)) for values in itertools.product(*table.values()))


@dataclasses.dataclass(frozen=True)
class Critic:
    """conventions: of the advantages; settings: of the value loss, the first that gives it; faults: of both."""

    conventions: list[Convention]
    settings: dict[str, Any]
    faults: list[Fault]

    @classmethod
    def of(cls, capture: Capture) -> "Critic":
        """Nothing is told where the capture lacks the arrays."""
        conventions, faults = [], []
        if capture.has("old_values") and capture["advantages"].ndim == 2 and capture.has("token_rewards"):
            conventions = _estimates(capture, capture["token_rewards"], capture["old_values"])
            faults = [] if conventions else [_unexplained(capture)]
            faults += _of_returns(capture, conventions)
        settings = {}
        if capture.has("values", "old_values", "returns", "reported_value_loss"):
            settings = next((row for row in _rows(_LOSS) if _fits(capture, capture["returns"], row)), {})
            faults += [] if settings else [_unexplained_loss(capture)]
        return cls(conventions, settings, faults)


@functools.partial(jax.jit, static_argnames="gamma")
def _gae(rewards: Any, values: Any, mask: Any, lam: Any, gamma: float) -> tuple[Any, Any, Any]:
    """Advantages, the same whitened, and returns; one program for each gamma."""
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam)
    return advantages, whiten(advantages, mask), returns


def _made(capture: Capture, rewards: np.ndarray, values: np.ndarray, row: dict[str, Any]) -> list[np.ndarray]:
    lam = np.full(len(capture.mask), row["lam"])
    return [np.asarray(x) for x in _gae(rewards, values, capture.mask, lam, gamma=row["gamma"])]


def _estimates(capture: Capture, rewards: np.ndarray, values: np.ndarray) -> list[Convention]:
    """The conventions under which these rewards and values give the advantages of the capture."""
    out = [Convention(row, _made(capture, rewards, values, row)[int(row["whitened"])]) for row in _rows(_GAE)]
    return [one for one in out if _same(one.advantages, capture["advantages"], capture.mask)]


def _same(ours: np.ndarray, theirs: np.ndarray, mask: np.ndarray) -> bool:
    return bool(np.abs(ours - theirs)[mask].max() <= _TOLERANCE * max(np.abs(theirs[mask]).max(), 1e-3))


def _unexplained(capture: Capture) -> Fault:
    """The fault of advantages that no GAE gives, with the mistake that does if one is known."""
    rewards, values = capture["token_rewards"], capture["old_values"]
    last = np.where(capture.mask, rewards, 0).sum(1, keepdims=True) * (np.arange(rewards.shape[1]) == 0)
    late = "values one place too late, those of the state after each token"
    mistakes = [
        ("values_shifted", late, rewards, moved(values, 1, 0.0)),
        ("values_shifted", "values one place too early", rewards, moved(values, -1, 0.0)),
        ("values_ignored", "values of 0", rewards, 0 * values),
        ("reward_at_the_first_token", "an answer's rewards at its first place", last, values),
        ("rewards_shifted", "rewards one place too early", moved(rewards, -1, 0.0), values),
    ]
    for name, said, other, state in mistakes:
        if _estimates(capture, other, state):
            return name, f"GAE gives the advantages with {said}"
    return "advantages_not_of_these_values", "no gamma and lambda give the advantages from token_rewards and old_values"


def _of_returns(capture: Capture, conventions: list[Convention]) -> Iterator[Fault]:
    """Returns that are not A + V, or of advantages that were whitened before."""
    if capture.has("returns") and conventions:
        row, values = conventions[0].settings, capture["old_values"]
        # Those of lambda 1 are VC-PPO's, whose returns have a lambda of their own.
        right = [_made(capture, capture["token_rewards"], values, row | lam)[2] for lam in ({}, {"lam": 1.0})]
        whitened = conventions[0].advantages + values
        if any(_same(made, capture["returns"], capture.mask) for made in right):
            return
        if _same(whitened, capture["returns"], capture.mask):
            yield "returns_of_whitened_advantages", "returns are the whitened advantages plus old_values"
        else:
            yield "returns_wrong", "returns are neither advantages plus old_values nor those of lambda 1"


def _fits(capture: Capture, returns: np.ndarray, row: dict[str, Any], smaller: bool = False) -> bool:
    """True if reported_value_loss is that of these returns; `smaller`: with the smaller of the two squares."""
    mask, values, old, clip = capture.mask, capture["values"], capture["old_values"], row["value_clip"]
    term = np.asarray(value_loss(jnp.asarray(values), jnp.asarray(old), jnp.asarray(returns), clip))
    if smaller:
        term = np.minimum((values - returns) ** 2, (np.clip(values, old - clip, old + clip) - returns) ** 2) / 2
    means = [x[m].mean() for x, m in zip(term, mask, strict=True) if m.any()]
    mean = term[mask].mean() if row["value_aggregation"] == "token_mean" else np.mean(means)
    told = float(capture["reported_value_loss"])
    return abs(float(row["value_coef"] * mean) - told) <= _TOLERANCE * max(abs(told), 1e-9)


def _unexplained_loss(capture: Capture) -> Fault:
    for row in _rows(_LOSS):
        if row["value_clip"] is not None and _fits(capture, capture["returns"], row, smaller=True):
            return "value_loss_minimum", f"the smaller of the two squares is taken, not the larger ({row})"
        if capture["advantages"].ndim == 2 and _fits(capture, capture["advantages"], row):
            return "value_loss_of_advantages", "the value loss is to the advantages, not to the returns"
    return "value_loss_not_reproduced", "no clip, coefficient or average gives reported_value_loss"
