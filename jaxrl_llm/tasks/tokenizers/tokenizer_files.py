"""Any tokenizer of this package as the files of the Hugging Face layout, which give the same ids there."""

import json
from typing import Any

from jaxrl_llm.tasks.tokenizers.text_tokenizer import TextTokenizer
from jaxrl_llm.tasks.tokenizers.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer

__all__ = ["tokenizer_files"]

_PAD, _END = "<|pad|>", "<|end|>"  # ids 0 and 1 of the tokenizers of characters and bytes


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """tokenizer.json, tokenizer_config.json, generation_config.json with every end id, and a chat template if any.

    Raises:
        ValueError: a user's own tokenizer class, which has no such form.
        ImportError: tokenizers is not installed.
    """
    special = {"eos_token": _END, "pad_token": _PAD}
    if isinstance(tokenizer, TextTokenizer):
        backend, special = tokenizer.backend, dict(tokenizer.special_tokens)
    elif isinstance(tokenizer, CharTokenizer):
        backend = _single(list(tokenizer.vocabulary), of_bytes=False)
    elif isinstance(tokenizer, ByteTokenizer):
        backend = _single(_byte_characters(), of_bytes=True)
    else:
        raise ValueError(
            f"{type(tokenizer).__name__} has no tokenizer.json; write its files into the folder by other means, or "
            "train with a tokenizer of tasks.load_tokenizer"
        )
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **special}
    generation = {"eos_token_id": list(tokenizer.end_ids)}
    for name in ("bos", "pad"):
        if (token := special.get(f"{name}_token")) is not None:
            generation[f"{name}_token_id"] = backend.token_to_id(token)
    files = {
        "tokenizer.json": backend.to_str(pretty=True).encode(),
        "tokenizer_config.json": _json(config),
        "generation_config.json": _json(generation),
    }
    if isinstance(tokenizer, TextTokenizer) and tokenizer.template:
        files["chat_template.jinja"] = tokenizer.template.encode()
    return files


def _single(pieces: list[str], *, of_bytes: bool) -> Any:
    """A BPE without merges: every piece is a token, with ids from 2 on."""
    try:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    except ImportError as error:
        raise ImportError("writing tokenizer.json needs tokenizers; pip install 'jaxrl_llm[hf]'") from error
    vocabulary = {token: i for i, token in enumerate([_PAD, _END, *pieces])}
    backend: Any = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    if of_bytes:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel() if of_bytes else decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (_PAD, _END)])
    return backend


def _byte_characters() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary (GPT-2): itself if it is visible."""
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in visible else next(others)) for byte in range(256)]


def _json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, indent=2).encode() + b"\n"
