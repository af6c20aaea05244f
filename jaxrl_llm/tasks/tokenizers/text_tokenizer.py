"""The tokenizer of a published model and its chat template, from a folder with tokenizer.json or from a GGUF file."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.ground import hub, hub_names
from jaxrl_llm.ground.json_files import json_object
from jaxrl_llm.tasks.tokenizers.chat_template import import_transformers, rendered
from jaxrl_llm.tasks.tokenizers.plain_tokenizers import UNKNOWN, before_end

_FETCHED = ("*token*.json", "chat_template*", "additional_chat_templates/*", "generation_config.json", "config.json")


@dataclasses.dataclass(frozen=True)
class TextTokenizer:
    """A `tokenizers.Tokenizer` with the ids that end an answer and, for chat models, the chat template."""

    backend: Any = dataclasses.field(compare=False, repr=False)
    end_ids: tuple[int, ...]  # the tokenizer's own EOS first
    template: str = dataclasses.field(default="", repr=False)  # Jinja source as published; "": no chat model
    # Name -> text (bos_token, eos_token, ...), for the template.
    special_tokens: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False, repr=False)
    day: str = dataclasses.field(default="", compare=False)  # today of the template, YYYY-MM-DD; "": the present
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
    def start_ids(self) -> list[int]:
        """The ids before a plain text, such as BOS; a chat template writes them by itself."""
        encoding = self.backend.encode(str(self.backend.id_to_token(self.end_ids[0])))
        return encoding.ids[: encoding.sequence_ids.index(0)]

    def encode(self, text: str) -> list[int]:
        """The ids of `text`; the names of special tokens inside it are read as those tokens."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def encode_plain(self, text: str) -> list[int]:
        """The ids of a text to be continued: those of transformers without what it appends (EOS), and with one BOS
        where the text begins with BOS already."""
        start, ids = self.start_ids, self.encode(text)
        return ids if ids[: len(start)] == start else start + ids

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
        """The text of a chat, equal to what transformers' `apply_chat_template(tokenize=False)` gives on that day.

        Args:
            messages: {"role": ..., "content": ...} each.
            add_generation_prompt: end with the header of an answer, so that the model answers.
            options: other variables of the template, such as `enable_thinking`.

        Raises:
            ValueError: there is no template, or it refuses the messages, has an error or exceeds a limit of `rendered`.
        """
        if not self.template:
            raise ValueError("the tokenizer has no chat template; set task.chat=False or add chat_template.jinja")
        values = {**self.special_tokens, **options, "add_generation_prompt": add_generation_prompt}
        try:
            return rendered(self.template, messages, values, self.day)
        except ValueError as error:
            shown = [f"{message.get('role')}: {str(message.get('content'))[:40]!r}" for message in messages]
            raise ValueError(
                f"the chat template refuses the messages {shown} ({error}); change task.system, task.chat_options or "
                "set task.chat=False"
            ) from error


def load_tokenizer(path: str | Path, day: str = "") -> TextTokenizer:
    """The tokenizer of a checkpoint: a GGUF file, a folder in the Hugging Face layout, or OWNER/NAME on the hub.

    A folder holds tokenizer.json, and what `transformers` reads beside it. Nothing else is fetched, and no code of the
    folder is run.

    Args:
        day: YYYY-MM-DD that a chat template which asks for the date takes for today; "": the present.

    Raises:
        FileNotFoundError: there is no such folder or file, or no tokenizer in it.
        ValueError: it cannot be read, or no id ends an answer.
        ImportError: the package transformers (or gguf) is not installed.
    """
    path = Path(path)
    if hub_names.is_name(str(path)):
        path = hub.fetched(str(path), "model", _FETCHED)
    if path.is_file():
        from jaxrl_llm.tasks.tokenizers.gguf_tokenizer import read_gguf as read
    else:
        read = _read_folder
    try:
        backend, end_ids, template, special_tokens = read(path)
        return TextTokenizer(backend, end_ids, template, special_tokens, day if "strftime_now" in template else "")
    except ValueError as error:
        raise error if str(path) in str(error) else ValueError(f"{path}: {error}") from None


def _read_folder(folder: Path) -> tuple[Any, tuple[int, ...], str, dict[str, str]]:
    """(tokenizers.Tokenizer, end ids, chat template, special tokens) by transformers."""
    if not (folder / "tokenizer.json").is_file():
        raise FileNotFoundError(
            f"{folder} holds no tokenizer.json; name a folder in the Hugging Face layout or a GGUF file, or convert "
            "other files with AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) of transformers"
        )
    config = _json(folder / "tokenizer_config.json")
    transformers = import_transformers()
    from tokenizers import Tokenizer

    try:
        read = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        backend, special = read.backend_tokenizer, dict(read.special_tokens_map)
        known = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # it raises whatever a damaged file makes it raise
        said = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]:.200}"
        remedy = "correct it or what stands beside it (tokenizer_config.json, chat_template.jinja), or fetch it again"
        if "auto_map" in config:
            remedy = "tokenizer_config.json asks for code of its own (auto_map), which is never run: remove auto_map"
        raise ValueError(f"{folder / 'tokenizer.json'} cannot be read by transformers ({said}); {remedy}") from error
    numbered = json.dumps(config.get("added_tokens_decoder"))
    # transformers numbers a special token that has no number, which then lies beyond the rows of the model.
    beyond = [x for x in special.values() if known.token_to_id(x) is None and json.dumps(x) not in numbered]
    if special.get("eos_token") in beyond:
        raise ValueError(f"eos_token={special['eos_token']!r:.60} is no token of tokenizer.json; correct one of them")
    if beyond:
        whole = json.loads(backend.to_str())
        whole["added_tokens"] = [token for token in whole["added_tokens"] if token["content"] not in beyond]
        backend = Tokenizer.from_str(json.dumps(whole))
    backend.encode_special_tokens = read.split_special_tokens  # a setting that no tokenizer.json holds
    backend.no_padding()
    backend.no_truncation()
    own = [] if read.eos_token is None else [read.eos_token_id]
    end_ids = tuple(dict.fromkeys([*own, *_published_ends(folder)]))
    template = read.chat_template or _json(folder / "chat_template.json").get("chat_template", "")
    template = template.get("default", "") if isinstance(template, dict) else template
    if not isinstance(template, str):
        raise ValueError(f"chat_template={template!r:.60} must be text, or named texts; correct tokenizer_config.json")
    return backend, end_ids, template, special


def _published_ends(folder: Path) -> list[int]:
    """The end ids of generation_config.json, or else of config.json."""
    for name in ("generation_config.json", "config.json"):
        published = _json(folder / name).get("eos_token_id")
        if published is not None:
            listed = published if isinstance(published, list) else [published]
            if not all(type(i) is int for i in listed):
                raise ValueError(f"{name}: eos_token_id={published!r:.60} must be an id, or a list of ids; correct it")
            return listed
    return []


def _json(file: Path) -> dict[str, Any]:
    return json_object(file, "write the file again") if file.is_file() else {}
