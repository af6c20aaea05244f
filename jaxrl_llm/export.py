"""python -m jaxrl_llm.export --workdir DIR --to FOLDER: the policy of a DIR in the Hugging Face layout, complete.

The folder holds the weights, config.json with the other fields of the first checkpoint's (positions, end ids),
generation_config.json and the tokenizer's files: copies of the first checkpoint's, or written from the tokenizer where
there are none to copy (a GGUF file, a tokenizer of characters or bytes). It is what `config.model.pretrained` and
transformers read.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import logging

from jaxrl_llm import tasks
from jaxrl_llm.config import start_up
from jaxrl_llm.config.command_line import REFUSED, Parser, complain
from jaxrl_llm.models import Published, read_published, save_pretrained
from jaxrl_llm.run import loaded
from jaxrl_llm.run.loaded import LoadedPolicy

# What the names of a tokenizer's files begin with.
_OF_THE_TOKENIZER = ("tokenizer", "special_tokens", "added_tokens", "chat_template", "vocab", "merges")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="jaxrl-llm export", description="Write the policy of a DIR in the Hugging Face layout.")
    parser.add_argument("--workdir", required=True, type=Path, help="the DIR of a run")
    parser.add_argument("--to", required=True, type=Path, help="a folder without a checkpoint; made if need be")
    parser.add_argument("--step", type=int, help="which checkpoint; default: the newest that is intact")
    given = parser.parse_args(arguments)
    logging.set_verbosity(logging.ERROR)
    try:
        start_up.start_jax()
        policy = loaded.from_workdir(given.workdir, given.step)
        export(policy, given.to)
    except (ValueError, OSError, ImportError) as error:
        return complain(error, REFUSED)
    assert policy.run is not None
    print(f"step {policy.step} of {given.workdir} was written to {given.to}")
    if policy.run.settings.critic.kind == "head":
        print("the value head is no part of the policy and was left out")
    return 0


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


if __name__ == "__main__":
    sys.exit(main())
