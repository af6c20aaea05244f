"""A policy in the Hugging Face layout: weights, configuration and the tokenizer's files."""

import json
from pathlib import Path

from jaxrl_llm import tasks
from jaxrl_llm.models import Published, read_published, save_pretrained
from jaxrl_llm.run.loaded import LoadedPolicy

# What the names of a tokenizer's files begin with.
_OF_THE_TOKENIZER = ("tokenizer", "special_tokens", "added_tokens", "chat_template", "vocab", "merges")


def export(policy: LoadedPolicy, folder: Path) -> None:
    """Write a policy with its configuration and its tokenizer.

    Raises:
        FileExistsError: the folder holds a checkpoint already.
        ValueError: no published family computes this model, or its tokenizer has no tokenizer.json.
    """
    pretrained = "" if policy.run is None else policy.run.settings.pretrained
    published = read_published(pretrained) if pretrained else Published({}, {})
    own = policy.tokenizer  # which the run may have taken from elsewhere
    if "tokenizer.json" not in published.files or tasks.load_tokenizer(pretrained).fingerprint != own.fingerprint:
        published = with_tokenizer(published, own)
    save_pretrained(policy.params, policy.model.config, folder, published=published)


def with_tokenizer(published: Published, tokenizer: tasks.Tokenizer) -> Published:
    """The tokenizer's files instead of any others; generation settings other than ids are kept."""
    files = {name: x for name, x in published.files.items() if not name.startswith(_OF_THE_TOKENIZER)}
    written = tasks.tokenizer_files(tokenizer)
    settings = json.loads(files.get("generation_config.json", b"{}")) | json.loads(written["generation_config.json"])
    written["generation_config.json"] = json.dumps(settings, indent=2).encode() + b"\n"
    ids = {name: settings[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in settings}
    return Published({**ids, **published.config}, files | written)
