"""python -m jaxrl_llm.audit FILE [--model FOLDER] [--page OUT.md] [--json OUT]: the loss of any stack."""

import sys
from pathlib import Path

from jaxrl_llm.config.command_line import Parser, check_folders
from jaxrl_llm.config.guard import Guard, command


@command
def main(arguments: list[str], guard: Guard) -> int:
    """Audit a captured batch; returns the exit code (see command_line.py)."""
    parser = Parser(
        prog="jaxrl-llm audit",
        description="Which objective and conventions give the loss of a batch that another stack computed.",
    )
    parser.add_argument("file", type=Path, help="a captured batch, a safetensors file: docs/audit.md has the schema")
    sampled = "also score the tokens with the checkpoint in this folder, the policy that sampled the answers"
    parser.add_argument("--model", type=Path, metavar="FOLDER", help=sampled)
    parser.add_argument("--page", type=Path, metavar="OUT.md", help="also write a page in Markdown to this file")
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write fits and faults to this file")
    given = parser.parse_args(arguments)
    check_folders(page=given.page, json=given.json)

    import jax  # from here on, so that a wrong command line is refused at once

    from jaxrl_llm.audit.capture import read
    from jaxrl_llm.audit.opinion import as_json, opinion
    from jaxrl_llm.audit.opinion_page import page, table
    from jaxrl_llm.audit.scored_tokens import scored

    capture = read(given.file)
    faults, scores = ([], []) if given.model is None else scored(capture, given.model)
    with jax.enable_x64(True):
        made = opinion(capture, faults, scores)
    print(table(made))
    if given.page:
        given.page.write_text(page(made, given.file.name))
    if given.json:
        given.json.write_text(as_json(made))
    return 0


if __name__ == "__main__":
    sys.exit(main())
