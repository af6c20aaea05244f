"""Folders as publishers write them: small tokenizers that differ in every file that says how a prompt is read."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = ["The quick brown fox jumps over the lazy dog; it's 12,345.67 dollars. Hello world, naïve café."] * 4
_MARK = "▁"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING = CHATML.replace(
    "assistant\n{% endif",
    "assistant\n{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif",
)
LLAMA2 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content | trim }}{{ eos_token }}"
    "{% else %}[{{ m.role }}] {{ m.content }} [/{{ m.role }}]{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}"
)
NO_BOS = LLAMA2.removeprefix("{{ bos_token }}")
DATED = "{{ bos_token }}Today is {{ strftime_now('%d %b %Y') }}.\n" + NO_BOS
DATE_STRING = (
    "{% if not date_string is defined %}{% if strftime_now is defined %}"
    "{% set date_string = strftime_now('%d %B %Y') %}{% else %}{% set date_string = '26 Jul 2024' %}{% endif %}"
    "{% endif %}{{ bos_token }}{{ date_string }}\n" + NO_BOS
)
CONTROLS = (
    "{%- set ns = namespace(n=0) -%}{{ bos_token }}\n{%- for m in messages %}\n"
    "    {%- if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}\n"
    "    {%- if m.role == 'system' %}{% continue %}{% endif %}\n    {%- set ns.n = ns.n + 1 %}\n"
    "    {{- '<' ~ m.role ~ '>' ~ (m.content | tojson) }}{% if ns.n > 2 %}{% break %}{% endif %}\n"
    "{%- endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
GENERATION = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}"
    "{% endgeneration %}{% else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)


@dataclasses.dataclass(frozen=True)
class Published:
    """One folder: its tokenizer.json and the files beside it, JSON where they are no text."""

    make: Callable[[], Tokenizer]
    files: Mapping[str, Any]
    post: str = ""  # what its post-processor puts around a text, as "<s> $A"

    def write(self, folder: Path) -> Path:
        tokenizer = self.make()
        if self.post:
            special = [(name, tokenizer.token_to_id(name)) for name in self.post.split() if name != "$A"]
            tokenizer.post_processor = processors.TemplateProcessing(single=self.post, special_tokens=special)
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(folder / "tokenizer.json"))
        for name, content in self.files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        return folder


def _special(*names: str) -> list[AddedToken]:
    return [AddedToken(name, special=True, normalized=False) for name in names]


def _byte_level(pattern: str | None = None, prefix: bool = False, digits: bool = False, nfc: bool = False) -> Tokenizer:
    made = Tokenizer(models.BPE(ignore_merges=pattern is not None))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    if pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=pattern is None))
    made.pre_tokenizer = pre_tokenizers.Sequence(steps)
    made.decoder = decoders.ByteLevel()
    if nfc:
        made.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=_special("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(CORPUS, trainer)
    return made


def _pieces() -> dict[str, int]:
    """A vocabulary with a token for every byte, as SentencePiece has for byte fallback."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = [*sorted({c for line in CORPUS for c in line if c.isascii()} - {" "}), _MARK, *"\n[]/<>"]
    words = [_MARK + "T", _MARK + "The", "Th", "he", "The", _MARK + "t", "Hel", "He", _MARK + "H", _MARK + "He"]
    return {name: i for i, name in enumerate(dict.fromkeys([*names, *letters, *words]))}


_MERGES = [(_MARK, "T"), ("T", "h"), ("h", "e"), ("Th", "e"), (_MARK + "T", "he"), (_MARK, "t"), (_MARK, "H")]
_MERGES += [("H", "e"), (_MARK + "H", "e"), ("He", "l")]


