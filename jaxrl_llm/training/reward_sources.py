"""The reward of an answer as a weighted sum of named sources, and what rewards carry from rollout to rollout."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from jaxrl_llm import objectives, tasks
from jaxrl_llm.ground import metrics as M
from jaxrl_llm.ground.array_typing import Array, Bool, PerAnswer
from jaxrl_llm.ground.ranges import at_least, at_least_zero
from jaxrl_llm.objectives.rewards import weighted_rewards


@dataclasses.dataclass(frozen=True)
class RewardConfig:
    """R = sum of weight * source over those of `weights`; the task's verifier is asked whatever its weight.

    verifier      the task's own reward
    overlong      DAPO's soft ramp, from 0 down to -1 over the last `overlong_cache` tokens
    length        tokens of the answer, EOS included: a negative weight is a cost for each
    missing_eos   -1 for an answer that is cut off; its weight is `missing_eos_penalty` (TRL's PPO). A reward model that
                  was trained on whole answers knows nothing of others
    reward_model  the score of the model in the DIR `reward_model`, without its mean at the start of the run
    """

    verifier_weight: float
    reward_model: str
    reward_model_weight: float
    overlong_cache: int
    overlong_weight: float
    length_weight: float
    missing_eos_penalty: float
    overlong_filter: bool

    def __post_init__(self) -> None:
        at_least("rewards.overlong_cache", self.overlong_cache, 0, "0 turns it off")
        at_least_zero("rewards.missing_eos_penalty", self.missing_eos_penalty)
        if not self.weights:
            raise ValueError(
                "rewards.verifier_weight=0 leaves nothing to learn from; give a source of rewards a weight, for "
                "example a model by rewards.reward_model=DIR"
            )

    @property
    def weights(self) -> dict[str, float]:
        """The sources that are summed, in the order of the sum."""
        sources = {
            "verifier": self.verifier_weight,
            "overlong": self.overlong_weight if self.overlong_cache else 0.0,
            "length": self.length_weight,
            "missing_eos": self.missing_eos_penalty,
            "reward_model": self.reward_model_weight if self.reward_model else 0.0,
        }
        return {name: weight for name, weight in sources.items() if weight}

    def rules(
        self,
        verified: Float[np.ndarray, "b"],
        lengths: Int[np.ndarray, "b"],
        truncated: Bool[np.ndarray, "b"],
        max_length: int,
    ) -> dict[str, Float[np.ndarray, "b"]]:
        """What is known on the host: the verifier, and the rules on the length that have a weight."""
        sources = {"verifier": verified}
        if "overlong" in self.weights:
            ramp = objectives.overlong_penalty(jnp.asarray(lengths), max_length=max_length, cache=self.overlong_cache)
            sources["overlong"] = np.asarray(ramp, np.float32)
        if "length" in self.weights:
            sources["length"] = lengths.astype(np.float32)
        if "missing_eos" in self.weights:
            sources["missing_eos"] = -truncated.astype(np.float32)
        return sources


def total_rewards(
    config: RewardConfig, sources: Mapping[str, Any], where: Bool[Array | np.ndarray, "b"]
) -> tuple[PerAnswer, dict[str, M.Metric]]:
    """(the weighted sum [b], metrics): `reward/NAME` of every source, `reward/NAME_weighted` of those that are summed,
    and `reward/total`, over the answers of `where`."""
    return _total(tuple(config.weights.items()), dict(sources), where)


@functools.partial(jax.jit, static_argnums=0)
def _total(
    weights: tuple[tuple[str, float], ...], sources: dict[str, PerAnswer], where: Bool[Array, "b"]
) -> tuple[PerAnswer, dict[str, M.Metric]]:
    total, metrics = weighted_rewards(sources, dict(weights), where=where)
    for name, weight in weights:
        metrics[f"reward/{name}_weighted"] = M.Mean.of(weight * sources[name], where)
    return total, metrics | {"reward/total": M.Mean.of(total, where)}


@dataclasses.dataclass
class RolloutStream:
    """The prompts of a run and what its rewards carry: all that a rollout depends on beside the policy and its number.

    kl_coef: of the KL inside the reward; the objective's `KlController` moves it.
    centre: what is subtracted from the reward model's scores: their mean over the first rollout, whose answers are
      those of the policy that the run starts from. None before it. A constant in the reward of every answer changes no
      comparison; without it a critic, which starts at 0, spends its first updates on the model's offset.
    """

    prompts: tasks.PromptStream
    kl_coef: float = 0.0
    centre: float | None = None

    def __iter__(self) -> "RolloutStream":
        return self

    def __next__(self) -> tasks.PromptBatch:
        return next(self.prompts)

    def centred(self, scores: PerAnswer) -> PerAnswer:
        """The reward model's scores without their centre, which the first call fixes."""
        if self.centre is None:
            self.centre = float(jnp.mean(scores))
        return scores - jnp.float32(self.centre)

    def get_state(self) -> dict[str, Any]:
        return {"prompts": self.prompts.get_state(), "kl_coef": self.kl_coef, "centre": self.centre}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self.prompts.set_state(state["prompts"])
        self.kl_coef, self.centre = state["kl_coef"], state["centre"]
