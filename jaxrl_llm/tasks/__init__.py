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
from jaxrl_llm.tasks.text_tokenizer import TextTokenizer, load_tokenizer
from jaxrl_llm.tasks.tokenizer import UNKNOWN, CharTokenizer, Tokenizer
from jaxrl_llm.tasks.train_tokenizer import write_tokenizer

__all__ = [
    "UNKNOWN",
    "CharTokenizer",
    "Example",
    "PromptBatch",
    "PromptStream",
    "SupervisedBatch",
    "SupervisedStream",
    "Task",
    "TextTokenizer",
    "Tokenizer",
    "all_prompts",
    "arithmetic",
    "check_range",
    "countdown",
    "data_name",
    "default_data_dir",
    "examples",
    "load_tokenizer",
    "make",
    "modular",
    "names",
    "prompts",
    "register",
    "sort",
    "supervised",
    "write_tokenizer",
]
