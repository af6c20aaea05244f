"""Rollouts of episodes that are asked for ahead of the step that trains on them."""

import dataclasses
from typing import ClassVar

from jaxrl_llm.training.episode_rollouts import EpisodeRollouts
from jaxrl_llm.training.rollouts import Rollouts
from jaxrl_llm.training.rollouts_ahead import RolloutsAhead


@dataclasses.dataclass(frozen=True)
class EpisodesAhead(EpisodeRollouts, RolloutsAhead):
    """A `Source` of episodes with a lag. After a resume the environments hear the answers that were in flight again."""

    at_once: ClassVar[type[Rollouts]] = EpisodeRollouts
