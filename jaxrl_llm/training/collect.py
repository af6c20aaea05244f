"""From prompts to a verified rollout: sampling, rewards, shaping and DAPO's dynamic sampling."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import objectives, tasks
from jaxrl_llm.array_typing import Array, Bool, Integer, Key
from jaxrl_llm.ranges import at_least
from jaxrl_llm.rollout import verification
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.trajectory import Trajectory
from jaxrl_llm.rollout.verification import Answered, Verified

__all__ = ["Collected", "DynamicSampling", "RewardShaping", "Rollout", "begin"]

_FAILED_SAMPLES = 4  # answers per step on which the verifier failed, saved with the samples


@dataclasses.dataclass(frozen=True)
class DynamicSampling:
    """Groups whose task rewards are all alike are replaced, within `max_draws` rollouts; 1 = off."""

    max_draws: int

    def __post_init__(self) -> None:
        at_least("dynamic_sampling.max_draws", self.max_draws, 1, "1 turns it off")


@dataclasses.dataclass(frozen=True)
class RewardShaping:
    """DAPO's length shaping, in tokens: the soft overlong ramp (0 = off) and the filter of truncated answers."""

    overlong_cache: int
    overlong_filter: bool

    def __post_init__(self) -> None:
        at_least("rewards.overlong_cache", self.overlong_cache, 0, "0 turns it off")


@dataclasses.dataclass(frozen=True)
class Collected:
    """trajectory.rewards are shaped; metrics cover ALL generated answers; samples are readable rows."""

    trajectory: Trajectory
    metrics: dict[str, float]
    samples: list[dict[str, Any]]
    tokens: int  # answer tokens generated, dropped groups included


@dataclasses.dataclass(frozen=True)
class Rollout:
    """A rollout whose answers may still be at the verifier.

    trajectory: as the updates see it but without rewards, so that the policies can score it meanwhile.
    """

    trajectory: Trajectory
    draws: "list[_Draw]"
    kept: int  # groups
    shaping: RewardShaping
    max_length: int
    samples: int
    rewards: Array | None  # shaped, in the order of the trajectory; None: not known yet

    def finish(self) -> Collected:
        """Wait for the rewards.

        Raises:
          ValueError: the task's verifier cannot run in a worker process.
        """
        drawn = [(draw.answered, draw.verified) for draw in self.draws]
        rewards = self.rewards
        if rewards is None:  # one draw, every group of it kept
            (answered, verified), *_ = drawn
            rewards = jnp.asarray(_shaped(verified.rewards, answered.lengths, self.max_length, self.shaping))
        groups = len(self.draws[0].prompts)
        metrics = _describe(drawn, len(drawn[0][0].lengths) // groups)
        metrics |= {
            "rollout/groups_generated": float(groups * len(drawn)),
            "rollout/groups_kept": float(self.kept),
        }
        tokens = sum(int(answered.lengths.sum()) for answered, _ in drawn)
        return Collected(
            self.trajectory.replace(rewards=rewards), metrics, _readable(self.draws, drawn, self.samples), tokens
        )


@dataclasses.dataclass(frozen=True)
class _Draw:
    prompts: list[str]
    answered: Answered

    @functools.cached_property
    def verified(self) -> Verified:
        return self.answered.finish()


def begin(
    engine: Engine,
    params: Any,
    stream: tasks.PromptStream,
    task: tasks.Task,
    key: Key,
    sampling: DynamicSampling,
    shaping: RewardShaping,
    samples: int = 0,
) -> Rollout:
    """One rollout of as many groups as a batch of `stream` has prompts; its verifier may still be running.

    With dynamic sampling, groups with max reward > min reward (before shaping) are kept in draw order and drawn again
    until the batch is full or the bound is hit; surplus groups are dropped and counted; at the bound the remaining
    places hold groups without a loss. Every draw is the same compiled rollout. Which groups are kept depends on their
    rewards, so this waits for the verifier. Source: DAPO, arXiv 2503.14476, section 3.2.
    """
    g = engine.group_size
    batch = next(stream)
    wanted = len(batch["prompt"])
    kept, best, draws = 0, None, []
    for draw in range(sampling.max_draws):
        batch = batch if draw == 0 else next(stream)
        uids = batch["draw"].astype(np.uint32)
        out = engine.generate(params, batch["tokens"], batch["lengths"], uids, key)
        draws.append(_Draw(batch["prompt"], verification.begin(out, task, batch, g)))
        if sampling.max_draws == 1:
            best, kept = out, wanted
            break
        rewards = draws[-1].verified.rewards
        shaped = _shaped(rewards, draws[-1].answered.lengths, engine.max_new_tokens, shaping)
        out = out.replace(rewards=jnp.asarray(shaped))
        mixed = rewards.reshape(-1, g).max(1) > rewards.reshape(-1, g).min(1)
        useful = np.flatnonzero(mixed)[: wanted - kept]
        source, place = np.zeros(wanted, np.int32), np.zeros(wanted, bool)
        if best is None:  # the remaining places are filled with the first draw's other groups, each once
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
    return Rollout(
        trajectory=best.replace(rewards=None),
        draws=draws,
        kept=kept,
        shaping=shaping,
        max_length=engine.max_new_tokens,
        samples=samples,
        rewards=best.rewards,
    )


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


def _describe(drawn: list[tuple[Answered, Verified]], group_size: int) -> dict[str, float]:
    rewards = np.concatenate([verified.rewards for _, verified in drawn])
    groups = rewards.reshape(-1, group_size)
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/zero_advantage_groups": float((groups.max(1) == groups.min(1)).mean()),
        "reward/verifier_timeouts": float(sum(verified.timeouts for _, verified in drawn)),
        "reward/verifier_errors": float(sum(verified.raised for _, verified in drawn)),
        "rollout/length_mean": float(np.concatenate([answered.lengths for answered, _ in drawn]).mean()),
        "rollout/truncated": float(np.concatenate([answered.truncated for answered, _ in drawn]).mean()),
    }


def _readable(draws: list[_Draw], drawn: list[tuple[Answered, Verified]], samples: int) -> list[dict[str, Any]]:
    """The first `samples` answers, followed by the first few others on which the verifier failed."""
    rows, failed = [], []
    for draw, (answered, verified) in zip(draws, drawn, strict=True):
        group_size = len(verified.texts) // len(draw.prompts)
        for i, text in enumerate(verified.texts):
            row = {
                "prompt": draw.prompts[i // group_size],
                "answer": text,
                "reward": float(verified.rewards[i]),
                "length": int(answered.lengths[i]),
            }
            if verified.errors[i]:
                row["verifier_error"] = verified.errors[i]
            if len(rows) < samples:
                rows.append(row)
            elif verified.errors[i] and len(failed) < _FAILED_SAMPLES:
                failed.append(row)
    return rows + failed
