"""Episodes whose answers servers sample: every turn is a question whose prompt is the ids of all that was before it.

Servers have as many questions before them as `RemoteEngine.at_once`, of episodes that are at different turns.
"""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Integer

from jaxrl_llm.ground.array_typing import Key
from jaxrl_llm.rollout.answer_fields import Answer, Question
from jaxrl_llm.rollout.remote import Asked, Held, RemoteEngine, answer_seeds
from jaxrl_llm.rollout.rollout import Rollout
from jaxrl_llm.rollout.spread import Asking
from jaxrl_llm.tasks import Prompts, Task


class ServedEpisodes:
    """The episodes of one rollout on their way, with the methods of `EpisodeSlots`. Arguments as of `episodes.play`."""

    def __init__(self, engine: RemoteEngine, weights: Held, task: Task, prompts: Prompts, key: Key):
        self._engine, self._weights, self._length = engine, weights, task.row_length(engine.max_new_tokens)
        uids = jnp.asarray(prompts["draw"].astype(np.uint32))
        self._seeds = np.asarray(answer_seeds(key, uids, engine.group_size))
        self._asking = Asking(*engine.asking(weights))
        self._asked, self._turns = dict[int, Question](), np.zeros(len(self._seeds), np.int32)
        self._said = list[tuple[int, Question, Answer]]()

    def answered(self, wanted: Mapping[int, list[int]]) -> dict[int, list[int]]:
        """Return some of the answers that are wanted, as `EpisodeSlots.answered`."""
        engine = self._engine
        for i, context in wanted.items():
            seed = int(self._seeds[i])
            if self._turns[i]:
                (seed,) = np.random.SeedSequence([seed, self._turns[i]]).generate_state(1).tolist()
            self._turns[i] += 1
            self._asked[i] = engine.question(self._weights, context, seed, engine.max_new_tokens, engine.end_ids)
        self._asking.put({i: self._asked[i] for i in wanted})
        answers = self._asking.some() if self._asked else {}
        self._said += [(i, self._asked.pop(i), answer) for i, answer in answers.items()]
        return {i: answer.tokens.tolist() for i, answer in answers.items()}

    def rollout(self, lengths: Integer[np.ndarray, "b"], cut: Bool[np.ndarray, "b"]) -> Rollout:
        """Return the episodes. cut: ended by a bound."""
        arrays = self._engine.rows(self._weights, self._said, (len(cut), self._length))
        return self._engine.gathered(Asked(len(cut), arrays | {"truncated": cut}))
