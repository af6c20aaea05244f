"""Environments of the package skyrl-gym, unmodified, on rows in its own form. Source: github.com/NovaSky-AI/SkyRL."""

import dataclasses
import importlib
import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from jaxrl_llm.ground.ranges import suggestion
from jaxrl_llm.tasks.base import Row, Task
from jaxrl_llm.tasks.jsonl import jsonl
from jaxrl_llm.tasks.messages import EARLIER, Message

_NO_SETTINGS: Mapping[str, Any] = {}


def skyrl_gym(
    *,
    env: str = "gsm8k_multi_turn",
    path: str = "",
    settings: Mapping[str, Any] = _NO_SETTINGS,
    turns: int = 5,
    prompt_length: int = 512,
    answer_length: int = 512,
    observation_length: int = 256,
    time_limit: float = 60.0,
) -> Task:
    """Play the environment `env` of skyrl-gym, in at most `turns` turns, on the rows of `path`.

    Rows are SkyRL's: "prompt" with messages, "reward_spec" with "ground_truth", and what the environment reads beside
    them. `settings` are the environment's own, such as {"db_path": "FOLDER"} of text2sql.
    """
    episodes = SkyRLEpisodes(env, json.dumps(dict(settings), sort_keys=True), turns)
    episodes.load()
    rows = jsonl(
        path=path,
        answer_field="reward_spec.ground_truth",
        prompt_length=prompt_length,
        answer_length=answer_length,
        time_limit=time_limit,
    )
    return dataclasses.replace(
        rows,
        name="skyrl_gym",
        environment=episodes,
        turns=turns,
        observation_length=observation_length,
        isolated=True,
        asks=f"Solve the tasks of skyrl-gym's {env} in {path}",
    )


@dataclasses.dataclass(frozen=True)
class SkyRLEpisodes:
    """Makes the episodes of one environment of skyrl-gym."""

    env: str
    settings: str  # JSON
    turns: int

    def load(self) -> None:
        """Import the library once, before processes are forked.

        Raises:
          ImportError: it is not installed.
          ValueError: it has no such environment.
        """
        try:
            library = importlib.import_module("skyrl_gym.envs.registration")
            importlib.import_module("skyrl_gym")
        except ImportError as error:
            raise ImportError("the task skyrl_gym needs its library; pip install 'jaxrl_llm[tasks]'") from error
        if self.env not in library.registry:
            known = sorted(library.registry)
            raise ValueError(
                f"skyrl_gym.env={self.env!r} is unknown{suggestion(self.env, known)}; there are {', '.join(known)}"
            )

    def __call__(self) -> "SkyRLEpisode":
        return SkyRLEpisode(self)


class SkyRLEpisode:
    """An episode. Its rewards come turn by turn, as the environment gives them."""

    def __init__(self, of: SkyRLEpisodes):
        self._of = of

    def init(self, row: Row) -> list[Message]:
        extras = {name: value for name, value in row.items() if name not in ("prompt", "answer", EARLIER)}
        extras["max_turns"] = self._of.turns
        settings = SimpleNamespace(**json.loads(self._of.settings))
        library = importlib.import_module("skyrl_gym")
        self._env = library.make(self._of.env, env_config=settings, extras=extras)
        given = [*row.get(EARLIER, ()), {"role": "user", "content": row["prompt"]}]
        begun, _ = self._env.init(list(given))
        return begun

    def step(self, answer: str) -> tuple[list[Message], float, bool]:
        said = self._env.step(answer)
        if said.get("postprocessed_action") not in (None, answer):
            raise ValueError(f"{self._of.env} rewrites answers, but what was sampled stays as it was")
        if not said["done"] and not said["observations"]:
            raise ValueError(f"{self._of.env} observes nothing and goes on")
        return said["observations"], float(said["reward"]), said["done"]

    def close(self) -> None:
        self._env.close()