def sentencepiece(prefix: bool = True, metaspace: str = "", split: bool = False, added: tuple = ()) -> Tokenizer:
    """BPE with byte fallback: by a normalizer (Llama 2, Gemma) or by Metaspace (`metaspace`: its prepend scheme)."""
    vocabulary = _pieces()
    merges = [pair for pair in _MERGES if "".join(pair) in vocabulary]
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.add_special_tokens(_special("<unk>", "<s>", "</s>"))
    if added:
        made.add_tokens(list(added))
    if metaspace:
        made.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_MARK, prepend_scheme=metaspace, split=split)
        made.decoder = decoders.Sequence(
            [decoders.ByteFallback(), decoders.Metaspace(replacement=_MARK, prepend_scheme=metaspace, split=split)]
        )
    else:
        steps = [normalizers.Prepend(_MARK)] if prefix else []
        made.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _MARK)])
        ends = [decoders.Strip(" ", 1, 0)] if prefix else []
        made.decoder = decoders.Sequence(
            [decoders.Replace(_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *ends]
        )
    return made


def _unigram(scheme: str = "always") -> Tokenizer:
    pieces = [(name, -float(i % 17) - 1) for name, i in _pieces().items()]
    made = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    made.add_special_tokens(_special("<unk>", "<s>", "</s>"))
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_MARK, prepend_scheme=scheme)
    made.decoder = decoders.Metaspace(replacement=_MARK, prepend_scheme=scheme)
    return made


