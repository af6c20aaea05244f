"""The ids between two answers: what ends the first, the observation, and what begins the second.

An observation is encoded once, and what was sampled goes back as the ids that were sampled: text that is decoded and
encoded again may be other ids.
"""

from collections.abc import Sequence
from typing import cast

from jaxrl_llm.tasks.base import Task
from jaxrl_llm.tasks.environments.environment import Observation, text_of
from jaxrl_llm.tasks.messages import Message
from jaxrl_llm.tasks.tokenizers.plain_tokenizers import PublishedTokenizer

_ANSWER = "Aq7Zx"  # stands for an answer, and occurs in no template
_THOUGHT = "Tq7Zx"


class Continuation:
    """The continuation that a task's tokenizer, and its chat template if it has one, put after an answer."""

    def __init__(self, task: Task):
        self.task, self._found = task, dict[object, list[int]]()

    def ids(self, observation: Observation, ended: bool) -> list[int]:
        """The ids that follow an answer, up to where the next one begins.

        The id that ends an answer is encoded with the rest, since a tokenizer may join the two, and then dropped if the
        answer has `ended` with one of its own.

        Raises:
          ValueError: the observation has characters that the tokenizer lacks, or a role that the chat template lacks.
        """
        if self.task.prompting.chat:
            given = [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
            key = tuple((one["role"], one["content"]) for one in given)
            if key not in self._found:
                self._found[key] = self._in_chat(given)
            return self._found[key][ended:]
        return [*([] if ended else self.task.tokenizer.end_ids[:1]), *self.task.tokenizer.encode(text_of(observation))]

    def _in_chat(self, messages: Sequence[Message]) -> list[int]:
        tokenizer = self.task.tokenizer
        follows = self._rendered(_ANSWER, messages).partition(_ANSWER)[2]
        ids = tokenizer.encode(follows)
        if not ids or ids[0] not in tokenizer.end_ids:
            raise ValueError(
                f"the chat template writes {follows[:40]!r} after an answer, which begins with none of the ids that "
                f"end one ({tokenizer.end_ids}); use another template"
            )
        lost = [one["content"] for one in messages if one["content"].strip() not in follows]
        if lost:
            raise ValueError(f"the chat template drops the observation {lost[0]!r:.60}; give it another role")
        return ids

    def check(self) -> None:
        """Find the continuation once.

        Raises:
          ValueError: the chat template has none, or it rewrites earlier turns: drops their thoughts, or writes the last
            answer in another way. The model would then read other tokens than those that it has learnt to read.
        """
        if not self.task.prompting.chat:
            return
        said = [{"role": "tool" if self.task.tools else "user", "content": "Go on."}]
        self._in_chat(said)
        if self.task.keep_turns:
            return
        before = self._rendered(_ANSWER, said).partition(_ANSWER)[0]
        alone = self._rendered(_ANSWER, []).partition(_ANSWER)[0]
        thoughtful = self._rendered(f"<think>\n{_THOUGHT}\n</think>\n\n{_ANSWER}", said)
        if before != alone or _THOUGHT not in thoughtful:
            what = "drops the thoughts of earlier turns" if before == alone else "writes the last turn in another way"
            raise ValueError(
                f"task.chat=True: the chat template {what}, and an episode keeps every token as it was sampled; set "
                "task.keep_turns=True if the model may read its earlier turns so, or use another template"
            )

    def _rendered(self, answer: str, messages: Sequence[Message]) -> str:
        prompting, tokenizer = self.task.prompting, cast(PublishedTokenizer, self.task.tokenizer)
        begin = [{"role": "user", "content": "Begin."}, {"role": "assistant", "content": answer}]
        system = [{"role": "system", "content": prompting.system}] if prompting.system else []
        options = {**prompting.chat_options, "add_generation_prompt": bool(messages)}
        text = tokenizer.chat([*system, *begin, *messages], **options)
        if text.count(_ANSWER) != 1:
            raise ValueError("task.chat=True: the chat template does not write an answer once; use another template")
        return text
