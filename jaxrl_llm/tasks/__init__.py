"""Prompts and what answers to them are worth, on the host. In: a task's name and options, a tokenizer. Out: streams of
prompts, given answers and pairs, and a verifier. A new task is one small file: docs/tasks.md."""

from jaxrl_llm.tasks import arithmetic, countdown, gsm8k, jsonl, modular, reasoning, sort
from jaxrl_llm.tasks.base import Example, Row, Source, Task, Verify, make, names, register
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
from jaxrl_llm.tasks.prompting import Prompting
from jaxrl_llm.tasks.splits import data_name
from jaxrl_llm.tasks.tokenizers.text_tokenizer import TextTokenizer, load_tokenizer
from jaxrl_llm.tasks.tokenizers.tokenizer import UNKNOWN, ByteTokenizer, CharTokenizer, Tokenizer
from jaxrl_llm.tasks.tokenizers.train_tokenizer import write_tokenizer

__all__ = [
    "UNKNOWN",
    "ByteTokenizer",
    "CharTokenizer",
    "Example",
    "PromptBatch",
    "PromptStream",
    "Prompting",
    "Row",
    "Source",
    "SupervisedBatch",
    "SupervisedStream",
    "Task",
    "TextTokenizer",
    "Tokenizer",
    "Verify",
    "all_prompts",
    "arithmetic",
    "countdown",
    "data_name",
    "default_data_dir",
    "examples",
    "gsm8k",
    "jsonl",
    "load_tokenizer",
    "make",
    "modular",
    "names",
    "prompts",
    "reasoning",
    "register",
    "sort",
    "supervised",
    "write_tokenizer",
]
