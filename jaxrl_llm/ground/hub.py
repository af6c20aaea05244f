"""Checkpoints and data sets that are named by their place on a hub (hub_names.py), and folders that are pushed to one.

huggingface_hub fetches them into its cache: it takes endpoint, token and cache from its own environment variables, and
gives what it has fetched before where there is no network. Its file locks let one of several processes download.
"""

import functools
from pathlib import Path
from typing import Any

from jaxrl_llm.ground import hub_names

_PATIENCE = 10.0  # seconds


@functools.cache  # what a name stands for does not change while a process runs
def fetched(name: str, kind: str, files: tuple[str, ...]) -> Path:
    """The folder of a name in the cache, with those of its files that match one of the patterns `files`.

    Args:
        kind: "model" or "dataset".

    Raises:
        FileNotFoundError: the hub does not give it; the message has the reason, and how else to get the folder.
        ImportError: huggingface_hub is not installed.
    """
    found = hub_names.NAME.fullmatch(name)
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
    hub_names.REVISIONS[name] = Path(root).name
    return Path(root, folder)


@functools.cache
def listed(name: str, kind: str) -> tuple[str, ...]:
    """The names of all files of a name's folder on the hub; none where it cannot be asked. Arguments as `fetched`."""
    found = hub_names.NAME.fullmatch(name)
    assert found, name
    try:
        from huggingface_hub import HfApi

        known: Any = HfApi().repo_info(found["repo"], repo_type=kind, revision=found["revision"], timeout=_PATIENCE)
    except Exception:  # without a network `fetched` may find all that is needed, else it says what is wrong
        return ()
    names, folder = [file.rfilename for file in known.siblings or ()], f"{found['folder'][1:]}/".lstrip("/")
    return tuple(name.removeprefix(folder) for name in names if name.startswith(folder))


def check_push(name: str) -> None:
    """Refuse a push that cannot succeed before there is anything to push.

    Raises:
        ValueError: no OWNER/NAME, or no token. ImportError: huggingface_hub is not installed.
    """
    found = hub_names.NAME.fullmatch(name)
    if not found or found["folder"] or found["revision"]:
        raise ValueError(f"--push={name} must be OWNER/NAME, the repository to push to")
    try:
        import huggingface_hub
    except ImportError as error:
        raise ImportError(f"--push={name} needs huggingface_hub: pip install 'jaxrl_llm[hf]'") from error
    if huggingface_hub.get_token() is None:
        raise ValueError(f"--push={name} needs a token that may write there: run `hf auth login`, or set HF_TOKEN")


def pushed(folder: Path, name: str, *, private: bool, message: str) -> str:
    """Make the repository if need be and push the files of a folder, in the place of weights that it holds.

    Args:
        private: of a new repository; otherwise as its owner's are by default.

    Returns: the address of the commit.

    Raises:
        OSError: the hub does not take it; the message has the reason and the command to try again.
    """
    import huggingface_hub

    api = huggingface_hub.HfApi()
    try:
        api.create_repo(name, private=private or None, exist_ok=True)
        old = "*.safetensors*"
        done = api.upload_folder(repo_id=name, folder_path=folder, commit_message=message, delete_patterns=old)
    except Exception as error:  # of the library, its HTTP client, or the disk
        why = _why(error, None)
        if getattr(getattr(error, "response", None), "status_code", 0) in (401, 403):
            why = "the token may not write there: take one that may, of an account with the right to"
        again = f"the folder is whole: `hf upload {name} {folder}` pushes it"
        raise OSError(f"--push={name}: {why}; {again}") from error
    return str(done.commit_url)


def _why(error: Any, revision: str | None) -> str:
    """Return the hub's answer to a name, in a few words with the remedy."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return "the hub gives it to who has accepted its conditions: do so on its page, and set HF_TOKEN"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "the hub has none of that name or keeps it private: correct the name, or set HF_TOKEN"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"the hub has no revision {revision!r} of it: correct what follows @"
    return f"the hub cannot be reached ({type(error).__name__}: {str(error).strip().partition(chr(10))[0]:.120})"
