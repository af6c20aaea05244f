"""python -m jaxrl_llm.export --workdir DIR --to FOLDER [--push OWNER/NAME]: the policy of a DIR in the Hugging Face
layout, complete; with --adapter its LoRA adapters alone, as PEFT reads them.

The folder holds the weights, config.json with the other fields of the first checkpoint's (positions, end ids),
generation_config.json and the tokenizer's files: copies of the first checkpoint's, or written from the tokenizer where
there are none to copy (a GGUF file, a tokenizer of characters or bytes). It is what `config.model.pretrained` and
transformers read.
"""

import sys
from pathlib import Path

from jaxrl_llm.config.command_line import Parser, add_place, local_folder
from jaxrl_llm.config.guard import Guard, command
from jaxrl_llm.config.policy_arguments import add_step, add_trust
from jaxrl_llm.ground import hub


@command
def main(arguments: list[str], guard: Guard) -> int:
    """Export the policy of a DIR; returns the exit code (see command_line.py)."""
    parser = Parser(prog="jaxrl-llm export", description="Write the policy of a DIR in the Hugging Face layout.")
    parser.add_argument("--workdir", required=True, type=lambda text: Path(local_folder(text)), help="the DIR of a run")
    add_place(parser)
    parser.add_argument("--to", required=True, type=Path, help="a folder without a checkpoint; made if need be")
    add_step(parser)
    add_trust(parser)
    parser.add_argument("--adapter", action="store_true", help="the LoRA adapters alone, as PEFT reads them")
    parser.add_argument(
        "--push", metavar="OWNER/NAME", help="then push the folder, with a model card, to this repository"
    )
    parser.add_argument("--private", action="store_true", help="make a repository that --push creates private")
    given = parser.parse_args(arguments)
    if given.private and not given.push:
        raise ValueError("--private is of a repository that --push creates; give --push OWNER/NAME too")
    if given.push:
        hub.check_push(given.push)

    # JAX is imported from here on.
    from absl import logging

    from jaxrl_llm.config import start_up
    from jaxrl_llm.run import exported, loaded

    logging.set_verbosity(logging.ERROR)
    start_up.start_jax()
    policy = loaded.from_workdir(given.workdir, given.step, trust=given.trust_code, checkpoints=given.checkpoints)
    (exported.export_adapters if given.adapter else exported.export)(policy, given.to)
    assert policy.run is not None
    print(f"step {policy.step} of {given.workdir} was written to {given.to}")
    if policy.run.settings.critic.kind == "head":
        print("the value head is no part of the policy and was left out")
    if given.push:
        guard.started = True
        exported.write_card(policy, given.workdir, given.to)
        message = f"Step {policy.step} of a run of {policy.run.settings.objective_name}"
        print(f"pushed to {hub.pushed(given.to, given.push, private=given.private, message=message)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
