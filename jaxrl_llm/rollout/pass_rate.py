"""How well a policy answers held-out prompts: mean reward, exact match, pass@1 and pass@k."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_llm.ground import sharding
from jaxrl_llm.ground.phases import phase
from jaxrl_llm.models import EXACT, Model, Router
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.sampling import Sampling
from jaxrl_llm.rollout.verification import VERIFIER, Judged, verify
from jaxrl_llm.tasks import Prompts, Task

RATES = ("greedy", "greedy_reward", "reward", "pass_at_1", "pass_at_k")  # behind "eval/", one number each
_CACHE = 2**31  # bytes of cache that answers of an evaluation may take on each device
WHOLE = Sampling(greedy_last=True)  # temperature 1 and no cut


def pass_at_k(correct: Sequence[int] | np.ndarray, samples: int, k: int) -> float:
    """Mean over prompts of 1 - C(n - c, k) / C(n, k), the unbiased estimator. Source: arXiv 2107.03374, eq. 1."""
    return float(np.mean([1 - math.comb(samples - int(c), k) / math.comb(samples, k) for c in correct]))


def evaluated_at_once(
    model: Model, prompts: int, samples: int, width: int, answer_length: int, slots: int, at_least: int
) -> int:
    """The number of answers that an evaluation decodes at once: `slots`, or with 0 as many as have a small cache.

    All are decoded at once where their cache is small on each device; otherwise those whose cache is, or `at_least`.
    """
    rows = prompts * (samples + 1)
    if slots:
        return min(slots, rows)

    def cache(rows: int, columns: int) -> int:
        shapes = jax.eval_shape(lambda: jax.tree.leaves(model.empty_cache(rows, columns)))
        shards = sharding.shards("rows", model.mesh) * sharding.shards("kv_heads", model.mesh)
        return sum(x.size * x.dtype.itemsize for x in shapes) // shards

    of_prompts = cache(prompts, width)  # a group shares its prompt; in turns every slot has one of its own
    if of_prompts + cache(rows, answer_length - 1) <= _CACHE:
        return rows
    return min(rows, max(at_least, rows * _CACHE // (of_prompts + cache(rows, width + answer_length - 1))))


def _by_name(judged: Mapping[str, np.ndarray], prompt: int) -> dict[str, Any]:
    """Return what the reward functions gave the greedy answer and the sampled ones."""
    given = {name: rewards[prompt].tolist() for name, rewards in judged.items()}
    return {
        "rewards": {name: one[-1] for name, one in given.items()},
        "sampled_rewards": {name: one[:-1] for name, one in given.items()},
    }


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """Evaluates parameters on fixed prompts with fixed keys: `samples` drawn answers to each and a greedy one.

    An answer is right when its reward is at least `task.solved`. Sampling is that of evaluations, whatever the training
    rollout uses, and computes in the model's own dtype, with `router`.
    """

    model: Model
    task: Task
    prompts: Prompts
    samples: int
    max_new_tokens: int
    slots: int = 0  # answers decoded at once, which bounds memory; 0 = all
    router: Router = EXACT
    sampling: Sampling = WHOLE

    def __call__(self, params: Any) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """({"eval/...": value}, one readable row per prompt)."""
        judged, texts = self._answered(params)
        rewards = judged.pop(VERIFIER)
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
        rates |= {f"eval/reward_{name}": float(given[:, :-1].mean()) for name, given in judged.items()}
        return rates, [
            {
                "prompt": prompt,
                "greedy": texts[i][-1],
                "reward": float(greedy[i]),
                "sampled": texts[i][:-1],
                "sampled_reward": sampled[i].tolist(),
                **(_by_name(judged, i) if judged else {}),
            }
            for i, prompt in enumerate(self.prompts["prompt"])
        ]

    def pass_rate(self, params: Any) -> float:
        """Sampled pass@1."""
        return float((self._answered(params)[0][VERIFIER][:, :-1] >= self.task.solved).mean())

    @property
    def places(self) -> np.ndarray:
        """The prompts of the rollout: the last is repeated until the devices divide its rows, or some would repeat the
        work of others."""
        group, shards, count = self.samples + 1, sharding.shards("rows", self.model.mesh), len(self.prompts["uid"])
        return np.minimum(np.arange(count + -count % (shards // math.gcd(shards, group))), count - 1)

    @property
    def batch(self) -> Prompts:
        """The prompts at their `places`."""
        given, places = dict[str, Any](self.prompts), self.places
        rows: Any = {name: given[name][places] for name in ("uid", "draw", "tokens", "lengths")}
        rows |= {name: [given[name][i] for i in places] for name in ("prompt", "answer", "row")}
        return Prompts(**rows)

    @property
    def engine(self) -> Engine:
        """The engine of the one rollout that an evaluation is."""
        shards = sharding.shards("rows", self.model.mesh)
        return Engine(
            self.model,
            self.sampling,
            self.samples + 1,
            self.max_new_tokens,
            self.task.tokenizer.end_ids,
            slots=-(-self.slots // shards) * shards,
            dtype=self.model.config.dtype,
            router=self.router,
            record_routing=False,
        )

    def traces(self, params: Any) -> list[jax.stages.Traced]:
        """The programs of an evaluation, for abstract parameters."""
        return [self.engine.trace(params, len(self.places), self.prompts["tokens"].shape[1])]

    def _answered(self, params: Any) -> tuple[dict[str, np.ndarray], list[list[str]]]:
        """Rewards by name, [prompts, samples + 1] each, and texts, the greedy answer last."""
        engine, count = self.engine, len(self.prompts["uid"])
        group, prepared = engine.group_size, engine.prepare(params)
        with phase("evaluating", count * group):
            texts, rewards, _ = self._judged(engine, prepared, self.batch)
            engine.release(prepared, params)
        by_prompt = {name: given.reshape(-1, group)[:count] for name, given in rewards.items()}
        return by_prompt, [texts[i : i + group] for i in range(0, count * group, group)]

    def _judged(self, engine: Engine, weights: Any, batch: Prompts) -> Judged:
        uids = batch["uid"].astype(np.uint32)
        out = engine.generate(weights, batch["tokens"], batch["lengths"], uids, jax.random.key(0))
        return verify(out, self.task, batch, engine.group_size)
