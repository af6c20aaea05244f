"""Prompts and what answers to them are worth, on the host. In: a task's name and options, a tokenizer. Out: streams of
prompts, given answers and pairs, and a verifier. A new task is one small file: docs/tasks.md."""

from jaxrl_llm.ground.by_name import ByName
from jaxrl_llm.tasks.base import Example, Prompting, Row, Source, Task, Verify
from jaxrl_llm.tasks.data import (
    Prompts,
    PromptStream,
    all_prompts,
    batches,
    examples,
    prompts,
    supervised,
)
from jaxrl_llm.tasks.named_tasks import make, names, register
from jaxrl_llm.tasks.splits import data_name, default_data_dir
from jaxrl_llm.tasks.tokenizers.plain_tokenizers import (
    UNKNOWN,
    ByteTokenizer,
    CharTokenizer,
    PublishedTokenizer,
    Tokenizer,
)

_LATER = ByName(
    {
        "ToolEnvironment": "jaxrl_llm.tasks.environments.tool_calls",
        "TextTokenizer": "jaxrl_llm.tasks.tokenizers.text_tokenizer",
        "load_tokenizer": "jaxrl_llm.tasks.tokenizers.text_tokenizer",
    }
)
__getattr__ = _LATER.attribute

__all__ = [  # and what `_LATER` names
    "UNKNOWN",
    "ByteTokenizer",
    "CharTokenizer",
    "Example",
    "PromptStream",
    "Prompting",
    "Prompts",
    "PublishedTokenizer",
    "Row",
    "Source",
    "Task",
    "Tokenizer",
    "Verify",
    "all_prompts",
    "batches",
    "data_name",
    "default_data_dir",
    "examples",
    "make",
    "names",
    "prompts",
    "register",
    "supervised",
]
