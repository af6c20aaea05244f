"""The tokenizer of a published model and its chat template, from a folder with tokenizer.json or from a GGUF file."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.ground import hub
from jaxrl_llm.ground.json_files import json_object
from jaxrl_llm.tasks.tokenizers.chat_template import rendered
from jaxrl_llm.tasks.tokenizers.plain_tokenizers import UNKNOWN, before_end

_FETCHED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "config.json",
)


@dataclasses.dataclass(frozen=True)
class TextTokenizer:
    """A `tokenizers.Tokenizer` with the ids that end an answer and, for chat models, the chat template."""

    backend: Any = dataclasses.field(compare=False, repr=False)
    end_ids: tuple[int, ...]  # the tokenizer's own EOS first
    template: str = dataclasses.field(default="", repr=False)  # Jinja source as published; "": no chat model
    # Name -> text (bos_token, eos_token, ...), for the template.
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
        """
        runs: list[list[int]] = [[]]
        for i in before_end(ids, self.end_ids):
            if i < self.vocab_size and self.backend.id_to_token(i) is not None:
                runs[-1].append(i)
            else:
                runs.append([])
        return UNKNOWN.join(self.backend.decode(run, skip_special_tokens=False) for run in runs)

    def chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **options: Any) -> str:
        """The text of a chat, equal to what transformers' `apply_chat_template(tokenize=False)` gives.

        Args:
            messages: {"role": ..., "content": ...} each.
            add_generation_prompt: end with the header of an answer, so that the model answers.
            options: other variables of the template, such as `enable_thinking`.

        Raises:
            ValueError: there is no template, or it refuses the messages, has an error or exceeds a limit of `rendered`.
        """
        if not self.template:
            raise ValueError("the tokenizer has no chat template; set task.chat=False or add chat_template.jinja")
        values = {"tools": None, "documents": None, **self.special_tokens, **options}
        values |= {"messages": [dict(one) for one in messages], "add_generation_prompt": add_generation_prompt}
        try:
            return rendered(self.template, values)
        except ValueError as error:
            shown = [f"{message.get('role')}: {str(message.get('content'))[:40]!r}" for message in messages]
            raise ValueError(
                f"the chat template refuses the messages {shown} ({error}); change task.system, task.chat_options or "
                "set task.chat=False"
            ) from error


def load_tokenizer(path: str | Path) -> TextTokenizer:
    """The tokenizer of a checkpoint: a GGUF file, a folder in the Hugging Face layout, or OWNER/NAME on the hub.

    The folder holds tokenizer.json, and may hold tokenizer_config.json, chat_template.jinja, generation_config.json and
    config.json.

    Raises:
        FileNotFoundError: there is no such folder or file, or no tokenizer in it.
        ValueError: it cannot be read, or no id ends an answer.
        ImportError: the package tokenizers (or gguf) is not installed.
    """
    path = Path(path)
    if hub.is_name(str(path)):
        path = hub.fetched(str(path), "model", _FETCHED)
    if path.is_file():
        from jaxrl_llm.tasks.tokenizers.gguf_tokenizer import read_gguf

        read = read_gguf(path)
        try:
            return TextTokenizer(*read)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
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
        name: text
        for name, token in config.items()
        if name.endswith("_token")
        and isinstance(text := token.get("content") if isinstance(token, dict) else token, str)
    }
    own = backend.token_to_id(special["eos_token"]) if "eos_token" in special else None
    if "eos_token" in special and own is None:
        raise ValueError(
            f"{folder / 'tokenizer_config.json'}: eos_token={special['eos_token']!r:.60} is no token of "
            "tokenizer.json; correct it"
        )
    ids = [] if own is None else [own]
    for name in ("generation_config.json", "config.json"):
        published = _json(folder / name).get("eos_token_id")
        if published is not None:
            listed = published if isinstance(published, list) else [published]
            if not all(type(i) is int for i in listed):
                raise ValueError(
                    f"{folder / name}: eos_token_id={published!r:.60} must be the id of a token, or a list of ids; "
                    "correct it"
                )
            ids += listed
            break
    return TextTokenizer(backend, tuple(dict.fromkeys(ids)), _template(folder, config), special)


def _template(folder: Path, config: Mapping[str, Any]) -> str:
    """chat_template.jinja, or an older place: a string, or a list of named templates with a "default"."""
    if (folder / "chat_template.jinja").is_file():
        try:
            return (folder / "chat_template.jinja").read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{folder / 'chat_template.jinja'} is not UTF-8 ({error}); write the file again"
            ) from error
    written = config.get("chat_template") or ""
    if isinstance(written, list) and all(isinstance(entry, dict) for entry in written):
        named = {str(entry.get("name")): entry.get("template") for entry in written}
        written = named.get("default", "")
    if not isinstance(written, str):
        raise ValueError(
            f"{folder / 'tokenizer_config.json'}: chat_template must be text, or a list of objects with name and "
            "template; correct it"
        )
    return written


def _json(file: Path) -> dict[str, Any]:
    return json_object(file, "write the file again") if file.is_file() else {}
