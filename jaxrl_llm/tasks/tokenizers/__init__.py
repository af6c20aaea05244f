"""Text to tokens and back. In: a folder with tokenizer.json, a GGUF file, or an alphabet. Out: a `Tokenizer`, with
its chat template where there is one."""

from jaxrl_llm.tasks.tokenizers.plain_tokenizers import UNKNOWN, ByteTokenizer, CharTokenizer, Tokenizer
from jaxrl_llm.tasks.tokenizers.text_tokenizer import TextTokenizer, load_tokenizer
from jaxrl_llm.tasks.tokenizers.tokenizer_files import tokenizer_files, write_tokenizer

__all__ = [
    "UNKNOWN",
    "ByteTokenizer",
    "CharTokenizer",
    "TextTokenizer",
    "Tokenizer",
    "load_tokenizer",
    "tokenizer_files",
    "write_tokenizer",
]
