"""From prompts to a verified rollout: sampling, rewards, shaping and DAPO's dynamic sampling."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import objectives, tasks
from jaxrl_llm.array_typing import Array, Bool, Integer, Key
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.pass_rate import verify
from jaxrl_llm.rollout.trajectory import Trajectory

__all__ = ["Collected", "DynamicSampling", "RewardShaping", "collect"]


@dataclasses.dataclass(frozen=True)
class DynamicSampling:
    """Groups whose task rewards are all alike are replaced, within `max_draws` rollouts; 1 = off."""

    max_draws: int

    def __post_init__(self) -> None:
        if self.max_draws < 1:
            raise ValueError(f"dynamic_sampling.max_draws={self.max_draws} must be at least 1 (1 = off)")


@dataclasses.dataclass(frozen=True)
class RewardShaping:
    """DAPO's length shaping, in tokens: the soft overlong ramp (0 = off) and the filter of truncated answers."""

    overlong_cache: int
    overlong_filter: bool

    def __post_init__(self) -> None:
        if self.overlong_cache < 0:
            raise ValueError(f"rewards.overlong_cache={self.overlong_cache} must not be negative; 0 turns it off")


@dataclasses.dataclass(frozen=True)
class Collected:
    """trajectory.rewards are shaped; metrics speak of ALL generated answers; samples are rows for a person."""

    trajectory: Trajectory
    metrics: dict[str, float]
    samples: list[dict[str, Any]]
    tokens: int  # answer tokens generated, dropped groups included


def collect(
    engine: Engine,
    params: Any,
    stream: tasks.PromptStream,
    task: tasks.Task,
    key: Key,
    sampling: DynamicSampling,
    shaping: RewardShaping,
    samples: int = 0,
) -> Collected:
    """One rollout of as many groups as a batch of `stream` has prompts.

    With dynamic sampling, groups with max reward > min reward (before shaping) are kept in draw order and drawn again
    until the batch is full or the bound is hit; surplus groups are dropped and counted; at the bound the remaining
    places hold groups without a loss. Every draw is the same compiled rollout. Source: DAPO, arXiv 2503.14476, section
    3.2.
    """
    g = engine.group_size
    batch = next(stream)
    wanted = len(batch["prompt"])
    kept, best, drawn, shown = 0, None, [], []
    for draw in range(sampling.max_draws):
        batch = batch if draw == 0 else next(stream)
        uids = batch["draw"].astype(np.uint32)
        out = engine.generate(params, batch["tokens"], batch["lengths"], uids, key)
        rewards, texts = verify(out, task, batch["prompt"], g)
        lengths = np.asarray(jax.device_get(out.loss_mask)).sum(1)
        drawn.append((rewards, lengths, np.asarray(jax.device_get(out.truncated))))
        shown += [
            {
                "prompt": batch["prompt"][i // g],
                "answer": texts[i],
                "reward": float(rewards[i]),
                "length": int(lengths[i]),
            }
            for i in range(min(len(texts), samples - len(shown)))
        ]
        out = out.replace(rewards=jnp.asarray(_shaped(rewards, lengths, engine.max_new_tokens, shaping)))
        if sampling.max_draws == 1:
            best, kept = out, wanted
            break
        mixed = rewards.reshape(-1, g).max(1) > rewards.reshape(-1, g).min(1)
        useful = np.flatnonzero(mixed)[: wanted - kept]
        source, place = np.zeros(wanted, np.int32), np.zeros(wanted, bool)
        if best is None:  # behind its kept groups the first draw's others hold the places, so that none is there twice
            best, source = out.replace(loss_mask=jnp.zeros_like(out.loss_mask)), np.argsort(~mixed, kind="stable")
            best = _place(best, best, _rows(source, g), np.ones(len(rewards), bool))
        source[kept : kept + len(useful)], place[kept : kept + len(useful)] = useful, True
        best = _place(best, out, _rows(source, g), np.repeat(place, g))
        kept += len(useful)
        if kept == wanted:
            break
    assert best is not None
    if shaping.overlong_filter:
        best = best.replace(loss_mask=objectives.overlong_filter(best.loss_mask, best.truncated))
    rewards, lengths, truncated = (np.concatenate(parts) for parts in zip(*drawn, strict=True))
    metrics = _describe(rewards, lengths, truncated, g)
    metrics |= {"rollout/groups_generated": float(wanted * len(drawn)), "rollout/groups_kept": float(kept)}
    return Collected(best, metrics, shown, int(lengths.sum()))


def _rows(groups: np.ndarray, group_size: int) -> np.ndarray:
    return (groups[:, None] * group_size + np.arange(group_size)).ravel()


@jax.jit
def _place(into: Trajectory, new: Trajectory, source: Integer[Array, "b"], where: Bool[Array, "b"]) -> Trajectory:
    """Rows `source` of `new` at the places `where`; rows are the first axis, the second of routing arrays."""

    def one(old: Array, new: Array) -> Array:
        axis = 1 if old.ndim == 4 else 0
        shape = [1] * old.ndim
        shape[axis] = -1
        return jnp.where(where.reshape(shape), jnp.take(new, source, axis=axis), old)

    return jax.tree.map(one, into, new)


def _shaped(rewards: np.ndarray, lengths: np.ndarray, max_length: int, shaping: RewardShaping) -> np.ndarray:
    if not shaping.overlong_cache:
        return rewards
    penalty = objectives.overlong_penalty(jnp.asarray(lengths), max_length=max_length, cache=shaping.overlong_cache)
    return rewards + np.asarray(penalty, np.float32)


def _describe(rewards: np.ndarray, lengths: np.ndarray, truncated: np.ndarray, group_size: int) -> dict[str, float]:
    groups = rewards.reshape(-1, group_size)
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/zero_advantage_groups": float((groups.max(1) == groups.min(1)).mean()),
        "rollout/length_mean": float(lengths.mean()),
        "rollout/truncated": float(truncated.mean()),
    }
