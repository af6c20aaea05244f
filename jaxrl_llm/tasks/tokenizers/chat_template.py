"""The text of a chat by the template of a checkpoint: a stranger's program, which runs in a worker process with limits
of time, of memory and of its output, and there in the sandbox of `transformers`."""

import os
import pickle
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jaxrl_llm.ground.worker_errors import DIED, TIMEOUT
from jaxrl_llm.ground.workers import Pool

_SECONDS, _GIBIBYTES, _LONGEST = 5.0, 1, 2**24  # a text of 2^24 characters
_POOL = Pool(1, _GIBIBYTES * 2**30)


def rendered(template: str, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any], day: str = "") -> str:
    """The text that the template writes.

    Args:
        values: its variables beside the messages.
        day: YYYY-MM-DD that the template takes for today; "": the present.

    Raises:
        ValueError: what it or Jinja raises, or it takes longer than 5 s, more than 1 GiB, or writes more than 2^24
            characters.
    """
    given = [{name: value for name, value in message.items() if value is not None} for message in messages]
    variables = {"tools": None, "documents": None, **values, "messages": given}
    (reply,) = _POOL.ask("the chat template", _WRITE, _SECONDS, [(template, variables, day)])
    memory = f"it needs more than {_GIBIBYTES} GiB of memory"
    words = {TIMEOUT: f"it takes longer than {_SECONDS:g} s", DIED: f"{memory}, or crashes", "MemoryError: ": memory}
    if reply.error:
        raise ValueError(words.get(reply.error) or re.sub("^(Template|Value)Error: ", "", reply.error))
    return reply.value


def import_transformers() -> Any:
    """Import what tokenizers and templates need, which takes seconds; without a word on torch, which they do not need.

    Raises:
        ImportError: transformers is not installed.
    """
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    try:
        import transformers
        from transformers.utils import chat_template_utils  # noqa: F401
    except ImportError as error:
        raise ImportError("the tokenizer of a checkpoint needs transformers; pip install 'jaxrl_llm[hf]'") from error
    return transformers


class _Write:
    """Render in this process, without the limits of time and memory."""

    load = staticmethod(import_transformers)

    def __call__(self, template: str, variables: Mapping[str, Any], day: str) -> str:
        compiled = import_transformers().utils.chat_template_utils._compile_jinja_template(template)
        today = datetime.fromisoformat(day) if day else datetime.now()
        compiled.globals["strftime_now"] = today.strftime
        pieces, length = [], 0
        for piece in compiled.generate(variables):
            length += len(piece)
            if length > _LONGEST:
                raise ValueError(f"it writes more than {_LONGEST} characters")
            pieces.append(piece)
        return "".join(pieces)


_WRITE = pickle.dumps(_Write())
