"""Text of a policy, piece by piece as it is sampled."""

from collections.abc import Iterator, Sequence

import jax

from jaxrl_llm.ground.by_name import ByName
from jaxrl_llm.ground.ranges import within
from jaxrl_llm.rollout.sampling import Sampling
from jaxrl_llm.rollout.streaming import Streamer, as_text
from jaxrl_llm.run.loaded import LoadedPolicy
from jaxrl_llm.tasks import Prompting, PublishedTokenizer

_EPISODES = ByName({"dialogue": "jaxrl_llm.run.episode_dialogue"})


class TextGenerator:
    """Answers to texts and chats, piece by piece; every answer has a seed of its own."""

    def __init__(self, policy: LoadedPolicy, sampling: Sampling, max_tokens: int | None = None, seed: int = 0):
        settings = self._settings = None if policy.run is None else policy.run.settings
        self.tokenizer = policy.tokenizer
        self.prompting = Prompting() if settings is None else settings.task.prompting
        length = max_tokens if max_tokens is not None else 512 if settings is None else settings.answer_length
        within("--seed", seed, 0, 2**32 - 1)
        self._key, self._answers = jax.random.key(seed), 0
        self._streamer = Streamer(policy.model, sampling, length, policy.tokenizer.end_ids)
        self._params = self._streamer.prepare(policy.params)

    def answer(self, prompt: str) -> Iterator[str]:
        """The answer to a prompt, which is rendered as in the run's config."""
        return self._stream(self.prompting.ids(self.tokenizer, prompt))

    def reply(self, messages: Sequence[dict[str, str]]) -> Iterator[str]:
        """The next message of a chat; the tokenizer must have a chat template."""
        assert isinstance(self.tokenizer, PublishedTokenizer)
        text = self.tokenizer.chat(messages, **self.prompting.chat_options)
        return self._stream(self.tokenizer.encode(text))

    def episode(self, number: int) -> Iterator[str]:
        """The episode of held-out prompt `number` as a dialogue.

        Raises:
          ValueError: there is no DIR, or its task has no environment or no such prompt.
        """
        if self._settings is None:
            raise ValueError(f"--episode={number} needs a task with an environment; give the --workdir of its run")
        task, data_dir = self._settings.task, self._settings.data_dir
        return _EPISODES["dialogue"](task, data_dir, number, self._streamer.max_new_tokens, self._tokens)

    def _stream(self, prompt: list[int]) -> Iterator[str]:
        return as_text(self._tokens(prompt), self.tokenizer)

    def _tokens(self, prompt: list[int]) -> Iterator[int]:
        uid, self._answers = self._answers, self._answers + 1
        return self._streamer.tokens(self._params, prompt, self._key, uid)
