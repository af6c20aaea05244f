"""Episodes of several turns: the engine answers, an environment observes, and both stay in one row of tokens.

Episodes are at different turns: what a sampler has answered goes to the environments while others go on.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from jaxrl_llm.ground import processes, sharding
from jaxrl_llm.ground.array_typing import Key
from jaxrl_llm.ground.by_name import ByName
from jaxrl_llm.rollout.episode_slots import EpisodeSlots
from jaxrl_llm.rollout.rollout import Rollout
from jaxrl_llm.rollout.verification import VERIFIER, Judged
from jaxrl_llm.tasks import Prompts, Task
from jaxrl_llm.tasks.environments.environment import Observation, Step, row_of, text_of
from jaxrl_llm.tasks.environments.reading import Continuation, fault, opened

ByEpisode = Mapping[int, list[int]]  # tokens by the number of their episode

_ON_SERVERS = ByName({"ServedEpisodes": "jaxrl_llm.rollout.served_episodes"})


@dataclasses.dataclass
class Episode:
    """One episode on the host. context: the ids of its prompt, its answers and the observations between them."""

    context: list[int]
    turns: list[tuple[str, Step]] = dataclasses.field(default_factory=list)  # answers, and what was said to them
    places: list[range] = dataclasses.field(default_factory=list)  # of each answer in the context
    error: str = ""  # why the environment ended it, with a reward of 0
    cut: bool = False  # ended by a bound on tokens or turns, and not by the environment

    def rewards(self, gamma: float = 1.0) -> list[float]:
        """The reward of each turn, that of turn k times gamma^(k - 1); 0 where the environment has failed."""
        return [0.0 if self.error else gamma**k * step.reward for k, (_, step) in enumerate(self.turns)]

    @property
    def reward(self) -> float:
        return sum(self.rewards())

    @property
    def dialogue(self) -> str:
        """The answers, each on a line, and behind "> " what was observed between them."""
        said = [f"{answer}\n> {text_of(step.observation)}\n" for answer, step in self.turns[:-1]]
        return "".join([*said, *(answer for answer, _ in self.turns[-1:])])


def play(engine: Any, weights: Any, task: Task, prompts: Prompts, key: Key) -> tuple[Rollout, "Table"]:
    """`engine.group_size` episodes for every prompt, each to its end or to a bound: as a rollout, and on the host.

    Those of one turn are the rollout of single answers, with its bits.

    Args:
      engine: an `Engine`, or a `RemoteEngine`.
      weights: from `engine.take_weights`.

    Raises:
      ValueError: an isolated environment cannot be loaded in a process; or what `engine.generate` raises.
    """
    if task.turns == 1:
        given = prompts["tokens"], prompts["lengths"], prompts["draw"].astype(np.uint32)
        return heard_again(engine.generate(weights, *given, key), engine, task, prompts)
    slots = (_ON_SERVERS["ServedEpisodes"] if engine.remote else EpisodeSlots)(engine, weights, task, prompts, key)
    table = converse(slots.answered, engine, task, prompts)
    return slots.rollout(np.asarray([len(one.context) for one in table.episodes], np.int32), table.cut), table


def heard_again(rollout: Rollout, engine: Any, task: Task, prompts: Prompts) -> tuple[Rollout, "Table"]:
    """Episodes whose answers were sampled before; an environment that says the same twice ends them as it did."""
    left = list[list[np.ndarray]]()
    for tokens, mask in zip(*processes.fetch((rollout.tokens, rollout.loss_mask)), strict=True):
        ids = tokens[mask]
        last = np.isin(ids, engine.end_ids) | (np.diff(np.flatnonzero(mask), append=0) != 1)
        left.append(np.split(ids, np.flatnonzero(last)[:-1] + 1))

    def answered(wanted: ByEpisode) -> ByEpisode:
        return {i: left[i].pop(0).tolist() for i in wanted if left[i]}

    table = converse(answered, engine, task, prompts)
    return rollout.replace(truncated=sharding.put_rows(table.cut, engine.rows_on or engine.model.mesh)), table


def converse(answered: Callable[[ByEpisode], ByEpisode], engine: Any, task: Task, prompts: Prompts) -> "Table":
    """Let a policy and environments speak until all episodes are over; answered: as of `EpisodeSlots`."""
    table = Table(task, prompts, engine.group_size, engine.max_new_tokens, engine.end_ids)
    wanted = {i: one.context for i, one in enumerate(table.episodes)}
    while answers := answered(wanted):
        wanted = table.after(answers)
    return table


class Table:
    """The episodes of one rollout in (prompt, sample) order, their environments, and the seconds that these took."""

    def __init__(self, task: Task, prompts: Prompts, group: int, most: int, end_ids: tuple[int, ...]):
        self.task, self.end_ids, self.seconds = task, end_ids, 0.0
        self.width = task.row_length(most) - most  # most tokens of the context of an answer
        self.between, self.open = Continuation(task), opened(task)
        held = zip(prompts["tokens"], prompts["lengths"], strict=True)
        self.episodes = [Episode(tokens[:n].tolist()) for tokens, n in held for _ in range(group)]
        places = range(len(prompts["prompt"]))
        examples = [{name: prompts[name][k] for name in ("prompt", "answer", "row")} for k in places]
        begun = self._ask("init", {i: row_of(examples[i // group]) for i in range(len(self.episodes))})
        for i, step in begun.items():
            self.episodes[i].error = fault(task, examples[i // group], step)

    @property
    def cut(self) -> Bool[np.ndarray, "b"]:
        return np.asarray([one.cut for one in self.episodes])

    def judged(self, gamma: float = 1.0) -> Judged:
        """Dialogues, rewards over all turns and errors, as the verifier of single answers gives them."""
        rewards = np.asarray([sum(one.rewards(gamma)) for one in self.episodes], np.float32)
        errors = [{VERIFIER: one.error} if one.error else {} for one in self.episodes]
        return [one.dialogue for one in self.episodes], {VERIFIER: rewards}, errors

    def earlier_rewards(self, gamma: float, length: int) -> Float[np.ndarray, "b t"]:
        """Rewards of all turns but the last, at the tokens that end them, in rows of so many tokens."""
        placed = np.zeros((len(self.episodes), length), np.float32)
        for row, one in zip(placed, self.episodes, strict=True):
            row[[place[-1] for place in one.places[:-1]]] = one.rewards(gamma)[:-1]
        return placed

    def _ask(self, what: str, given: dict[int, Any]) -> dict[int, Step]:
        began = time.monotonic()
        steps = self.open(what, given) if given else {}
        self.seconds += time.monotonic() - began
        return steps

    def after(self, answers: ByEpisode) -> dict[int, list[int]]:
        """Return the contexts of those episodes that go on after these answers."""
        texts, on = {i: self.task.tokenizer.decode(ids) for i, ids in answers.items()}, dict[int, list[int]]()
        ends = {i: ids[-1] in self.end_ids for i, ids in answers.items()}
        heard = [i for i in answers if not self.episodes[i].error and (ends[i] or self.task.verify_truncated)]
        seen = {i: texts[i] for i in heard}
        for i, step in ({i: Step() for i in answers} | self._ask("step", seen)).items():
            episode, ended = self.episodes[i], ends[i]
            episode.turns.append((texts[i], step))
            episode.places.append(range(len(episode.context), len(episode.context) + len(answers[i])))
            episode.context = [*episode.context, *answers[i]]
            episode.error, episode.cut = episode.error or step.error, i not in seen and not ended
            if not step.done and self._observed(episode, step.observation, ended):
                on[i] = episode.context
        self._ask("close", {i: None for i in answers if i not in on})
        return on

    def _observed(self, episode: Episode, observation: Observation, ended: bool) -> bool:
        """Put an observation behind the last answer; returns whether the episode goes on."""
        if len(episode.turns) == self.task.turns:
            episode.cut = True
            return False
        try:
            ids, most = self.between.ids(observation, ended), self.task.observation_length
            if len(ids) > most:
                raise ValueError(f"it has {len(ids)} tokens, over observation_length={most}")
        except ValueError as error:
            episode.error = f"the observation {text_of(observation)!r:.60} cannot be read: {error}"[:500]
            return False
        if len(episode.context) + len(ids) > self.width:
            episode.cut = True
            return False
        episode.context = [*episode.context, *ids]
        return True
