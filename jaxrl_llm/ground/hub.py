"""Checkpoints and data sets that are named by their place on a hub, OWNER/NAME[/FOLDER][@REVISION], and not by a path.

huggingface_hub fetches them into its cache: it takes endpoint, token and cache from its own environment variables, and
gives what it has fetched before where there is no network. Its file locks let one of several processes download.
"""

import functools
import re
from pathlib import Path
from typing import Any

_NAME = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(?P<folder>(/[\w-][\w.-]*)*)(@(?P<revision>[\w-][\w./-]*))?")
_FILES = (".gguf", ".safetensors", ".jsonl", ".json", ".parquet", ".arrow")  # a path that ends so is that of a file
_REVISIONS: dict[str, str] = {}


def is_name(text: str) -> bool:
    """Whether this names something on the hub: it has the form, and neither it nor its first part is a path here."""
    here = Path(text).exists() or Path(text.partition("/")[0]).exists()
    return bool(_NAME.fullmatch(text)) and not text.endswith(_FILES) and not here


def revisions() -> dict[str, str]:
    """{name: commit} of everything that this process has fetched."""
    return dict(_REVISIONS)


@functools.cache  # what a name stands for does not change while a process runs
def fetched(name: str, kind: str, files: tuple[str, ...]) -> Path:
    """The folder of a name in the cache, with those of its files that match one of the patterns `files`.

    Args:
        kind: "model" or "dataset".

    Raises:
        FileNotFoundError: the hub does not give it; the message has the reason, and how else to get the folder.
        ImportError: huggingface_hub is not installed.
    """
    found = _NAME.fullmatch(name)
    assert found, name
    repo, folder, revision = found["repo"], found["folder"][1:], found["revision"]
    flag = " --repo-type dataset" if kind == "dataset" else ""
    remedy = f"or on a machine with a network run `hf download {repo}{flag} --local-dir DIR` and give the path of DIR"
    try:
        import huggingface_hub
    except ImportError as error:
        raise ImportError(
            f"{name!r} is no path here, and to fetch it: pip install 'jaxrl_llm[hf]'; {remedy}"
        ) from error
    patterns = [f"{folder}/{pattern}" if folder else pattern for pattern in files]
    try:
        root = huggingface_hub.snapshot_download(repo, repo_type=kind, revision=revision, allow_patterns=patterns)
    except Exception as error:  # of the library, its HTTP client, or the disk
        raise FileNotFoundError(f"{name!r} is no path here, and {_why(error, revision)}; {remedy}") from error
    _REVISIONS[name] = Path(root).name
    return Path(root, folder)


def _why(error: Any, revision: str | None) -> str:
    """What the hub says to a name, in a few words with the remedy."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return "the hub gives it to who has accepted its conditions: do so on its page, and set HF_TOKEN"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "the hub has none of that name or keeps it private: correct the name, or set HF_TOKEN"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"the hub has no revision {revision!r} of it: correct what follows @"
    return f"the hub cannot be reached ({type(error).__name__}: {str(error).strip().partition(chr(10))[0]:.120})"
