"""The text of a chat by the template of a checkpoint: a program of others, which runs in a worker process with limits
of time, of memory and of its output, and there in Jinja's sandbox."""

import functools
import json
import pickle
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from jaxrl_llm.ground.workers import DIED, TIMEOUT, Pool

_SECONDS, _GIBIBYTES, _LONGEST = 5.0, 1, 2**24  # a text of 2^24 characters
_POOL = Pool(1, _GIBIBYTES * 2**30)


def rendered(template: str, values: Mapping[str, Any]) -> str:
    """What the template writes with these variables.

    Raises:
        ValueError: what it or Jinja raises, or it takes longer than 5 s, more than 1 GiB, or writes more than 2^24
            characters.
    """
    (reply,) = _POOL.ask("the chat template", _WRITE, _SECONDS, [(template, dict(values))])
    memory = f"it needs more than {_GIBIBYTES} GiB of memory"
    words = {TIMEOUT: f"it takes longer than {_SECONDS:g} s", DIED: f"{memory}, or crashes", "MemoryError: ": memory}
    if reply.error:
        raise ValueError(words.get(reply.error) or re.sub("^(Template|Value)Error: ", "", reply.error))
    return reply.value


def write(template: str, values: Mapping[str, Any]) -> str:
    """`rendered`, in this process and without its limits of time and memory."""
    pieces, length = [], 0
    for piece in _compiled(template).generate(values):
        length += len(piece)
        if length > _LONGEST:
            raise ValueError(f"it writes more than {_LONGEST} characters")
        pieces.append(piece)
    return "".join(pieces)


_WRITE = pickle.dumps(write)


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> Any:
    """The template, which is untrusted, in Jinja's immutable sandbox."""
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

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment.from_string(template)
