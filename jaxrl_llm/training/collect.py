"""From prompts to a rollout with rewards: sampling, the verifier, other sources and DAPO's dynamic sampling."""

import dataclasses
import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import objectives, tasks
from jaxrl_llm.ground import metrics as M
from jaxrl_llm.ground.array_typing import Array, Bool, Integer, Key, Params, PerAnswer
from jaxrl_llm.ground.declared import Block, declared
from jaxrl_llm.rollout import verification
from jaxrl_llm.rollout.remote import RolloutEngine
from jaxrl_llm.rollout.trajectory import Trajectory
from jaxrl_llm.rollout.verification import Answered, Verified
from jaxrl_llm.training.reward_sources import RewardConfig, total_rewards

_FAILED_SAMPLES = 4  # answers per step on which the verifier failed, saved with the samples


@dataclasses.dataclass(frozen=True)
class DynamicSampling(Block, prefix="dynamic_sampling."):
    """DAPO: replace groups whose task rewards are all alike."""

    max_draws: int = declared(1, "most rollouts per step; 1: off", least=1)


@dataclasses.dataclass(frozen=True)
class Collected:
    """A rollout with its rewards, which are weighted sums."""

    trajectory: Trajectory
    metrics: dict[str, float]  # of ALL generated answers
    sources: dict[str, M.Metric]  # `reward/NAME` of every source, of the answers that are trained on
    samples: list[dict[str, Any]]  # rows that a person can read
    tokens: int  # answer tokens generated, dropped groups included


@dataclasses.dataclass(frozen=True)
class _Draw:
    prompts: list[str]
    answered: Answered

    @functools.cached_property
    def verified(self) -> Verified:
        return self.answered.finish()

    @property
    def group_size(self) -> int:
        return len(self.answered.lengths) // len(self.prompts)

    def rules(self, weighting: RewardConfig, max_length: int) -> dict[str, np.ndarray]:
        """The sources of rewards that the host knows; waits for the verifier."""
        answered = self.answered
        return weighting.rules(self.verified.rewards, answered.lengths, answered.truncated, max_length)


@dataclasses.dataclass(frozen=True)
class Rollout:
    """A rollout whose answers may still be at the verifier."""

    sampled: Trajectory  # without rewards
    draws: list[_Draw]
    kept: int  # groups
    weighting: RewardConfig
    max_length: int
    samples: int
    sources: dict[str, Array] | None  # verifier and rules on the length, in the order of the trajectory; None: not yet
    moved: Mapping[str, float]  # what it took to bring the parameters to the rollout's mesh; empty: they were there

    @functools.cached_property
    def trajectory(self) -> Trajectory:
        """As the updates see it but without rewards, so that the policies can score it meanwhile."""
        t = self.sampled
        if not self.weighting.overlong_filter:
            return t
        return t.replace(loss_mask=objectives.overlong_filter(t.loss_mask, t.truncated))

    def finish(self, judged: PerAnswer | None = None) -> Collected:
        """Wait for the verifier and sum up.

        Args:
          judged: what the reward model says of the trajectory, if there is one.

        Raises:
          ValueError: the task's verifier cannot run in a worker process.
        """
        first, *_ = self.draws
        sources: Any = self.sources
        if sources is None:  # one draw, every group of it kept
            sources = first.rules(self.weighting, self.max_length)
        if judged is not None:
            sources = sources | {"reward_model": judged}
        where = np.arange(len(first.answered.lengths)) < self.kept * first.group_size
        rewards, described = total_rewards(self.weighting, sources, where)
        metrics = _describe(self.draws) | {"rollout/groups_kept": float(self.kept), **self.moved}
        tokens = sum(int(draw.answered.lengths.sum()) for draw in self.draws)
        readable = _readable(self.draws, self.samples)
        return Collected(self.trajectory.replace(rewards=rewards), metrics, described, readable, tokens)


