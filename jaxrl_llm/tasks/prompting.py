"""How the prompts of a task are presented to a model: plain, inside a template, or as a chat."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.tasks.tokenizers.text_tokenizer import TextTokenizer
from jaxrl_llm.tasks.tokenizers.tokenizer import Tokenizer

__all__ = ["Prompting"]

_PLACE = "{prompt}"


@dataclasses.dataclass(frozen=True)
class Prompting:
    """The text around every prompt.

    Args:
        template: text with `{prompt}` once, e.g. worked examples before it; other braces are literal.
        chat: wrap that in the model's chat template, up to where the model's answer begins.
        system: the system message of the chat; empty: none, or what the chat template writes by default.
        chat_options: other variables of the chat template, such as {"enable_thinking": False}.

    Raises:
        ValueError: `{prompt}` is not there once, or a field of the chat is set without a chat.
    """

    template: str = _PLACE
    chat: bool = False
    system: str = ""
    chat_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.template.count(_PLACE) != 1:
            raise ValueError(f"task.template={self.template!r} must hold {_PLACE} once, in place of the prompt")
        for field in ("system", "chat_options"):
            if getattr(self, field) and not self.chat:
                raise ValueError(
                    f"task.{field}={getattr(self, field)!r} is part of a chat; set task.chat=True or clear it"
                )

    def text(self, tokenizer: Tokenizer, prompt: str) -> str:
        """The text that the model continues with its answer.

        Raises:
            ValueError: chat=True with a tokenizer that has no chat template.
        """
        question = self.template.replace(_PLACE, prompt)
        if not self.chat:
            return (tokenizer.start if isinstance(tokenizer, TextTokenizer) else "") + question
        if not isinstance(tokenizer, TextTokenizer):
            raise ValueError(
                "task.chat=True needs a tokenizer with a chat template; set model.pretrained or task.tokenizer to a "
                "checkpoint that has one, or task.chat=False"
            )
        messages = [{"role": "system", "content": self.system}] if self.system else []
        return tokenizer.chat([*messages, {"role": "user", "content": question}], **self.chat_options)
