"""What a published checkpoint holds besides its weights, and a fingerprint that tells checkpoints apart."""

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxrl_llm.ground import hub
from jaxrl_llm.ground.json_files import json_object
from jaxrl_llm.models.checkpoints.gguf_file import open_gguf
from jaxrl_llm.models.checkpoints.safetensors_files import existing, open_folder, read_header, weight_files
from jaxrl_llm.models.checkpoints.tensor_names import StoredTensor

_WHOLE = 256 * 2**20  # weights of up to so many bytes are digested whole,
_SAMPLE = 4096  # larger ones by so many bytes at both ends of every tensor
_BESIDE = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "LICENSE",
)
_FETCHED = ("config.json", "model*.safetensors", "model.safetensors.index.json", *_BESIDE)


@dataclasses.dataclass(frozen=True)
class Published:
    """config: config.json, with what no ModelConfig holds. files: {name: content} that an export gets unchanged."""

    config: Mapping[str, Any]
    files: Mapping[str, bytes]


def read_published(path: str | os.PathLike[str]) -> Published:
    """What a folder in the Hugging Face layout, or a GGUF file, holds besides the weights. Raises as `load_pretrained`.

    A GGUF file has no tokenizer files; its generation_config.json is made of the ids in its metadata.
    """
    path = _checked(path)
    if path.is_file():
        config, _ = open_gguf(path)
        ids = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in config}
        return Published(config, {"generation_config.json": json.dumps(ids, indent=2).encode() + b"\n"})
    files = {name: (path / name).read_bytes() for name in _BESIDE if (path / name).is_file()}
    return Published(_config_of(path), files)


@contextlib.contextmanager
def open_checkpoint(path: str | os.PathLike[str]) -> Iterator[tuple[Mapping[str, Any], Mapping[str, StoredTensor]]]:
    """(config.json, tensors by name) of a folder or a GGUF file, to be read while the context is open."""
    path = _checked(path)
    with contextlib.ExitStack() as stack:
        yield open_gguf(path) if path.is_file() else (_config_of(path), open_folder(path, stack))


def fingerprint(path: str | os.PathLike[str]) -> str:
    """A digest (BLAKE2b, 128 bits) of a checkpoint's config.json and weights, not of its path.

    Of weights above 256 MiB safetensors files give their header, which holds every tensor's name, type and shape, and
    4 KiB at both ends of every tensor; a GGUF file 4 KiB at every MiB. This takes seconds, and notices changed weights.
    """
    path = _checked(path)
    digest = hashlib.blake2b(digest_size=16)
    if path.is_file():
        files = [path]
    else:
        digest.update(json.dumps(_config_of(path), sort_keys=True).encode())
        files, _ = weight_files(path)
    whole = sum(file.stat().st_size for file in files) <= _WHOLE
    for file in files:
        size = file.stat().st_size
        digest.update(f"{size}".encode())
        pieces = [(0, size)] if whole else _samples(file, size)
        with file.open("rb") as opened:
            for start, count in pieces:
                opened.seek(start)
                while count > 0 and (data := opened.read(min(count, 2**20))):
                    digest.update(data)
                    count -= len(data)
    return digest.hexdigest()


def _samples(file: Path, size: int) -> list[tuple[int, int]]:
    """(offset, number of bytes) of every piece that is read of a large file."""
    if file.suffix != ".safetensors":
        return [(start, _SAMPLE) for start in range(0, size, 2**20)] + [(max(0, size - _SAMPLE), _SAMPLE)]
    data, header = read_header(file)
    ends = sorted(tuple(entry["data_offsets"]) for entry in header.values())
    return [(0, data)] + [(data + max(a, p), _SAMPLE) for a, b in ends for p in (a, b - _SAMPLE)]


def _config_of(folder: Path) -> dict[str, Any]:
    return json_object(existing(folder / "config.json"), "fetch the checkpoint again")


def _checked(path: str | os.PathLike[str]) -> Path:
    path = Path(path).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if hub.is_name(str(path)):
        return hub.fetched(str(path), "model", _FETCHED)
    raise FileNotFoundError(
        f"pretrained={str(path)!r} is neither a folder nor a .gguf file, nor OWNER/NAME of a checkpoint on the hub; "
        "give one that exists"
    )
