"""Tokenizers as the files of the Hugging Face layout: of any tokenizer of this package, or of a newly trained one."""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxrl_llm.tasks.tokenizers.plain_tokenizers import ByteTokenizer, CharTokenizer, Tokenizer
from jaxrl_llm.tasks.tokenizers.text_tokenizer import TextTokenizer, load_tokenizer

_PAD, _END = "<|pad|>", "<|end|>"  # ids 0 and 1 of the tokenizers of characters and bytes

# ChatML: each message between <|im_start|>role and <|im_end|>.
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """tokenizer.json, tokenizer_config.json, generation_config.json with every end id, and a chat template if any.

    A Hugging Face tokenizer that reads these files gives the same ids.

    Raises:
        ValueError: a user's own tokenizer class, which has no such form.
    """
    if isinstance(tokenizer, TextTokenizer):
        return _files(tokenizer.backend, tokenizer.end_ids, tokenizer.template, tokenizer.special_tokens)
    if isinstance(tokenizer, CharTokenizer):
        backend = _Pieces(list(tokenizer.vocabulary), of_bytes=False)
    elif isinstance(tokenizer, ByteTokenizer):
        backend = _Pieces(_byte_characters(), of_bytes=True)
    else:
        raise ValueError(
            f"{type(tokenizer).__name__} has no tokenizer.json; write its files into the folder by other means, or "
            "train with a tokenizer of tasks.load_tokenizer"
        )
    return _files(backend, tokenizer.end_ids, "", {"eos_token": _END, "pad_token": _PAD})


def write_tokenizer(folder: str | Path, corpus: Iterable[str], vocab_size: int = 512) -> TextTokenizer:
    """Train a byte-level BPE on `corpus` and write its files; equal arguments write equal files.

    Digits are tokens of their own. `<|im_end|>` (id 2) and `<|endoftext|>` (id 0) end an answer. 3 special tokens and
    256 bytes are always there, so any other text can be encoded too; `vocab_size` is the most tokens in all.

    Raises:
        ImportError: tokenizers is not installed.
    """
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError as error:
        raise ImportError("training a tokenizer needs tokenizers; pip install 'jaxrl_llm[hf]'") from error
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
    for name, content in _files(backend, (2, 0), _CHAT_TEMPLATE, special, model_max_length=8192).items():
        (folder / name).write_bytes(content)
    return load_tokenizer(folder)


def _files(
    backend: Any, end_ids: tuple[int, ...], template: str, special: Mapping[str, str], **config: Any
) -> dict[str, bytes]:
    generation: dict[str, Any] = {"eos_token_id": list(end_ids)}
    for name in ("bos_token", "pad_token"):
        if name in special:
            generation[f"{name}_id"] = backend.token_to_id(special[name])
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **special}
    files = {
        "tokenizer.json": backend.to_str(pretty=True),
        "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
        "generation_config.json": json.dumps(generation, indent=2) + "\n",
    }
    if template:
        files["chat_template.jinja"] = template
    return {name: content.encode() for name, content in files.items()}


@dataclasses.dataclass
class _Pieces:
    """A BPE in which every piece is a token, with ids from 2 on, as a tokenizer of `tokenizers` without having that.

    The text is what that library writes, byte for byte: tests/tasks/test_tokenizer_files.py.
    """

    pieces: list[str]
    of_bytes: bool

    def token_to_id(self, token: str) -> int:
        return [_PAD, _END, *self.pieces].index(token)

    def to_str(self, *, pretty: bool) -> str:
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        absent = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
        model = {"type": "BPE"} | dict.fromkeys(absent)
        model |= dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False)
        model |= {"vocab": {token: i for i, token in enumerate([_PAD, _END, *self.pieces])}, "merges": []}
        decoder = level | {"add_prefix_space": True, "use_regex": True} if self.of_bytes else {"type": "Fuse"}
        whole = {"version": "1.0", "truncation": None, "padding": None}
        whole |= {"added_tokens": [{"id": i, "content": token, **flags} for i, token in enumerate((_PAD, _END))]}
        whole |= {"normalizer": None, "pre_tokenizer": level if self.of_bytes else None, "post_processor": None}
        whole |= {"decoder": decoder, "model": model}
        return json.dumps(whole, indent=2 if pretty else None, ensure_ascii=False)


def _byte_characters() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary (GPT-2): itself if it is visible."""
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in visible else next(others)) for byte in range(256)]
