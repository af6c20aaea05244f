"""A policy that answers texts and chats, piece by piece as it samples."""

from collections.abc import Iterator, Sequence

import jax

from jaxrl_llm.ground.ranges import within
from jaxrl_llm.rollout.sampling import Sampling
from jaxrl_llm.rollout.streaming import Streamer, as_text
from jaxrl_llm.run.loaded import LoadedPolicy
from jaxrl_llm.tasks import Prompting, TextTokenizer


class Talker:
    """Answers to texts and chats, piece by piece; every answer has a seed of its own."""

    def __init__(self, policy: LoadedPolicy, sampling: Sampling, max_tokens: int | None = None, seed: int = 0):
        settings = None if policy.run is None else policy.run.settings
        self.tokenizer = policy.tokenizer
        self.prompting = Prompting() if settings is None else settings.task.prompting
        length = max_tokens if max_tokens is not None else 512 if settings is None else settings.answer_length
        within("--seed", seed, 0, 2**32 - 1)
        self._key, self._answers = jax.random.key(seed), 0
        self._streamer = Streamer(policy.model, sampling, length, policy.tokenizer.end_ids)
        self._params = self._streamer.prepare(policy.params)

    def answer(self, prompt: str) -> Iterator[str]:
        """The answer to a prompt, which is rendered as in the run's config."""
        return self._stream(self.prompting.text(self.tokenizer, prompt))

    def reply(self, messages: Sequence[dict[str, str]]) -> Iterator[str]:
        """The next message of a chat; the tokenizer must have a chat template."""
        assert isinstance(self.tokenizer, TextTokenizer)
        return self._stream(self.tokenizer.chat(messages, **self.prompting.chat_options))

    def _stream(self, text: str) -> Iterator[str]:
        uid, self._answers = self._answers, self._answers + 1
        return as_text(self._streamer.tokens(self._params, self.tokenizer.encode(text), self._key, uid), self.tokenizer)
