"""A critic's arrays: GAE by the definition, the value loss in numpy, and the mistakes around them."""

import jax
import numpy as np
import pytest

from jaxrl_llm.audit.capture import checked
from jaxrl_llm.audit.opinion import opinion
from jaxrl_llm.audit.value_conventions import Critic
from tests.reference import advantage_loops as loops

LENGTHS = (5, 3, 1, 4)
MASK = np.arange(5) < np.asarray(LENGTHS)[:, None]


def filled(rows):
    out = np.zeros(MASK.shape)
    out[MASK] = np.concatenate(rows)
    return out


def estimated(rewards, values, gamma=1.0, lam=0.95):
    """(whitened advantages, returns), one answer at a time."""
    made = [
        loops.gae(r[m].tolist(), v[m].tolist(), gamma, lam, 0.0) for r, v, m in zip(rewards, values, MASK, strict=True)
    ]
    return filled(loops.whitened([a for a, _ in made])), filled([r for _, r in made])


def value_term(values, old, returns, clip):
    inside = np.clip(values, old - clip, old + clip)
    return np.maximum((values - returns) ** 2, (inside - returns) ** 2) / 2


@pytest.fixture(scope="module")
def arrays():
    """PPO with lambda 0.95, a value clip of 0.2 and a coefficient of 0.1; the policy term is a clip at 0.2."""
    rng = np.random.default_rng(0)
    old_values, noise, old = rng.normal(size=(3, *MASK.shape))
    rewards = np.where(np.arange(5) == np.asarray(LENGTHS)[:, None] - 1, [[1.0], [0.0], [1.0], [0.5]], -0.01)
    advantages, returns = estimated(rewards, old_values)
    now = np.where(MASK, -np.abs(old) + 0.3 * noise - 1, 0)
    old, values = np.where(MASK, -np.abs(old) - 1, 0), old_values + 0.4 * noise
    ratio = np.exp(now - old)
    kept = np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.2) * advantages)
    gradient = np.where(MASK & (kept == ratio * advantages), -kept, 0) / MASK.sum()
    loss = 0.1 * value_term(values, old_values, returns, 0.2)[MASK].mean()
    told = {"reported_loss": np.float64(-kept[MASK].mean()), "reported_dlogprobs": gradient}
    given = {"logprobs": now, "old_logprobs": old, "mask": MASK, "advantages": advantages, "token_rewards": rewards}
    values = {"values": values, "old_values": old_values, "returns": returns, "reported_value_loss": np.float64(loss)}
    return given | told | values


def critic(arrays):
    with jax.enable_x64(True):
        return Critic.of(checked(arrays))


def test_gae_and_value_loss_are_identified(arrays):
    found = critic(arrays)
    assert [one.settings for one in found.conventions] == [{"gamma": 1.0, "lam": 0.95, "whitened": True}]
    assert found.settings == {"value_clip": 0.2, "value_coef": 0.1, "value_aggregation": "token_mean"}
    assert found.faults == []
    assert critic({name: arrays[name] for name in ("logprobs", "mask", "advantages", "reported_loss")}).faults == []


def _late(a):
    values = np.concatenate([np.zeros((4, 1)), a["old_values"][:, :-1]], 1)
    return {"advantages": estimated(a["token_rewards"], values)[0]}


def _whitened(a):
    return {"returns": a["advantages"] + a["old_values"]}


def _smaller(a):
    inside = np.clip(a["values"], a["old_values"] - 0.2, a["old_values"] + 0.2)
    squares = np.minimum((a["values"] - a["returns"]) ** 2, (inside - a["returns"]) ** 2) / 2
    return {"reported_value_loss": np.float64(squares[MASK].mean())}


@pytest.mark.parametrize(
    ("name", "plant"),
    [
        ("values_shifted", _late),
        ("values_ignored", lambda a: {"advantages": estimated(a["token_rewards"], 0 * a["old_values"])[0]}),
        ("advantages_not_of_these_values", lambda a: {"advantages": a["advantages"] ** 3}),
        ("returns_of_whitened_advantages", _whitened),
        ("returns_wrong", lambda a: {"returns": a["returns"] + 1.0}),
        ("value_loss_minimum", _smaller),
        ("value_loss_not_reproduced", lambda a: {"reported_value_loss": a["reported_value_loss"] * 1.37}),
    ],
)
def test_a_planted_fault_is_named(arrays, name, plant):
    found = dict(critic(arrays | plant(arrays)).faults)
    assert found[name]
    assert set(found) <= {name, "value_loss_not_reproduced"}


@pytest.mark.slow
def test_the_whole_opinion_names_ppo(arrays):
    with jax.enable_x64(True):
        made = opinion(checked(arrays))
    assert made.reproduced
    assert {fit.objective for fit in made.fits} == {"ppo"}
    expected = {"lam": 0.95, "whitened": True, "value_clip": 0.2, "value_coef": 0.1, "clip_low": 0.2, "clip_high": 0.2}
    assert expected.items() <= made.fits[0].settings.items()
    assert made.faults == []
