"""python -m jaxrl_llm.upcycle --from PATH --to FOLDER --experts 8 --chosen 2: a mixture of experts from a dense model.

Reads a published dense checkpoint and writes one of a mixture in the Hugging Face layout, with the tokenizer and the
other files of the first. Every expert is a copy of its layer's feed-forward, with --redraw in part drawn anew by
--seed. Plain copies compute what the dense model does; docs/models.md has the equations.
"""

import sys
from pathlib import Path

from jaxrl_llm.config.command_line import Parser
from jaxrl_llm.config.guard import Guard, command
from jaxrl_llm.ground.ranges import in_range


@command
def main(arguments: list[str], guard: Guard) -> int:
    """Write the mixture; returns the exit code (see command_line.py)."""
    parser = Parser(prog="jaxrl-llm upcycle", description="Make a mixture of experts out of a dense checkpoint.")
    parser.add_argument("--from", required=True, type=Path, dest="source", help="a dense checkpoint: folder or GGUF")
    parser.add_argument("--to", required=True, type=Path, help="a folder without a checkpoint; made if need be")
    parser.add_argument("--experts", type=int, default=8, help="of every layer (default: %(default)s)")
    parser.add_argument("--chosen", type=int, default=2, help="experts that a token uses (default: %(default)s)")
    parser.add_argument(
        "--redraw", type=float, default=0.0, help="share of each copy's hidden units that are drawn anew"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the router and of what is drawn anew")
    given = parser.parse_args(arguments)
    in_range("--seed", given.seed, least=0)

    # JAX is imported from here on.
    from jaxrl_llm import tasks
    from jaxrl_llm.config import start_up
    from jaxrl_llm.models import load_pretrained, read_published, save_pretrained, upcycled
    from jaxrl_llm.run.exported import with_tokenizer

    start_up.start_jax()
    model, params = load_pretrained(given.source)
    config, params = upcycled(
        model.config, params, experts=given.experts, chosen=given.chosen, redraw=given.redraw, seed=given.seed
    )
    published = read_published(given.source)
    if "tokenizer.json" not in published.files:  # of a GGUF file
        published = with_tokenizer(published, tasks.load_tokenizer(given.source))
    save_pretrained(params, config, given.to, published=published)
    print(
        f"{given.to} holds a mixture of {config.num_hidden_layers} layers with {given.experts} experts each, of which "
        f"a token uses {given.chosen}: name it as upcycled from {given.source}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
