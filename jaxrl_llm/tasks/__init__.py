"""Tasks: prompts, supervised answers and verifiers, on the host. See docs/tasks.md."""

from jaxrl_llm.tasks import arithmetic, countdown, modular, sort
from jaxrl_llm.tasks.base import Example, Task, check_range, make, names, register
from jaxrl_llm.tasks.data import (
    PromptBatch,
    PromptStream,
    SupervisedBatch,
    SupervisedStream,
    all_prompts,
    default_data_dir,
    examples,
    prompts,
    supervised,
)
from jaxrl_llm.tasks.splits import data_name
from jaxrl_llm.tasks.tokenizer import CharTokenizer

__all__ = [
    "CharTokenizer",
    "Example",
    "PromptBatch",
    "PromptStream",
    "SupervisedBatch",
    "SupervisedStream",
    "Task",
    "all_prompts",
    "arithmetic",
    "check_range",
    "countdown",
    "data_name",
    "default_data_dir",
    "examples",
    "make",
    "modular",
    "names",
    "prompts",
    "register",
    "sort",
    "supervised",
]
