"""Rollouts of episodes: a group is the episodes of one prompt, and the reward of one is the sum over its turns."""

import dataclasses
import functools
from typing import Any, ClassVar, cast

import jax
import numpy as np

from jaxrl_llm import tasks
from jaxrl_llm.ground import sharding
from jaxrl_llm.rollout.episode_slots import traces
from jaxrl_llm.rollout.episodes import Table, heard_again, play
from jaxrl_llm.rollout.rollout import Rollout
from jaxrl_llm.training import collect
from jaxrl_llm.training.rollouts import Rollouts
from jaxrl_llm.training.rollouts_ahead import RolloutsAhead


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

    def traces(self, params: Any, width: int) -> list[jax.stages.Traced]:
        return traces(self.engine, params, self.task, self.prompts, width)

    def _answered(self, weights: Any, batch: tasks.Prompts, step: int, moved: dict[str, float]) -> collect.Draw:
        return self._judged_by(*play(self.engine, weights, self.task, batch, self._key(step)), batch, moved)

    def _verifying(self, answers: Rollout, batch: tasks.Prompts, moved: dict[str, float]) -> collect.Draw:
        """Sampled before a resume: the environments hear them again."""
        return self._judged_by(*heard_again(answers, self.engine, self.task, batch), batch, moved)

    def _judged_by(self, rollout: Rollout, table: Table, batch: tasks.Prompts, moved: dict[str, float]) -> collect.Draw:
        gamma, episodes, engine = self.rewards.turn_gamma, table.episodes, cast(Any, self.engine)
        host = moved | {
            "rollout/turns_mean": float(np.mean([len(one.turns) for one in episodes])),
            "rollout/episode_length_mean": float(np.mean([len(one.context) for one in episodes])),
            "time/environment_s": table.seconds,
        }
        lengths = np.asarray([sum(map(len, one.places)) for one in episodes])
        asked = (batch, (lengths, table.cut, functools.partial(table.judged, gamma)))
        # What `RewardConfig` makes of the verifier's reward, as far as that is a factor of it.
        factor = 0.0 if self.rewards.normalize else self.rewards.verifier_weight * self.rewards.scale
        earlier = np.float32(factor) * table.earlier_rewards(gamma, rollout.tokens.shape[1])
        rollout = rollout.replace(earlier_rewards=sharding.put_rows(earlier, engine.rows_on))
        return collect.Draw(rollout, host=host, asked=[asked], kept=len(batch["prompt"]))


@dataclasses.dataclass(frozen=True)
class EpisodesAhead(EpisodeRollouts, RolloutsAhead):
    """A `Source` of episodes with a lag. After a resume the environments hear the answers that were in flight again."""

    at_once: ClassVar[type[Rollouts]] = EpisodeRollouts
