"""Train a byte-level BPE tokenizer, for a model trained from scratch and for runs without a download."""

import json
from collections.abc import Iterable
from pathlib import Path

from jaxrl_llm.tasks.tokenizers.text_tokenizer import TextTokenizer, load_tokenizer

__all__ = ["CHAT_TEMPLATE", "write_tokenizer"]

# ChatML: each message between <|im_start|>role and <|im_end|>.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def write_tokenizer(
    folder: str | Path, corpus: Iterable[str], vocab_size: int = 512, chat_template: str = CHAT_TEMPLATE
) -> TextTokenizer:
    """Train a byte-level BPE on `corpus` and write it in the Hugging Face layout; equal arguments write equal files.

    Digits are tokens of their own. `<|im_end|>` (id 2) and `<|endoftext|>` (id 0) end an answer.

    Args:
        folder: gets tokenizer.json, tokenizer_config.json, chat_template.jinja and generation_config.json.
        corpus: texts; any other text can be encoded too.
        vocab_size: at most; 3 special tokens and 256 bytes are always there.

    Raises:
        ImportError: tokenizers is not installed.
    """
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError as error:
        raise ImportError("training a tokenizer needs tokenizers; pip install 'jaxrl_llm[hf]'") from error
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(_SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(corpus, trainer)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 8192,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
    ids = {"bos_token_id": 1, "eos_token_id": [2, 0], "pad_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(ids, indent=2), encoding="utf-8")
    return load_tokenizer(folder)
