"""From prompts to a rollout with rewards: sampling, the verifier, other sources and DAPO's dynamic sampling."""

import dataclasses
import functools
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import objectives, tasks
from jaxrl_llm.ground import metrics as M
from jaxrl_llm.ground import sharding
from jaxrl_llm.ground.array_typing import Array, Bool, Integer, Key, Params, PerAnswer
from jaxrl_llm.ground.declared import Block, declared
from jaxrl_llm.rollout import verification
from jaxrl_llm.rollout.engine import Engine
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
    """trajectory.rewards are weighted sums; samples are readable rows.

    metrics: of ALL generated answers. sources: of the answers that are trained on, `reward/NAME` of every source.
    """

    trajectory: Trajectory
    metrics: dict[str, float]
    sources: dict[str, M.Metric]
    samples: list[dict[str, Any]]
    tokens: int  # answer tokens generated, dropped groups included


@dataclasses.dataclass(frozen=True)
class Rollout:
    """A rollout whose answers may still be at the verifier.

    trajectory: as the updates see it but without rewards, so that the policies can score it meanwhile.
    moved: what it took to bring the parameters to the mesh of the rollout, empty where they were there.
    """

    trajectory: Trajectory
    draws: "list[_Draw]"
    kept: int  # groups
    weighting: RewardConfig
    max_length: int
    samples: int
    sources: dict[str, Array] | None  # verifier and rules on the length, in the order of the trajectory; None: not yet
    moved: Mapping[str, float]

    def finish(self, judged: PerAnswer | None = None) -> Collected:
        """Wait for the verifier and sum up.

        Args:
          judged: [b], what the reward model says of the trajectory, if there is one.

        Raises:
          ValueError: the task's verifier cannot run in a worker process.
        """
        drawn = [(draw.answered, draw.verified) for draw in self.draws]
        sources = self.sources
        if sources is None:  # one draw, every group of it kept
            (answered, verified), *_ = drawn
            sources = self.weighting.rules(verified.rewards, answered.lengths, answered.truncated, self.max_length)
        groups = len(self.draws[0].prompts)
        rows = len(drawn[0][0].lengths)
        if judged is not None:
            sources = sources | {"reward_model": judged}
        rewards, described = total_rewards(self.weighting, sources, np.arange(rows) < self.kept * (rows // groups))
        metrics = _describe(drawn, rows // groups)
        metrics |= {
            "rollout/groups_generated": float(groups * len(drawn)),
            "rollout/groups_kept": float(self.kept),
            **self.moved,
        }
        tokens = sum(int(answered.lengths.sum()) for answered, _ in drawn)
        readable = _readable(self.draws, drawn, self.samples)
        return Collected(self.trajectory.replace(rewards=rewards), metrics, described, readable, tokens)


@dataclasses.dataclass(frozen=True)
class _Draw:
    prompts: list[str]
    answered: Answered

    @functools.cached_property
    def verified(self) -> Verified:
        return self.answered.finish()


def begin(
    engine: Engine,
    params: Params,
    stream: tasks.PromptStream,
    task: tasks.Task,
    key: Key,
    sampling: DynamicSampling,
    weighting: RewardConfig,
    samples: int = 0,
) -> Rollout:
    """One rollout of as many groups as a batch of `stream` has prompts; its verifier may still be running.

    With dynamic sampling, groups whose verified rewards have max > min are kept in draw order and drawn again until
    the batch is full or the bound is hit; surplus groups are dropped and counted; at the bound the remaining
    places hold groups without a loss. Every draw is the same compiled rollout. Which groups are kept depends on their
    rewards, so this waits for the verifier. Source: DAPO, arXiv 2503.14476, section 3.2.

    Parameters that the rollout has on another mesh are moved once, whatever the number of draws, and the copy is gone
    when this returns.
    """
    prepared, moved = _prepared(engine, params)
    g = engine.group_size
    batch = next(stream)
    wanted = len(batch["prompt"])
    kept, best, sources, draws = 0, None, None, []
    for draw in range(sampling.max_draws):
        batch = batch if draw == 0 else next(stream)
        uids = batch["draw"].astype(np.uint32)
        out = engine.generate(prepared, batch["tokens"], batch["lengths"], uids, key)
        draws.append(_Draw(batch["prompt"], verification.begin(out, task, batch, g)))
        if sampling.max_draws == 1:
            best, kept = out, wanted
            break
        rewards, answered = draws[-1].verified.rewards, draws[-1].answered
        known = weighting.rules(rewards, answered.lengths, answered.truncated, engine.max_new_tokens)
        rules = jax.tree.map(jnp.asarray, known)
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
    if weighting.overlong_filter:
        best = best.replace(loss_mask=objectives.overlong_filter(best.loss_mask, best.truncated))
    return Rollout(
        trajectory=best,
        draws=draws,
        kept=kept,
        weighting=weighting,
        max_length=engine.max_new_tokens,
        samples=samples,
        sources=sources,
        moved=moved,
    )


def _prepared(engine: Engine, params: Params) -> tuple[Params, dict[str, float]]:
    """The parameters that the engine samples with, and the seconds and bytes of moving them, if they moved."""
    start = time.monotonic()
    prepared = engine.prepare(params)
    if prepared is params:
        return params, {}
    jax.block_until_ready(prepared)
    seconds = time.monotonic() - start
    size = float(sharding.local_bytes(prepared))
    return prepared, {"time/parameters_moved_s": seconds, "rollout/parameters_moved_bytes": size}


def _rows(groups: np.ndarray, group_size: int) -> np.ndarray:
    return (groups[:, None] * group_size + np.arange(group_size)).ravel()


@jax.jit
def _place(into: Any, new: Any, source: Integer[Array, "b"], where: Bool[Array, "b"]) -> Any:
    """Trees of arrays of answers: rows `source` of `new` at the places `where`.

    Rows are the first axis, the second of routing arrays.
    """

    def one(old: Array, new: Array) -> Array:
        axis = 1 if old.ndim == 4 else 0
        shape = [1] * old.ndim
        shape[axis] = -1
        return jnp.where(where.reshape(shape), jnp.take(new, source, axis=axis), old)

    return jax.tree.map(one, into, new)


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
