"""How well a policy answers held-out prompts: mean reward, exact match, pass@1 and pass@k."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_llm.ground import sharding
from jaxrl_llm.models import EXACT, Model, Router
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.sampling import Sampling
from jaxrl_llm.rollout.verification import verify
from jaxrl_llm.tasks import PromptBatch, Task


def pass_at_k(correct: Sequence[int] | np.ndarray, samples: int, k: int) -> float:
    """Mean over prompts of 1 - C(n - c, k) / C(n, k), the unbiased estimator. Source: arXiv 2107.03374, eq. 1."""
    return float(np.mean([1 - math.comb(samples - int(c), k) / math.comb(samples, k) for c in correct]))


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """Evaluates parameters on fixed prompts with fixed keys: `samples` drawn answers to each and a greedy one.

    An answer is right when its reward is at least `task.solved`. Sampling uses temperature 1, whatever the training
    rollout uses, and computes in the model's own dtype, with `router`.
    """

    model: Model
    task: Task
    prompts: PromptBatch
    samples: int
    max_new_tokens: int
    slots: int = 0  # answers decoded at once, which bounds memory; 0 = all
    router: Router = EXACT

    def __call__(self, params: Any) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """({"eval/...": value}, one readable row per prompt)."""
        rewards, texts = self._answered(params)
        sampled, greedy = rewards[:, :-1], rewards[:, -1]
        right = (sampled >= self.task.solved).sum(1)
        rates = {
            "eval/greedy": float((greedy >= self.task.solved).mean()),
            "eval/greedy_reward": float(greedy.mean()),
            "eval/reward": float(sampled.mean()),
            "eval/pass_at_1": float(right.mean() / self.samples),
            "eval/pass_at_k": pass_at_k(right, self.samples, self.samples),
            "eval/k": self.samples,
        }
        return rates, [
            {
                "prompt": prompt,
                "greedy": texts[i][-1],
                "reward": float(greedy[i]),
                "sampled": texts[i][:-1],
                "sampled_reward": sampled[i].tolist(),
            }
            for i, prompt in enumerate(self.prompts["prompt"])
        ]

    def pass_rate(self, params: Any) -> float:
        """Sampled pass@1."""
        return float((self._answered(params)[0][:, :-1] >= self.task.solved).mean())

    def _answered(self, params: Any) -> tuple[np.ndarray, list[list[str]]]:
        """Rewards [prompts, samples + 1] and texts, the greedy answer last; one rollout, since each compiles.

        The last prompt is repeated until the devices divide the rows; otherwise some would repeat others' work.
        """
        group, shards, count = self.samples + 1, sharding.shards("rows", self.model.mesh), len(self.prompts["uid"])
        places = np.minimum(np.arange(count + -count % (shards // math.gcd(shards, group))), count - 1)
        given: Any = self.prompts
        rows: Any = {name: given[name][places] for name in ("uid", "draw", "tokens", "lengths")}
        rows |= {name: [given[name][i] for i in places] for name in ("prompt", "answer", "row")}
        batch = PromptBatch(**rows)
        engine = Engine(
            self.model,
            Sampling(greedy_last=True),
            group,
            self.max_new_tokens,
            self.task.tokenizer.end_ids,
            slots=-(-self.slots // shards) * shards,
            dtype=self.model.config.dtype,
            router=self.router,
            record_routing=False,
        )
        uids, prepared = batch["uid"].astype(np.uint32), engine.prepare(params)
        out = engine.generate(prepared, batch["tokens"], batch["lengths"], uids, jax.random.key(0))
        engine.release(prepared, params)
        judged = verify(out, self.task, batch, group)
        texts = [judged.texts[i : i + group] for i in range(0, count * group, group)]
        return judged.rewards.reshape(-1, group)[:count], texts
