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
    """Evaluates parameters on fixed prompts with fixed keys, in one greedy and one sampled rollout.

    An answer is right when its reward is 1. Sampling uses temperature 1, whatever the training rollout uses.
    """

    model: Model
    task: Task
    prompts: PromptBatch
    samples: int
    max_new_tokens: int

    def __call__(self, params: Any) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """({"eval/greedy", "eval/pass_at_1", "eval/pass_at_k", "eval/k"}, one row a prompt that a person can read)."""
        greedy, said = self._rewards(params, Sampling(temperature=0.0), 1)
        sampled, drawn = self._rewards(params, Sampling(), self.samples)
        right = (sampled.reshape(-1, self.samples) == 1).sum(1)
        found = {
            "eval/greedy": float((greedy == 1).mean()),
            "eval/pass_at_1": float((sampled == 1).mean()),
            "eval/pass_at_k": pass_at_k(right, self.samples, self.samples),
            "eval/k": self.samples,
        }
        rows = [
            {
                "prompt": prompt,
                "greedy": said[i],
                "reward": float(greedy[i]),
                "sampled": drawn[i * self.samples : (i + 1) * self.samples],
                "sampled_reward": sampled[i * self.samples : (i + 1) * self.samples].tolist(),
            }
            for i, prompt in enumerate(self.prompts["prompt"])
        ]
        return found, rows

    def pass_rate(self, params: Any) -> float:
        """Sampled pass@1."""
        return float((self._rewards(params, Sampling(), self.samples)[0] == 1).mean())

    def _rewards(self, params: Any, sampling: Sampling, group_size: int) -> tuple[np.ndarray, list[str]]:
        engine = Engine(
            self.model, sampling, group_size, self.max_new_tokens, self.task.tokenizer.eos_id, record_routing=False
        )
        batch = self.prompts
        uids = batch["uid"].astype(np.uint32)
        out = engine.generate(params, batch["tokens"], batch["lengths"], uids, jax.random.key(0))
        return verify(out, self.task, batch["prompt"], group_size)
