"""The tokenizer of a published model, from a folder with tokenizer.json or from a GGUF file."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.tasks.tokenizers import chat_template
from jaxrl_llm.tasks.tokenizers.plain_tokenizers import UNKNOWN, before_end

__all__ = ["TextTokenizer", "load_tokenizer"]


@dataclasses.dataclass(frozen=True)
class TextTokenizer:
    """A `tokenizers.Tokenizer` with the ids that end an answer and, for chat models, the chat template.

    Args:
        backend: of the package tokenizers.
        end_ids: every id that ends an answer, the tokenizer's own EOS first.
        template: Jinja source of the chat template, "" if the model has none.
        special_tokens: name -> text (bos_token, eos_token, ...), for the template.

    Raises:
        ValueError: no id ends an answer, or one that does is not in the vocabulary.
    """

    backend: Any = dataclasses.field(compare=False, repr=False)
    end_ids: tuple[int, ...]
    template: str = dataclasses.field(default="", repr=False)
    special_tokens: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False, repr=False)
    pad_id = 0  # may be an ordinary token too: see `Tokenizer`
    vocab_size: int = dataclasses.field(init=False)
    fingerprint: str = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "vocab_size", max(self.backend.get_vocab(with_added_tokens=True).values()) + 1)
        if not self.end_ids or not all(0 <= i < self.vocab_size for i in self.end_ids):
            raise ValueError(
                f"end_ids={self.end_ids} must name at least one id of a vocabulary of {self.vocab_size}; add "
                "eos_token to tokenizer_config.json or eos_token_id to generation_config.json"
            )
        whole = json.dumps([self.backend.to_str(), self.end_ids, self.template])
        object.__setattr__(self, "fingerprint", hashlib.sha256(whole.encode()).hexdigest()[:16])

    @functools.cached_property
    def start(self) -> str:
        """What this tokenizer writes before plain text ("<s>" or nothing); a chat template writes it by itself."""
        return self.backend.decode(self.backend.encode("", add_special_tokens=True).ids, skip_special_tokens=False)

    def encode(self, text: str) -> list[int]:
        """The ids of `text`; the names of special tokens inside it are read as those tokens."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text before the first end id, special tokens written out.

        An id without a token becomes U+FFFD, and so does a character of which only some bytes are there.

        Raises:
            ValueError: an id is negative.
        """
        runs: list[list[int]] = [[]]
        for i in before_end(ids, self.end_ids):
            if i < self.vocab_size and self.backend.id_to_token(i) is not None:
                runs[-1].append(i)
            else:
                runs.append([])
        return UNKNOWN.join(self.backend.decode(run, skip_special_tokens=False) for run in runs)

    def chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **options: Any) -> str:
        """The text of a chat by this model's template; see `chat_template.render`.

        Raises:
            ValueError: there is no template, or it refuses the messages.
        """
        if not self.template:
            raise ValueError("the tokenizer has no chat template; set task.chat=False or add chat_template.jinja")
        return chat_template.render(
            self.template,
            messages,
            add_generation_prompt=add_generation_prompt,
            special_tokens=self.special_tokens,
            **options,
        )


def load_tokenizer(path: str | Path) -> TextTokenizer:
    """The tokenizer of a checkpoint.

    Args:
        path: a folder in the Hugging Face layout (tokenizer.json, and where they are there tokenizer_config.json,
          chat_template.jinja, generation_config.json, config.json), or a GGUF file.

    Raises:
        FileNotFoundError: there is no such folder or file, or no tokenizer in it.
        ValueError: it cannot be read, or no id ends an answer.
        ImportError: the package tokenizers (or gguf) is not installed.
    """
    path = Path(path)
    if path.is_file():
        from jaxrl_llm.tasks.tokenizers.gguf_tokenizer import read_gguf

        return TextTokenizer(*read_gguf(path))
    if not (path / "tokenizer.json").is_file():
        raise FileNotFoundError(
            f"{path} holds no tokenizer.json; name a folder in the Hugging Face layout or a GGUF file"
        )
    return _from_folder(path)


def _from_folder(folder: Path) -> TextTokenizer:
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError("the tokenizer of a checkpoint needs tokenizers; pip install 'jaxrl_llm[hf]'") from error
    try:
        backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # tokenizers raises nothing narrower
        raise ValueError(f"{folder / 'tokenizer.json'} cannot be read ({error}); save the tokenizer again") from error
    backend.no_padding()
    backend.no_truncation()
    config = _json(folder / "tokenizer_config.json")
    special = {
        name: token["content"] if isinstance(token, dict) else token
        for name, token in config.items()
        if name.endswith("_token") and isinstance(token, str | dict)
    }
    own = backend.token_to_id(special["eos_token"]) if "eos_token" in special else None
    generation = _json(folder / "generation_config.json").get("eos_token_id")
    published = _json(folder / "config.json").get("eos_token_id") if generation is None else generation
    ids = [own, *(published if isinstance(published, list) else [published])]
    return TextTokenizer(
        backend, tuple(dict.fromkeys(i for i in ids if i is not None)), _template(folder, config), special
    )


def _template(folder: Path, config: Mapping[str, Any]) -> str:
    """chat_template.jinja before the older places: a string, or a list of named templates with a "default"."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    written = config.get("chat_template") or ""
    if isinstance(written, list):
        return {entry["name"]: entry["template"] for entry in written}.get("default", "")
    return written


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is no JSON ({error}); write the file again") from error
