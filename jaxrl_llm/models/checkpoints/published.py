"""Files of a published checkpoint besides its weights, and a fingerprint that tells checkpoints apart."""

import contextlib
import dataclasses
import fnmatch
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxrl_llm.ground import hub, hub_names
from jaxrl_llm.ground.by_name import ByName
from jaxrl_llm.ground.json_files import json_object
from jaxrl_llm.models.checkpoints.gguf_file import open_gguf
from jaxrl_llm.models.checkpoints.safetensors_files import existing, open_folder, read_header, some, weight_files
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
_WITH_PICTURES = ByName(
    {
        "language_config": "jaxrl_llm.models.checkpoints.language_part",
        "language_tensors": "jaxrl_llm.models.checkpoints.language_part",
    }
)
_WEIGHTS = ("config.json", "model*.safetensors", "model.safetensors.index.json")


@dataclasses.dataclass(frozen=True)
class Published:
    """config: config.json, with what no ModelConfig holds. files: {name: content} that an export gets unchanged."""

    config: Mapping[str, Any]
    files: Mapping[str, bytes]


def read_config(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """The config.json of a checkpoint, or what a GGUF file holds of it; a name on the hub gives no other file here."""
    path = _checked(path, ("config.json",))
    return open_gguf(path)[0] if path.is_file() else _config_of(path)


def read_published(path: str | os.PathLike[str]) -> Published:
    """Read what a Hugging Face folder or a GGUF file holds besides the weights. Raises as `load_pretrained`.

    No weights of a name on the hub are fetched. A GGUF file has no tokenizer files; its generation_config.json is made
    of the ids in its metadata.
    """
    path = _checked(path, ("config.json", *_BESIDE))
    if path.is_file():
        config, _ = open_gguf(path)
        ids = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in config}
        return Published(config, {"generation_config.json": json.dumps(ids, indent=2).encode() + b"\n"})
    files = {name: (path / name).read_bytes() for name in _BESIDE if (path / name).is_file()}
    return Published(_config_of(path), files)


@contextlib.contextmanager
def open_checkpoint(path: str | os.PathLike[str]) -> Iterator[tuple[Mapping[str, Any], Mapping[str, StoredTensor]]]:
    """(config.json, tensors by name) of a folder or a GGUF file, to be read while the context is open."""
    path = _checked(path, _WEIGHTS)
    with contextlib.ExitStack() as stack:
        if path.is_file():
            yield open_gguf(path)
            return
        tensors = open_folder(path, stack)
        within = any(name.startswith("model.language_model.") for name in tensors)
        yield _config_of(path), _WITH_PICTURES["language_tensors"](tensors) if within else tensors


def fingerprint(path: str | os.PathLike[str]) -> str:
    """A digest (BLAKE2b, 128 bits) of a checkpoint's config.json and weights, not of its path.

    Of weights above 256 MiB safetensors files give their header, which holds every tensor's name, type and shape, and
    4 KiB at both ends of every tensor; a GGUF file 4 KiB at every MiB. This takes seconds, and notices changed weights.
    """
    path = _checked(path, _WEIGHTS)
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
    published = json_object(existing(folder / "config.json"), "fetch the checkpoint again")
    within = published.get("model_type") == "qwen3_5_moe" and isinstance(published.get("text_config"), dict)
    return _WITH_PICTURES["language_config"](published) if within else published


def _checked(path: str | os.PathLike[str], files: tuple[str, ...]) -> Path:
    """The folder or the GGUF file; of a name on the hub the folder with those of its files that match `files`."""
    path = Path(path).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if hub_names.is_name(str(path)):
        _check_files(str(path))
        return hub.fetched(str(path), "model", files)
    raise FileNotFoundError(
        f"{str(path)!r} is neither a folder nor a .gguf file, nor OWNER/NAME of a checkpoint on the hub; "
        "give one that exists"
    )


def _check_files(name: str) -> None:
    """Refuse a repository that holds no config.json or no safetensors, before anything of it is fetched."""
    names = hub.listed(name, "model")
    missing = [kind for kind in _WEIGHTS[:2] if names and not fnmatch.filter(names, kind)]
    if not missing:
        return
    if ggufs := fnmatch.filter(names, "*.gguf"):
        raise FileNotFoundError(
            f"{name!r} holds GGUF files ({some(ggufs)}), of which a run reads one: "
            f"`hf download {name.partition('@')[0]} {ggufs[0]} --local-dir DIR`, then give DIR/{ggufs[0]}"
        )
    remedy = "name a repository that does"
    if fnmatch.filter(names, "*.bin"):
        remedy = "save them as such by transformers, from_pretrained(...).save_pretrained(DIR), and give DIR"
    raise FileNotFoundError(f"{name!r} holds no {missing[0]}, but {some(names)}; {remedy}")
