"""A process that takes runs of a sweep one after the other: what JAX has traced and compiled serves the next one too.

    python -m jaxrl_llm.sweep.worker MODULE

A line of standard input is a run, JSON with the `arguments` of MODULE.main and the `log` that takes its output; the
answer is a line with its exit code. It ends with its standard input, and by a signal as the command itself does.
"""

import importlib
import json
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from jaxrl_llm.ground.signals import end_at_once


def main() -> None:
    end_at_once()
    with os.fdopen(os.dup(0)) as asked, os.fdopen(os.dup(1), "w", buffering=1) as answers:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # nothing in a run reads what the next ones are
        terminal = os.dup(2)
        for line in asked:
            run = json.loads(line)
            with open(run["log"], "ab") as log:
                _print_to(log.fileno())
            program = importlib.import_module(sys.argv[1])
            code = _exit_code(program, run["arguments"])
            _print_to(terminal)
            _forget()
            answers.write(f"{code}\n")


def _print_to(file: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)


def _exit_code(program: Any, arguments: Sequence[str]) -> int:
    """Return the exit code that the run's process alone would have had."""
    try:
        return program.main(arguments)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception:
        traceback.print_exc()
        return 1


def _forget() -> None:
    """Room for further programs: imported here, since a program of the tests needs no JAX."""
    if "jax" in sys.modules:
        from jaxrl_llm.ground.machine import forget_programs

        forget_programs()


if __name__ == "__main__":
    main()
