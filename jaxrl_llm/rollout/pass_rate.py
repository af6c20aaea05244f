"""How often a policy is right on held-out prompts: greedy, pass@1 and pass@k, with fixed keys."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_llm.models.transformer import Model
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.sampling import Sampling
from jaxrl_llm.rollout.trajectory import Trajectory
from jaxrl_llm.tasks import PromptBatch, Task

__all__ = ["Evaluator", "answers", "pass_at_k", "verify"]


def answers(trajectory: Trajectory, task: Task) -> tuple[list[str], np.ndarray]:
    """The text of every answer (without EOS) and its length in tokens (with it)."""
    tokens, mask = jax.device_get((trajectory.tokens, trajectory.loss_mask))
    eos = task.tokenizer.eos_id
    return [
        task.tokenizer.decode([t for t in row[m].tolist() if t != eos]) for row, m in zip(tokens, mask, strict=True)
    ], mask.sum(1)


def verify(trajectory: Trajectory, task: Task, prompts: list[str], group_size: int) -> tuple[np.ndarray, list[str]]:
    """Rewards [b] float32 in [0, 1] and texts; an answer cut off before EOS is no answer and gets 0.

    Raises:
      ValueError: the verifier returned a number outside [0, 1] or none at all.
    """
    texts, _ = answers(trajectory, task)
    asked = [prompt for prompt in prompts for _ in range(group_size)]
    truncated = jax.device_get(trajectory.truncated)
    rewards = np.array(
        [0.0 if cut else task.verify(p, a) for p, a, cut in zip(asked, texts, truncated, strict=True)], np.float32
    )
    bad = np.flatnonzero(~((rewards >= 0) & (rewards <= 1)))
    if bad.size:
        i = int(bad[0])
        raise ValueError(
            f"task {task.name!r}: verify({asked[i]!r}, {texts[i]!r}) gave {rewards[i]}; return a number in [0, 1]"
        )
    return rewards, texts


def pass_at_k(correct: Sequence[int] | np.ndarray, samples: int, k: int) -> float:
    """Mean over prompts of 1 - C(n - c, k) / C(n, k), the unbiased estimator. Source: arXiv 2107.03374, eq. 1."""
    return float(np.mean([1 - math.comb(samples - int(c), k) / math.comb(samples, k) for c in correct]))


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """Evaluates parameters on fixed prompts with fixed keys: `samples` drawn answers to each and a greedy one.

    An answer is right when its reward is 1. Sampling uses temperature 1, whatever the training rollout uses.
    """

    model: Model
    task: Task
    prompts: PromptBatch
    samples: int
    max_new_tokens: int

    def __call__(self, params: Any) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """({"eval/greedy", "eval/pass_at_1", "eval/pass_at_k", "eval/k"}, one row a prompt that a person can read)."""
        rewards, texts = self._answered(params)
        sampled, greedy = rewards[:, :-1], rewards[:, -1]
        right = (sampled == 1).sum(1)
        found = {
            "eval/greedy": float((greedy == 1).mean()),
            "eval/pass_at_1": float((sampled == 1).mean()),
            "eval/pass_at_k": pass_at_k(right, self.samples, self.samples),
            "eval/k": self.samples,
        }
        rows = [
            {
                "prompt": prompt,
                "greedy": texts[i][-1],
                "reward": float(greedy[i]),
                "sampled": texts[i][:-1],
                "sampled_reward": sampled[i].tolist(),
            }
            for i, prompt in enumerate(self.prompts["prompt"])
        ]
        return found, rows

    def pass_rate(self, params: Any) -> float:
        """Sampled pass@1."""
        return float((self._answered(params)[0][:, :-1] == 1).mean())

    def _answered(self, params: Any) -> tuple[np.ndarray, list[list[str]]]:
        """Rewards [prompts, samples + 1] and texts, the greedy answer last; one rollout, since each compiles."""
        group, batch = self.samples + 1, self.prompts
        engine = Engine(
            self.model,
            Sampling(greedy_last=True),
            group,
            self.max_new_tokens,
            (self.task.tokenizer.eos_id,),
            record_routing=False,
        )
        uids = batch["uid"].astype(np.uint32)
        out = engine.generate(params, batch["tokens"], batch["lengths"], uids, jax.random.key(0))
        rewards, texts = verify(out, self.task, batch["prompt"], group)
        return rewards.reshape(-1, group), [texts[i : i + group] for i in range(0, len(texts), group)]
