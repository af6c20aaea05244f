"""Chat templates: from messages to the text that a published model was trained to continue."""

import functools
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

__all__ = ["render"]

Message = Mapping[str, Any]


def render(
    template: str,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    special_tokens: Mapping[str, str] | None = None,
    **options: Any,
) -> str:
    """The text of a chat, equal to what transformers' `apply_chat_template(tokenize=False)` gives.

    Args:
        template: Jinja source, as a checkpoint publishes it. It is untrusted and runs in Jinja's immutable sandbox.
        messages: {"role": ..., "content": ...} each.
        add_generation_prompt: end with the header of an answer, so that the model answers.
        special_tokens: bos_token, eos_token and the like, which templates name.
        options: other variables of the template, such as `enable_thinking`.

    Raises:
        ValueError: the template refuses the messages or has an error.
        ImportError: jinja2 is not installed.
    """
    try:
        import jinja2
    except ImportError as error:
        raise ImportError("chat templates need jinja2; pip install 'jaxrl_llm[hf]'") from error
    values = {"tools": None, "documents": None, **(special_tokens or {}), **options}
    try:
        return _compiled(template).render(
            messages=[dict(message) for message in messages], add_generation_prompt=add_generation_prompt, **values
        )
    except jinja2.TemplateError as error:
        shown = [f"{message.get('role')}: {str(message.get('content'))[:40]!r}" for message in messages]
        raise ValueError(
            f"the chat template refuses the messages {shown} ({error}); change task.system, task.chat_options or "
            "set task.chat=False"
        ) from error


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> Any:
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` marks what an assistant wrote; here its body is rendered unchanged."""

        tags = {"generation"}  # noqa: RUF012 (as Jinja declares it)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:  # Jinja's own escapes HTML
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def strftime_now(format: str) -> str:
        return datetime.now().strftime(format)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return environment.from_string(template)
