"""Prompts and what answers to them are worth, on the host. In: a task's name and options, a tokenizer. Out: streams of
prompts, given answers and pairs, and a verifier. A new task is one small file: docs/tasks.md."""

from jaxrl_llm.tasks import arithmetic, countdown, gsm8k, jsonl, modular, reasoning, sort  # noqa: F401 (they register)
from jaxrl_llm.tasks.base import Example, Prompting, Row, Source, Task, Verify, make, names, register
from jaxrl_llm.tasks.data import (
    PromptBatch,
    PromptStream,
    SupervisedBatch,
    SupervisedStream,
    all_prompts,
    batches,
    examples,
    prompts,
    supervised,
)
from jaxrl_llm.tasks.described import table
from jaxrl_llm.tasks.doubts import Hopeless, Survey, survey
from jaxrl_llm.tasks.splits import data_name, default_data_dir
from jaxrl_llm.tasks.tokenizers.plain_tokenizers import UNKNOWN, ByteTokenizer, CharTokenizer, Tokenizer
from jaxrl_llm.tasks.tokenizers.text_tokenizer import TextTokenizer, load_tokenizer
from jaxrl_llm.tasks.tokenizers.tokenizer_files import tokenizer_files, write_tokenizer

__all__ = [
    "UNKNOWN",
    "ByteTokenizer",
    "CharTokenizer",
    "Example",
    "Hopeless",
    "PromptBatch",
    "PromptStream",
    "Prompting",
    "Row",
    "Source",
    "SupervisedBatch",
    "SupervisedStream",
    "Survey",
    "Task",
    "TextTokenizer",
    "Tokenizer",
    "Verify",
    "all_prompts",
    "batches",
    "data_name",
    "default_data_dir",
    "examples",
    "load_tokenizer",
    "make",
    "names",
    "prompts",
    "register",
    "supervised",
    "survey",
    "table",
    "tokenizer_files",
    "write_tokenizer",
]