def _wordpiece() -> Tokenizer:
    letters = sorted({c for line in CORPUS for c in line.lower() if c.isascii() and c != " "})
    names = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "the", "##he", "hello", *letters, *(f"##{c}" for c in letters)]
    made = Tokenizer(models.WordPiece(vocab={name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    made.add_special_tokens(_special("[UNK]", "[CLS]", "[SEP]", "[PAD]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    return made


def _added() -> tuple[AddedToken, ...]:
    return (
        AddedToken("<left>", lstrip=True),
        AddedToken("<right>", rstrip=True),
        AddedToken("Word", single_word=True),
        AddedToken("CAFÉ", normalized=True),
        AddedToken("<tool>", special=True, normalized=False),
    )


def _typed(text: str) -> dict[str, Any]:
    """A special token as older tokenizer_config.json files have it."""
    return {"__type": "AddedToken", "content": text, "lstrip": False, "normalized": True, "rstrip": False}


def config(template: Any = None, **more: Any) -> dict[str, Any]:
    found = {"tokenizer_class": "PreTrainedTokenizerFast", **more}
    return found if template is None else found | {"chat_template": template}


_SP = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_IM = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
_GPT = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
_NAMED = [{"name": "rag", "template": "rag"}, {"name": "default", "template": LLAMA2}]

PUBLISHED = {
    "gpt2": Published(_byte_level, {"tokenizer_config.json": config(CHATML, **_GPT)}),
    "gpt2, prefix space": Published(
        lambda: _byte_level(prefix=True), {"tokenizer_config.json": config(CHATML, **_GPT, add_prefix_space=True)}
    ),
    "qwen, jinja, EOS list": Published(
        lambda: _byte_level(_LLAMA3.replace("{1,3}", ""), nfc=True),
        {
            "tokenizer_config.json": config(**_IM),
            "chat_template.jinja": THINKING,
            "generation_config.json": {"eos_token_id": [2, 0]},
        },
    ),
    "qwen by its class": Published(
        lambda: _byte_level(_LLAMA3.replace("{1,3}", ""), nfc=True),
        {
            "tokenizer_config.json": config(THINKING, **_IM) | {"tokenizer_class": "Qwen2Tokenizer"},
            "config.json": {"model_type": "qwen3", "eos_token_id": 2},
        },
    ),
    "llama 3, date": Published(
        lambda: _byte_level(_LLAMA3),
        {
            "tokenizer_config.json": config(DATE_STRING, bos_token="<|im_start|>", eos_token="<|im_end|>"),
            "generation_config.json": {"eos_token_id": [0, 2]},
        },
        "<|im_start|> $A",
    ),
    "digits": Published(lambda: _byte_level(digits=True), {"tokenizer_config.json": config(CHATML, **_IM)}),
    "EOS list of config.json": Published(
        lambda: _byte_level(digits=True),
        {
            "tokenizer_config.json": config(CHATML, **_IM),
            "config.json": {"model_type": "llama", "eos_token_id": [0, 2]},
        },
    ),
    "no EOS of its own": Published(
        _byte_level, {"tokenizer_config.json": config(CHATML), "config.json": {"eos_token_id": 0}}
    ),
    "llama 2": Published(
        sentencepiece, {"tokenizer_config.json": config(LLAMA2, **_SP), "config.json": {"eos_token_id": 2}}, "<s> $A"
    ),
    "llama 2 by its class": Published(
        sentencepiece,
        {
            "tokenizer_config.json": config(LLAMA2, **_SP, legacy=False) | {"tokenizer_class": "LlamaTokenizer"},
            "config.json": {"model_type": "llama"},
        },
        "<s> $A",
    ),
    "BOS off": Published(sentencepiece, {"tokenizer_config.json": config(LLAMA2, **_SP, add_bos_token=False)}),
    "BOS off, but written by tokenizer.json": Published(
        sentencepiece, {"tokenizer_config.json": config(LLAMA2, **_SP, add_bos_token=False)}, "<s> $A"
    ),
    "no prefix space": Published(
        lambda: sentencepiece(prefix=False), {"tokenizer_config.json": config(LLAMA2, **_SP)}, "<s> $A"
    ),
    "metaspace first": Published(
        lambda: sentencepiece(metaspace="first"), {"tokenizer_config.json": config(LLAMA2, **_SP)}, "<s> $A"
    ),
    "metaspace first, template without BOS": Published(
        lambda: sentencepiece(metaspace="first"), {"tokenizer_config.json": config(NO_BOS, **_SP)}, "<s> $A"
    ),
    "metaspace always": Published(
        lambda: sentencepiece(metaspace="always", split=True),
        {"tokenizer_config.json": config(LLAMA2, **_SP)},
        "<s> $A",
    ),
    "metaspace never": Published(
        lambda: sentencepiece(metaspace="never"), {"tokenizer_config.json": config(LLAMA2, **_SP)}, "<s> $A"
    ),
    "BOS and EOS appended": Published(
        sentencepiece, {"tokenizer_config.json": config(LLAMA2, **_SP, add_eos_token=True)}, "<s> $A </s>"
    ),
    "EOS appended": Published(
        lambda: sentencepiece(prefix=False), {"tokenizer_config.json": config(NO_BOS, **_SP)}, "$A </s>"
    ),
    "unigram": Published(_unigram, {"tokenizer_config.json": config(LLAMA2, **_SP)}, "<s> $A"),
    "unigram, EOS appended": Published(
        lambda: _unigram("first"), {"tokenizer_config.json": config(NO_BOS, **_SP)}, "$A </s>"
    ),
    "wordpiece": Published(
        _wordpiece,
        {"tokenizer_config.json": config(GENERATION, bos_token="[CLS]", eos_token="[SEP]", unk_token="[UNK]")},
        "[CLS] $A [SEP]",
    ),
    "added tokens": Published(
        lambda: sentencepiece(added=_added()), {"tokenizer_config.json": config(LLAMA2, **_SP)}, "<s> $A"
    ),
    "added tokens of tokenizer_config.json": Published(
        sentencepiece,
        {
            "tokenizer_config.json": config(
                LLAMA2,
                **_SP,
                added_tokens_decoder={
                    "400": {"content": "<left>", "lstrip": True, "rstrip": False, "normalized": False, "special": True}
                    | {"single_word": False}
                },
            )
        },
        "<s> $A",
    ),
    "special_tokens_map alone": Published(
        lambda: sentencepiece(metaspace="first"),
        {
            "tokenizer_config.json": config(LLAMA2),
            "special_tokens_map.json": {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}},
            "generation_config.json": {"eos_token_id": 2},
        },
        "<s> $A",
    ),
    "dicts": Published(
        sentencepiece,
        {"tokenizer_config.json": config(CONTROLS, **{name: _typed(text) for name, text in _SP.items()})},
        "<s> $A",
    ),
    "chat_template.json": Published(
        sentencepiece,
        {"tokenizer_config.json": config(**_SP), "chat_template.json": {"chat_template": LLAMA2}},
        "<s> $A",
    ),
    "named templates": Published(sentencepiece, {"tokenizer_config.json": config(_NAMED, **_SP)}, "<s> $A"),
    "additional templates": Published(
        sentencepiece,
        {
            "tokenizer_config.json": config("old", **_SP),
            "chat_template.jinja": GENERATION,
            "additional_chat_templates/rag.jinja": "rag",
        },
        "<s> $A",
    ),
    "strftime_now": Published(sentencepiece, {"tokenizer_config.json": config(DATED, **_SP)}, "<s> $A"),
    "special tokens of a text are split": Published(
        sentencepiece, {"tokenizer_config.json": config(NO_BOS, **_SP, split_special_tokens=True)}, "<s> $A"
    ),
    "a class that nobody knows": Published(
        sentencepiece,
        {"tokenizer_config.json": config(LLAMA2, **_SP) | {"tokenizer_class": "NobodysTokenizer"}},
        "<s> $A",
    ),
}
