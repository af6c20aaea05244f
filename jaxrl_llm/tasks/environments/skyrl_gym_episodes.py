"""Environments of the package skyrl-gym, unmodified, on rows in its own form. Source: github.com/NovaSky-AI/SkyRL."""

import dataclasses
import functools
import importlib
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
    _require(env)
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
        environment=functools.partial(SkyRLEpisode, env, dict(settings), turns),
        turns=turns,
        observation_length=observation_length,
        isolated=True,
        asks=f"Solve the tasks of skyrl-gym's {env} in {path}",
    )


def _require(env: str) -> None:
    """Import the library.

    Raises:
      ImportError: it is not installed.
      ValueError: it has no such environment.
    """
    try:
        library = importlib.import_module("skyrl_gym.envs.registration")
    except ImportError as error:
        raise ImportError("the task skyrl_gym needs its library; pip install 'jaxrl_llm[tasks]'") from error
    if env not in library.registry:
        known = sorted(library.registry)
        raise ValueError(f"skyrl_gym.env={env!r} is unknown{suggestion(env, known)}; there are {', '.join(known)}")


class SkyRLEpisode:
    """An episode of `env`. Its rewards come turn by turn, as the environment gives them."""

    def __init__(self, env: str, settings: Mapping[str, Any], turns: int):
        self._name, self._settings, self._turns = env, settings, turns
        self._library = importlib.import_module("skyrl_gym")

    def init(self, row: Row) -> list[Message]:
        extras = {name: value for name, value in row.items() if name not in ("prompt", "answer", EARLIER)}
        extras["max_turns"] = self._turns
        settings = SimpleNamespace(**self._settings)
        self._env = self._library.make(self._name, env_config=settings, extras=extras)
        given = [*row.get(EARLIER, ()), {"role": "user", "content": row["prompt"]}]
        begun, _ = self._env.init(given)
        return begun

    def step(self, answer: str) -> tuple[list[Message], float, bool]:
        said = self._env.step(answer)
        if said.get("postprocessed_action") not in (None, answer):
            raise ValueError(f"{self._name} rewrites answers, but what was sampled stays as it was")
        if not said["done"] and not said["observations"]:
            raise ValueError(f"{self._name} observes nothing and goes on")
        return said["observations"], float(said["reward"]), said["done"]

    def close(self) -> None:
        self._env.close()