def begin(
    engine: RolloutEngine,
    params: Params,
    stream: tasks.PromptStream,
    task: tasks.Task,
    key: Key,
    sampling: DynamicSampling,
    weighting: RewardConfig,
    samples: int = 0,
    version: int = 0,
) -> Rollout:
    """One rollout of as many groups as a batch of `stream` has prompts; its verifier may still be running.

    With dynamic sampling, groups whose verified rewards have max > min are kept in draw order and drawn again until
    the batch is full or the bound is hit; surplus groups are dropped and counted; at the bound the remaining
    places hold groups without a loss. Every draw is the same compiled rollout. Which groups are kept depends on their
    rewards, so this waits for the verifier. Source: DAPO, arXiv 2503.14476, section 3.2.

    Parameters that the rollout has on another mesh are moved once, whatever the number of draws, and the copy is gone
    when this returns. version: of the parameters, the steps that trained them.
    """
    prepared, moved = engine.take_weights(params, version)
    g = engine.group_size
    batch = next(stream)
    wanted = len(batch["prompt"])
    kept, best, sources, draws = 0, None, None, []
    if sampling.max_draws == 1:
        rollout = answered(engine, prepared, batch, task, key, weighting, samples, moved)
        engine.release(prepared, params)
        return rollout
    for draw in range(sampling.max_draws):
        batch = batch if draw == 0 else next(stream)
        uids = batch["draw"].astype(np.uint32)
        out = engine.generate(prepared, batch["tokens"], batch["lengths"], uids, key)
        draws.append(_Draw(batch["prompt"], verification.begin(out, task, batch, g)))
        rules = jax.tree.map(jnp.asarray, draws[-1].rules(weighting, engine.max_new_tokens))
        rewards = draws[-1].verified.rewards
        mixed = rewards.reshape(-1, g).max(1) > rewards.reshape(-1, g).min(1)
        useful = np.flatnonzero(mixed)[: wanted - kept]
        source, place = np.zeros(wanted, np.int32), np.zeros(wanted, bool)
        if best is None:  # the remaining places are filled with the first draw's other groups, each once
            blank, source = out.replace(loss_mask=jnp.zeros_like(out.loss_mask)), np.argsort(~mixed, kind="stable")
            empty = (blank, rules)
            best, sources = _place(empty, empty, _rows(source, g), np.ones(len(rewards), bool))
        source[kept : kept + len(useful)], place[kept : kept + len(useful)] = useful, True
        best, sources = _place((best, sources), (out, rules), _rows(source, g), np.repeat(place, g))
        kept += len(useful)
        if kept == wanted:
            break
    engine.release(prepared, params)
    assert best is not None
    return Rollout(best, draws, kept, weighting, engine.max_new_tokens, samples, sources, moved)


def answered(
    engine: RolloutEngine,
    prepared: Any,
    batch: tasks.PromptBatch,
    task: tasks.Task,
    key: Key,
    weighting: RewardConfig,
    samples: int,
    moved: Mapping[str, float] = MappingProxyType({}),
) -> Rollout:
    """The rollout of one batch, all of it kept, its verifier still running; prepared: what the engine samples with."""
    uids = batch["draw"].astype(np.uint32)
    sampled = engine.generate(prepared, batch["tokens"], batch["lengths"], uids, key)
    return verifying(engine, sampled, batch, task, weighting, samples, moved)


def verifying(
    engine: RolloutEngine,
    sampled: Trajectory,
    batch: tasks.PromptBatch,
    task: tasks.Task,
    weighting: RewardConfig,
    samples: int,
    moved: Mapping[str, float] = MappingProxyType({}),
) -> Rollout:
    """As `answered`, of answers that are there."""
    draw = _Draw(batch["prompt"], verification.begin(sampled, task, batch, engine.group_size))
    kept = len(batch["prompt"])
    return Rollout(sampled, [draw], kept, weighting, engine.max_new_tokens, samples, None, moved)


def _rows(groups: np.ndarray, group_size: int) -> np.ndarray:
    return (groups[:, None] * group_size + np.arange(group_size)).ravel()


@jax.jit
def _place(into: Any, new: Any, source: Integer[Array, "b"], where: Bool[Array, "b"]) -> Any:
    """Trees of arrays of answers: rows `source` of `new` at the places `where`."""

    def one(old: Array, new: Array) -> Array:
        axis = 1 if old.ndim == 4 else 0  # routing has its layers first
        shape = [1] * old.ndim
        shape[axis] = -1
        return jnp.where(where.reshape(shape), jnp.take(new, source, axis=axis), old)

    return jax.tree.map(one, into, new)


def _describe(draws: list[_Draw]) -> dict[str, float]:
    answered, verified = [draw.answered for draw in draws], [draw.verified for draw in draws]
    rewards = np.concatenate([one.rewards for one in verified])
    groups = rewards.reshape(-1, draws[0].group_size)
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/zero_advantage_groups": float((groups.max(1) == groups.min(1)).mean()),
        "reward/verifier_timeouts": float(sum(one.timeouts for one in verified)),
        "reward/verifier_errors": float(sum(one.raised for one in verified)),
        "rollout/length_mean": float(np.concatenate([one.lengths for one in answered]).mean()),
        "rollout/truncated": float(np.concatenate([one.truncated for one in answered]).mean()),
        "rollout/groups_generated": float(len(groups)),
    }


def _readable(draws: list[_Draw], samples: int) -> list[dict[str, Any]]:
    """The first `samples` answers, followed by the first few others on which the verifier failed."""
    rows, failed = [], []
    for draw in draws:
        found = draw.verified
        for i, (text, error) in enumerate(zip(found.texts, found.errors, strict=True)):
            row = {
                "prompt": draw.prompts[i // draw.group_size],
                "answer": text,
                "reward": float(found.rewards[i]),
                "length": int(draw.answered.lengths[i]),
            }
            if error:
                row["verifier_error"] = error
            if len(rows) < samples:
                rows.append(row)
            elif error and len(failed) < _FAILED_SAMPLES:
                failed.append(row)
    return rows + failed
