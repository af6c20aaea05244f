"""Rollouts of episodes: a group is the episodes of one prompt, and the reward of one is the sum over its turns."""

import dataclasses
from typing import Any

import jax
import numpy as np

from jaxrl_llm import tasks
from jaxrl_llm.ground import sharding
from jaxrl_llm.rollout.episode_slots import traces
from jaxrl_llm.rollout.episodes import Played, heard_again, play
from jaxrl_llm.rollout.rollout import Rollout
from jaxrl_llm.training import collect
from jaxrl_llm.training.rollouts import Rollouts


@dataclasses.dataclass(frozen=True)
class EpisodeRollouts(Rollouts):
    """A `Source` of episodes that an environment judges.

    Raises:
      ValueError: several processes train one run.
    """

    def __post_init__(self) -> None:
        if jax.process_count() > 1:
            raise ValueError(
                f"task.name={self.task.name!r} is played over several turns, which one process does; start one process"
            )

    @property
    def longest(self) -> int:
        return self.engine.max_new_tokens * self.task.turns

    @property
    def behind(self) -> int:
        return self.longest + self.task.observation_length * (self.task.turns - 1)

    def traces(self, params: Any, width: int) -> list[jax.stages.Traced]:
        engine: Any = self.engine
        return traces(engine, params, self.task, self.prompts, width)

    def _answered(self, weights: Any, batch: tasks.Prompts, step: int, moved: dict[str, float]) -> collect.Draw:
        engine: Any = self.engine
        return self._judged_by(play(engine, weights, self.task, batch, self._key(step)), batch, moved)

    def _verifying(self, answers: Rollout, batch: tasks.Prompts, moved: dict[str, float]) -> collect.Draw:
        """Sampled before a resume: the environments hear them again."""
        engine: Any = self.engine
        return self._judged_by(heard_again(answers, engine, self.task, batch), batch, moved)

    def _judged_by(self, played: Played, batch: tasks.Prompts, moved: dict[str, float]) -> collect.Draw:
        played = played.discounted(self.rewards.turn_gamma)
        lengths = np.asarray([one.sampled for one in played.episodes])
        host = moved | {
            "rollout/turns_mean": played.turns,
            "rollout/episode_length_mean": float(np.mean([len(one.context) for one in played.episodes])),
            "time/environment_s": played.seconds,
        }
        cut = np.asarray([one.cut for one in played.episodes])
        asked = (batch, (lengths, cut, lambda: played.judged))
        # What `RewardConfig` makes of the verifier's reward, as far as that is a factor of it.
        factor = 0.0 if self.rewards.normalize else self.rewards.verifier_weight * self.rewards.scale
        engine: Any = self.engine
        earlier = sharding.put_rows(np.float32(factor) * played.earlier_rewards, engine.rows_on)
        return collect.Draw(
            played.rollout.replace(earlier_rewards=earlier), host=host, asked=[asked], kept=len(batch["prompt"])
        )
