"""The reading of an episode: first messages, the ids between two answers, and demonstrations.

First messages are what `init` says to a row; they stand in the place of the row's prompt. An environment is asked once
a row where prompts are read, and every episode of that row is compared with it.

Between two answers stand what ends the first, the observation, and what begins the second. An observation is encoded
once, and what was sampled goes back as the ids that were sampled: text that is decoded and encoded again may be other
ids.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from jaxrl_llm.ground.by_name import ByName
from jaxrl_llm.tasks.base import Example, Row, Task, TooLong, bounded
from jaxrl_llm.tasks.environments.environment import DEMONSTRATION, Ask, Observation, Step, here, row_of, text_of
from jaxrl_llm.tasks.messages import EARLIER, GIVEN, Message
from jaxrl_llm.tasks.tokenizers.plain_tokenizers import PublishedTokenizer

_AT_ONCE = 64  # rows whose environments are open together
_ANSWER = "Aq7Zx"  # stands for an answer, and occurs in no template
_THOUGHT = "Tq7Zx"
_IN_WORKERS = ByName({"apart": "jaxrl_llm.tasks.environments.isolated_episodes"})


def opened(task: Task) -> Ask:
    """Return a function that plays episodes in this process, or in processes of their own if the task is isolated."""
    make: Any = task.environment
    return _IN_WORKERS["apart"](task, make) if task.isolated else here(make)


def begun(task: Task, examples: Sequence[Example]) -> list[tuple[Example, str]]:
    """Return each example as an episode of it begins, and why an episode cannot begin so ("": it can).

    The prompt and the earlier messages of an example are what `init` has returned. An example whose `init` returned
    None, or has failed, stays as it is.
    """
    ask, found = opened(task), list[tuple[Example, str]]()
    for first in range(0, len(examples), _AT_ONCE):
        some = examples[first : first + _AT_ONCE]
        steps = ask("init", {i: row_of(one) for i, one in enumerate(some)})
        ask("close", {i: None for i, step in steps.items() if not step.error})
        for one, step in zip(some, steps.values(), strict=True):
            new = _with(one, step.observation)
            found.append((new, step.error or ("" if new is one else _unreadable(task, new["prompt"], new["row"]))))
    return found


def fault(task: Task, example: Mapping[str, Any], step: Step) -> str:
    """Return why an episode of the example whose `init` said so is over, or "".

    The example's messages are those that the model has read.
    """
    *earlier, last = said = _messages(row_of(example), step.observation)
    if step.error or said == _messages({**example["row"], "prompt": example["prompt"]}):
        return step.error
    differs = f"init returned {last['content']!r:.60}, and something else before; let it follow from the row alone"
    return _unreadable(task, last["content"], {EARLIER: earlier}) or differs


def _unreadable(task: Task, prompt: str, row: Row) -> str:
    """Return why a prompt that an environment has said cannot be read, or ""."""
    try:
        bounded("prompt", prompt, task.ids_of_prompt(prompt, row), task.prompt_length)
    except ValueError as error:
        return f"what init returned cannot be read: {error}"[:500]
    return ""


def as_read(task: Task, drawn: Sequence[tuple[str, str, Row]]) -> list[tuple[str, str, Row]]:
    """Return (prompt, right answer, row) of examples as their episodes begin."""
    examples = [Example(uid=0, prompt=prompt, answer=answer, row=row) for prompt, answer, row in drawn]
    return [(one["prompt"], one["answer"], one["row"]) for one, _ in begun(task, examples)]


def _messages(row: Mapping[str, Any], said: Any = "") -> list[Message]:
    """Return what `init` said, or where that is nothing the earlier messages of a row and its prompt."""
    return [*said] or [*row.get(EARLIER, ()), {"role": "user", "content": row["prompt"]}]


def _with(example: Example, said: Any) -> Example:
    *earlier, last = messages = _messages(row_of(example), said)
    if messages == _messages(row_of(example)):
        return example
    row = {name: value for name, value in example["row"].items() if name != EARLIER}
    row |= ({EARLIER: earlier} if earlier else {}) | {GIVEN: row_of(example)}
    return Example(uid=example["uid"], prompt=last["content"], answer=example["answer"], row=row)


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


def demonstrated(task: Task, examples: Sequence[Example], length: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return the ids of each episode, and for each 1 where it is learnt and 0 where it is read.

    The episode is `row["demonstration"]` of an example, or its right answer where there is none.

    Raises:
      TooLong: an episode has more than `length` tokens, or a prompt more than its bound.
      ValueError: the environment of an example does not begin.
    """
    between, episodes, learnt = Continuation(task), [], []
    for example, why in begun(task, examples):
        text = example["prompt"]
        if why:
            raise ValueError(f"the environment of task {task.name!r} does not begin with {text!r:.60}: {why}; mend it")
        prompt = bounded("prompt", text, task.ids_of_prompt(text, example["row"]), task.prompt_length)
        said = example["row"].get(DEMONSTRATION) or [example["answer"]]
        ids, mask = list(prompt), [0] * len(prompt)
        for i, text in enumerate(said):
            more = between.ids(text, ended=True) if i % 2 else task.ids_of_answer(text)
            ids, mask = ids + more, mask + [1 - i % 2] * len(more)
        if len(ids) > length:
            raise TooLong(f"the demonstration of {example['prompt']!r:.60} has {len(ids)} tokens, over {length}")
        episodes.append(ids)
        learnt.append(mask)
    return episodes, learnt
