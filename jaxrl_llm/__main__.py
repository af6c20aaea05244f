"""jaxrl-llm COMMAND ..., the same as python -m jaxrl_llm COMMAND ...: every command by one name."""

import importlib
import os
import sys
from collections.abc import Sequence

from jaxrl_llm.config.command_line import Parser

# A command is a module with main(arguments) -> exit code.
COMMANDS = {
    "train": ("jaxrl_llm.main", "start or resume a training run"),
    "check": ("jaxrl_llm.check.__main__", "rehearse a run: what is doubtful before it starts"),
    "evaluate": ("jaxrl_llm.evaluation", "pass@1, pass@k and samples of any DIR or checkpoint"),
    "generate": ("jaxrl_llm.generate", "answer a prompt or chat, with any DIR or checkpoint"),
    "export": ("jaxrl_llm.export", "write the policy of a DIR in the Hugging Face layout"),
    "upcycle": ("jaxrl_llm.upcycle", "make a mixture of experts out of a dense checkpoint"),
    "sweep": ("jaxrl_llm.sweep.__main__", "run or resume many configs"),
    "plan": ("jaxrl_llm.plan.__main__", "memory and time of a config on TPUs or GPUs, without having them"),
    "audit": ("jaxrl_llm.audit.__main__", "which objective gives the loss of another stack's batch"),
    "report": ("jaxrl_llm.report.__main__", "tables, plots and one page of one or many DIRs"),
    "compare": ("jaxrl_llm.report.compare", "DIRs side by side: configs, scores, curves and answers"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the first argument names; returns the exit code (see command_line.py)."""
    typed = sys.argv[1:] if arguments is None else list(arguments)
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())  # as under `python -m`, so that the user's modules are importable
    listed = "\n".join(f"  {name:<10}{what}" for name, (_, what) in COMMANDS.items())
    parser = Parser(
        prog="jaxrl-llm",
        description=f"Policy optimisation of language models in JAX.\n\ncommands:\n{listed}",
        epilog="arguments of a command: jaxrl-llm COMMAND --help",
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=" | ".join(COMMANDS))
    given = parser.parse_args(typed[:1])
    if arguments is None:
        del sys.argv[1]  # so that the command takes the rest as its own process does
    return importlib.import_module(COMMANDS[given.command][0]).main(None if arguments is None else typed[1:])


if __name__ == "__main__":
    sys.exit(main())
