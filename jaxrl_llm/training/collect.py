"""From sampled answers to a rollout with rewards: the verifier, other sources and DAPO's dynamic sampling."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import tasks
from jaxrl_llm.ground import metrics as M
from jaxrl_llm.ground.array_typing import Array, Bool, Integer, PerAnswer
from jaxrl_llm.ground.declared import Block, declared
from jaxrl_llm.ground.worker_errors import TIMEOUT
from jaxrl_llm.rollout import verification
from jaxrl_llm.rollout.rollout import Rollout
from jaxrl_llm.rollout.verification import VERIFIER
from jaxrl_llm.training.layout import Layout
from jaxrl_llm.training.reward_sources import RewardConfig, total_rewards

_FAILED_SAMPLES = 4  # answers per step on which the verifier failed, saved with the samples


@dataclasses.dataclass(frozen=True)
class DynamicSampling(Block, prefix="dynamic_sampling."):
    """DAPO: replace groups whose task rewards are all alike."""

    max_draws: int = declared(1, "most rollouts per step; 1: off", least=1)


@dataclasses.dataclass(frozen=True)
class Draw:
    """The data of one step. Sampled answers may still be at the verifier, until `judged` waits for it."""

    rollout: Rollout
    epochs: list[list[Layout]] = dataclasses.field(default_factory=list)  # the micro-batches of every minibatch
    metrics: dict[str, M.Metric] = dataclasses.field(default_factory=dict)  # still on the devices
    host: dict[str, float] = dataclasses.field(default_factory=dict)
    samples: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # rows that a person can read

    # Of sampled answers alone: all that were drawn, those of dropped groups too.
    asked: list[tuple[tasks.Prompts, verification.Asked]] = dataclasses.field(default_factory=list)
    kept: int = 0  # groups of the rollout that hold what was drawn; the others fill a place without a loss
    sources: dict[str, Array] | None = None  # of the rollout's rewards, known on the host; None: not yet

    @property
    def group_size(self) -> int:
        return len(self.rollout.tokens) // len(self.asked[0][0]["prompt"])

    @property
    def tokens(self) -> int:
        """Answer tokens generated."""
        return sum(int(lengths.sum()) for _, (lengths, *_) in self.asked)


def verifying(
    rollout: Rollout, batch: tasks.Prompts, task: tasks.Task, group_size: int, moved: dict[str, float]
) -> Draw:
    """Sampled answers to one batch, all of them kept, on their way through the verifier.

    Args:
      rollout: [b t], group_size answers to each prompt of the batch.
      moved: metrics of bringing the weights to the engine.
    """
    asked = [(batch, verification.ask(rollout, task, batch, group_size))]
    return Draw(rollout, host=moved, asked=asked, kept=len(batch["prompt"]))


def mixed(draw: Callable[[], Draw], most: int, weighting: RewardConfig, max_length: int) -> Draw:
    """Groups whose verified rewards have max > min, drawn until there are as many as in one draw, or `most` times.

    They are kept in draw order; surplus groups are dropped and counted; at the bound the remaining places hold groups
    without a loss. Which groups are kept depends on their rewards, so this waits for the verifier.
    Source: DAPO, arXiv 2503.14476, section 3.2.

    Args:
      draw: samples answers to the next prompts.
      most: draws, at least 1.
      max_length: most tokens of an answer.

    Returns:
      A rollout of the shape of one draw, with the rewards that the host knows.
    """
    kept, wanted, best, sources, asked, moved = 0, 1, None, None, [], {}
    while kept < wanted and len(asked) < most:
        drawn = draw()
        out, wanted, moved, g = drawn.rollout, drawn.kept, drawn.host, drawn.group_size
        asked += drawn.asked
        known = _rules(drawn, weighting, max_length)
        rewards, rules = known[VERIFIER], jax.tree.map(jnp.asarray, known)
        useful = rewards.reshape(-1, g).max(1) > rewards.reshape(-1, g).min(1)
        first = np.flatnonzero(useful)[: wanted - kept]
        source, place = np.zeros(wanted, np.int32), np.zeros(wanted, bool)
        if best is None:  # the remaining places are filled with the first draw's other groups, each once
            blank, source = out.replace(loss_mask=jnp.zeros_like(out.loss_mask)), np.argsort(~useful, kind="stable")
            empty = (blank, rules)
            best, sources = _place(empty, empty, _rows(source, g), np.ones(len(rewards), bool))
        source[kept : kept + len(first)], place[kept : kept + len(first)] = first, True
        best, sources = _place((best, sources), (out, rules), _rows(source, g), np.repeat(place, g))
        kept += len(first)
    assert best is not None
    return Draw(best, host=moved, asked=asked, kept=kept, sources=sources)


def judged(
    draw: Draw, weighting: RewardConfig, max_length: int, samples: int = 0, scores: PerAnswer | None = None
) -> Draw:
    """The draw with its rewards, which are weighted sums, with metrics and samples; waits for the verifier.

    The host's metrics are of all generated answers, `reward/NAME` of every source of those that are trained on.

    Args:
      max_length: most tokens of an answer.
      samples: answers that a person can read.
      scores: of the reward model on the rollout, if there is one.

    Raises:
      ValueError: the task's verifier cannot run in a worker process.
    """
    sources: Any = draw.sources
    if sources is None:  # one draw, every group of it kept
        sources = _rules(draw, weighting, max_length)
    if scores is not None:
        sources = sources | {"reward_model": scores}
    where = np.arange(len(draw.rollout.tokens)) < draw.kept * draw.group_size
    rewards, described = total_rewards(weighting, sources, where, draw.group_size, draw.rollout.truncated)
    return dataclasses.replace(
        draw,
        rollout=draw.rollout.replace(rewards=rewards),
        metrics=described,
        host=_describe(draw) | {"rollout/groups_kept": float(draw.kept), **draw.host},
        samples=_readable(draw, samples),
    )


def _rules(draw: Draw, weighting: RewardConfig, max_length: int) -> dict[str, np.ndarray]:
    """The sources of rewards that the host knows; waits for the verifier."""
    ((_, (lengths, truncated, wait)),) = draw.asked
    return weighting.rules(wait()[1], lengths, truncated, max_length)


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


def _describe(draw: Draw) -> dict[str, float]:
    lengths, truncated, waits = zip(*(asked for _, asked in draw.asked), strict=True)
    rewards = np.concatenate([wait()[1][VERIFIER] for wait in waits])
    errors = [set(error.values()) for wait in waits for error in wait()[2]]
    groups = rewards.reshape(-1, draw.group_size)
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/zero_advantage_groups": float((groups.max(1) == groups.min(1)).mean()),
        "reward/verifier_timeouts": float(sum(TIMEOUT in one for one in errors)),
        "reward/verifier_errors": float(sum(bool(one - {TIMEOUT}) for one in errors)),
        "rollout/length_mean": float(np.concatenate(lengths).mean()),
        "rollout/truncated": float(np.concatenate(truncated).mean()),
        "rollout/groups_generated": float(len(groups)),
    }


def _readable(draw: Draw, samples: int) -> list[dict[str, Any]]:
    """The first `samples` answers, followed by the first few others on which the verifier failed."""
    rows, failed = [], []
    for prompts, (lengths, _, wait) in draw.asked:
        texts, rewards, errors = wait()
        for i, (text, error) in enumerate(zip(texts, errors, strict=True)):
            given = {name: float(by_answer[i]) for name, by_answer in rewards.items()}
            row = {
                "prompt": prompts["prompt"][i // draw.group_size],
                "answer": text,
                "reward": given.pop(VERIFIER),
                "length": int(lengths[i]),
            }
            if given:
                row["rewards"] = given
            if error:
                row["verifier_error"] = "; ".join(
                    said if name == VERIFIER else f"{name}: {said}" for name, said in error.items()
                )
            if len(rows) < samples:
                rows.append(row)
            elif error and len(failed) < _FAILED_SAMPLES:
                failed.append(row)
    return rows + failed
