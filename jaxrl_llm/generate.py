"""python -m jaxrl_llm.generate --checkpoint PATH | --workdir DIR [--prompt TEXT] [--chat]: text as it is sampled."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jaxrl_llm.config.command_line import Parser
from jaxrl_llm.config.guard import Guard, command
from jaxrl_llm.config.policy_arguments import add_policy
from jaxrl_llm.ground.terminal import visible

if TYPE_CHECKING:  # whatever imports JAX is imported once the command line is known to be right
    from jaxrl_llm.run.text_generator import TextGenerator


@command
def main(arguments: list[str], guard: Guard) -> int:
    """Answer a prompt or chat; returns the exit code (see command_line.py)."""
    parser = Parser(
        prog="jaxrl-llm generate",
        description="Answer a prompt, or chat, with a checkpoint or the policy of a DIR.\n\n"
        "Without --prompt, --chat and --episode the prompt is read from standard input. For a DIR\n"
        "it is rendered as in training, with the template and the chat of its config.",
    )
    add_policy(parser)
    parser.add_argument("--prompt", help="the text to continue or the question to answer; of a chat its only message")
    parser.add_argument("--chat", action="store_true", help="a chat on the terminal; an empty line or Ctrl-D ends it")
    parser.add_argument("--episode", type=int, help="play held-out prompt N of a DIR with its environment")
    parser.add_argument("--system", default="", help="system message of the chat")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 is greedy; default: 1")
    parser.add_argument("--greedy", action="store_true", help="the most probable token every time: temperature 0")
    parser.add_argument("--top-k", type=int, default=0, help="sample from this many tokens; 0: all")
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="sample from the tokens with this much probability; 1: all"
    )
    parser.add_argument(
        "--min-p", type=float, default=0.0, help="drop tokens below this share of the largest probability; 0: none"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling")
    parser.add_argument("--max-tokens", type=int, help="most tokens of an answer; default: the DIR's bound, or 512")
    given = parser.parse_args(arguments)
    if given.system and not given.chat:
        raise ValueError(f"--system={given.system!r} is part of a chat; give --chat too")

    if given.episode is not None and (given.chat or given.prompt is not None):
        raise ValueError(f"--episode={given.episode} plays a held-out prompt; give no --prompt and no --chat")

    from absl import logging

    from jaxrl_llm.config import start_up
    from jaxrl_llm.rollout.sampling import Sampling
    from jaxrl_llm.run import loaded
    from jaxrl_llm.run.text_generator import TextGenerator

    logging.set_verbosity(logging.ERROR)
    sampling = Sampling(0.0 if given.greedy else given.temperature, given.top_k, given.top_p, given.min_p)
    start_up.start_jax()
    generator = TextGenerator(loaded.from_arguments(given), sampling, given.max_tokens, given.seed)
    if given.chat:
        return _chat(generator, given.system or generator.prompting.system, given.prompt)
    if given.episode is not None:
        _print(generator.episode(given.episode))
        return 0
    _print(generator.answer(_typed(sys.stdin.read) if given.prompt is None else given.prompt))
    return 0


def _chat(generator: "TextGenerator", system: str, prompt: str | None) -> int:
    """A chat on the terminal, or the reply to one message."""
    from jaxrl_llm.tasks import PublishedTokenizer

    if not isinstance(generator.tokenizer, PublishedTokenizer) or not generator.tokenizer.template:
        raise ValueError("--chat needs a tokenizer with a chat template, and this one has none; use --prompt")
    messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
    for said in iter(_read, "") if prompt is None else [prompt]:
        messages.append({"role": "user", "content": said})
        messages.append({"role": "assistant", "content": _print(generator.reply(messages))})
    return 0


def _typed(read: Callable[[], str]) -> str:
    try:
        return read()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"standard input is not {error.encoding} text ({error}); convert it, or use --prompt"
        ) from None


def _read() -> str:
    """The next line of the user; "" at the end."""
    try:
        return _typed(lambda: input("> " if sys.stdin.isatty() else ""))
    except EOFError:
        return ""


def _print(pieces: Any) -> str:
    """Print pieces as they come; returns the whole."""
    whole = ""
    for piece in pieces:
        print(visible(piece), end="", flush=True)
        whole += piece
    print()
    return whole


if __name__ == "__main__":
    sys.exit(main())
