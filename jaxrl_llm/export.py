"""python -m jaxrl_llm.export --workdir DIR --to FOLDER: the policy of a DIR in the Hugging Face layout, complete.

The folder holds the weights, config.json with the other fields of the first checkpoint's (positions, end ids),
generation_config.json and the tokenizer's files: copies of the first checkpoint's, or written from the tokenizer where
there are none to copy (a GGUF file, a tokenizer of characters or bytes). It is what `config.model.pretrained` and
transformers read.
"""

import sys
from pathlib import Path

from jaxrl_llm.config.command_line import Parser, add_place, add_trust, local_folder
from jaxrl_llm.config.guard import Guard, command


@command
def main(arguments: list[str], guard: Guard) -> int:
    """Export the policy of a DIR; returns the exit code (see command_line.py)."""
    parser = Parser(prog="jaxrl-llm export", description="Write the policy of a DIR in the Hugging Face layout.")
    parser.add_argument("--workdir", required=True, type=lambda text: Path(local_folder(text)), help="the DIR of a run")
    add_place(parser)
    parser.add_argument("--to", required=True, type=Path, help="a folder without a checkpoint; made if need be")
    parser.add_argument("--step", type=int, help="which checkpoint; default: the newest that is intact")
    add_trust(parser)
    given = parser.parse_args(arguments)

    # JAX is imported from here on.
    from absl import logging

    from jaxrl_llm.config import start_up
    from jaxrl_llm.run import exported, loaded

    logging.set_verbosity(logging.ERROR)
    start_up.start_jax()
    policy = loaded.from_workdir(given.workdir, given.step, trust=given.trust_code, checkpoints=given.checkpoints)
    exported.export(policy, given.to)
    assert policy.run is not None
    print(f"step {policy.step} of {given.workdir} was written to {given.to}")
    if policy.run.settings.critic.kind == "head":
        print("the value head is no part of the policy and was left out")
    return 0


if __name__ == "__main__":
    sys.exit(main())
