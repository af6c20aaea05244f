"""A byte-level BPE tokenizer from the metadata of a GGUF file.

The metadata holds tokens and merges but names the pre-tokenizer only; what each name means is listed here.
"""

from pathlib import Path
from typing import Any

from jaxrl_llm.ground.whole_gguf import whole_gguf

_CONTROL, _USER_DEFINED = 3, 4  # token types that are never split
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Name of a pre-tokenizer -> (pattern of its own or None for GPT-2's, digits one by one, NFC, merges ignored for words
# that are tokens themselves).
PRE_TOKENIZERS = {
    "gpt-2": (None, False, False, False),
    "smollm": (None, True, False, False),
    "llama-bpe": (_LLAMA3, False, False, True),
    "qwen2": (_LLAMA3.replace("{1,3}", ""), False, True, False),
}


def read_gguf(path: Path) -> tuple[Any, tuple[int, ...], str, dict[str, str]]:
    """(tokenizers.Tokenizer, end ids, chat template, special tokens) of a GGUF file.

    Raises:
        ValueError: the file cannot be read, or its tokenizer is of another kind than byte-level BPE with a known
          pre-tokenizer.
        ImportError: gguf or tokenizers is not installed.
    """
    try:
        import gguf  # noqa: F401
        import tokenizers  # noqa: F401 (named here so that one message covers both)
    except ImportError as error:
        raise ImportError("a GGUF file needs gguf and tokenizers; pip install 'jaxrl_llm[hf]'") from error
    try:
        return _read(whole_gguf(path), path)
    except Exception as error:  # the reader trusts the file's own lengths, types and offsets
        if isinstance(error, ValueError) and str(path) in str(error):
            raise
        raise ValueError(
            f"{path} is no GGUF file with a tokenizer, or is damaged ({type(error).__name__}: {error}); name a folder "
            "with tokenizer.json or a GGUF file"
        ) from error


def _read(reader: Any, path: Path) -> tuple[Any, tuple[int, ...], str, dict[str, str]]:
    from tokenizers.processors import TemplateProcessing

    own = [(name, field) for name, field in reader.fields.items() if name.startswith("tokenizer.")]
    meta = {name.removeprefix("tokenizer."): field.contents() for name, field in own}
    kind, pre = meta.get("ggml.model"), meta.get("ggml.pre")
    if kind != "gpt2" or pre not in PRE_TOKENIZERS:
        raise ValueError(
            f"{path}: tokenizer.ggml.model={kind!r} with tokenizer.ggml.pre={pre!r} is not supported; supported is "
            f"gpt2 with {', '.join(PRE_TOKENIZERS)}. Use the folder with tokenizer.json that the file was made from"
        )
    tokens = meta["ggml.tokens"]
    backend = _byte_level_bpe(pre, tokens, meta["ggml.merges"], meta.get("ggml.token_type", [1] * len(tokens)))
    end_ids = [meta.get(f"ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    special = {
        f"{name}_token": tokens[meta[f"ggml.{key}_token_id"]]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if f"ggml.{key}_token_id" in meta
    }
    ends = tuple(dict.fromkeys(int(i) for i in end_ids if i is not None))
    if meta.get("ggml.add_bos_token"):
        bos = (special["bos_token"], meta["ggml.bos_token_id"])
        backend.post_processor = TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])  # pyright: ignore
    return backend, ends, meta.get("chat_template", ""), special


def _byte_level_bpe(pre: str, tokens: list[str], merges: list[str], types: list[int]) -> Any:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pattern, single_digits, nfc, ignore_merges = PRE_TOKENIZERS[pre]
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=ignore_merges))  # pyright: ignore
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if single_digits else []
    if pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    if nfc:
        backend.normalizer = normalizers.NFC()
    whole = [(token, kind) for token, kind in zip(tokens, types, strict=True) if kind in (_CONTROL, _USER_DEFINED)]
    backend.add_tokens([AddedToken(t, special=kind == _CONTROL, normalized=False) for t, kind in whole])
    return backend
