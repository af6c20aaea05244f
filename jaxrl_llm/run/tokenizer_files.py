"""Tokenizers as the files of the Hugging Face layout: of any tokenizer of this package."""

import json
from typing import Any

from jaxrl_llm.tasks.tokenizers.chat_template import import_transformers
from jaxrl_llm.tasks.tokenizers.plain_tokenizers import ByteTokenizer, CharTokenizer, Tokenizer
from jaxrl_llm.tasks.tokenizers.text_tokenizer import TextTokenizer

_PAD, _END = "<|pad|>", "<|end|>"  # ids 0 and 1 of the tokenizers of characters and bytes


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """tokenizer.json, tokenizer_config.json, generation_config.json with every end id, and a chat template if any.

    A Hugging Face tokenizer that reads these files gives the same ids.

    Raises:
        ValueError: a user's own tokenizer class, which has no such form.
        ImportError: transformers is not installed.
    """
    if isinstance(tokenizer, CharTokenizer | ByteTokenizer):
        tokenizer = _of_pieces(tokenizer)
    if not isinstance(tokenizer, TextTokenizer):
        raise ValueError(
            f"{type(tokenizer).__name__} has no tokenizer.json; write its files into the folder by other means, or "
            "train with a tokenizer of tasks.load_tokenizer"
        )
    special, backend = tokenizer.special_tokens, tokenizer.backend
    generation: dict[str, Any] = {"eos_token_id": list(tokenizer.end_ids)}
    for name in ("bos_token", "pad_token"):
        if name in special:
            generation[f"{name}_id"] = backend.token_to_id(special[name])
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **special}
    files = {
        "tokenizer.json": backend.to_str(pretty=True),
        "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
        "generation_config.json": json.dumps(generation, indent=2) + "\n",
    }
    if tokenizer.template:
        files["chat_template.jinja"] = tokenizer.template
    return {name: content.encode() for name, content in files.items()}


def _of_pieces(tokenizer: CharTokenizer | ByteTokenizer) -> TextTokenizer:
    """A BPE with the same ids, in which every character, or every byte, is a token."""
    import_transformers()
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    of_bytes = isinstance(tokenizer, ByteTokenizer)
    names = bytes_to_unicode()
    pieces = [names[byte] for byte in range(256)] if of_bytes else tokenizer.vocabulary
    vocabulary = {token: i for i, token in enumerate([_PAD, _END, *pieces])}
    backend: Any = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    if of_bytes:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel() if of_bytes else decoders.Fuse()
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in (_PAD, _END)])
    return TextTokenizer(backend, tokenizer.end_ids, special_tokens={"eos_token": _END, "pad_token": _PAD})
