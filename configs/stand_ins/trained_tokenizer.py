"""A byte-level BPE that is trained on a few texts, for runs and tests that have no published tokenizer."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jaxrl_llm.run.tokenizer_files import tokenizer_files
from jaxrl_llm.tasks.tokenizers.chat_template import import_transformers
from jaxrl_llm.tasks.tokenizers.text_tokenizer import TextTokenizer, load_tokenizer

# ChatML: each message between <|im_start|>role and <|im_end|>, and before them the tools, as in Qwen's templates.
_CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    '<tool_call>{"name": ..., "arguments": {...}}</tool_call><|im_end|>\n{% endif %}'
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tokenizer(folder: str | Path, corpus: Iterable[str], vocab_size: int = 512) -> TextTokenizer:
    """Train a byte-level BPE on `corpus` and write its files; equal arguments write equal files.

    Digits are tokens of their own. `<|im_end|>` (id 2) and `<|endoftext|>` (id 0) end an answer. 3 special tokens and
    256 bytes are always there, so any other text can be encoded too; `vocab_size` is the most tokens in all.

    Raises:
        ImportError: transformers is not installed.
    """
    import_transformers()
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    special = {"pad_token": "<|endoftext|>", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}  # ids 0, 1, 2
    backend: Any = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special.values()),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(corpus, trainer)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in tokenizer_files(TextTokenizer(backend, (2, 0), _CHAT_TEMPLATE, special)).items():
        (folder / name).write_bytes(content)
    return load_tokenizer(folder)
