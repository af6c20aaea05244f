"""python -m jaxrl_llm.check --config gspo[:variant] [--topology v5p:4x4x4] [--config.block.field=value ...]"""

import math
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from jaxrl_llm.config.command_line import FAILED, Parser, add_processes, fields_and_rest
from jaxrl_llm.config.guard import Guard, command

if TYPE_CHECKING:
    from jaxrl_llm.check.findings import Finding
    from jaxrl_llm.run.assembly import Run
    from jaxrl_llm.run.blocks import Settings


@command
def main(arguments: list[str], guard: Guard) -> int:
    """Rehearse a run and print what is doubtful; returns the exit code: 1 where a row says stop."""
    from jaxrl_llm.config import loading
    from jaxrl_llm.config.listed import check_names

    parser = Parser(prog="jaxrl-llm check", description="Rehearse two steps of a run on this machine, without a DIR.")
    parser.add_argument("--config", required=True, help="NAME[:variant], or the path of a file with get_config")
    parser.add_argument(
        "--topology", help="chips in place of this machine, such as v5p:4x4x4 or h100:32: nothing is rehearsed"
    )
    parser.add_argument("--trace", action="store_true", help="with --topology: trace, do not compile")
    add_processes(parser)
    fields, rest = fields_and_rest(arguments)
    given = parser.parse_args(rest)
    if given.trace and not given.topology:
        parser.error("--trace is for chips that are named: --topology")
    source = loading.find(given.config)
    check_names(path for path, _ in fields)

    # JAX is imported from here on.
    from jaxrl_llm.check.findings import STOP, table
    from jaxrl_llm.config import start_up
    from jaxrl_llm.records.progress import told
    from jaxrl_llm.run import assembly, joint_start
    from jaxrl_llm.run.settings import validate

    def note(text: str) -> None:
        if start_up.is_first():
            print(text, file=sys.stderr)

    config = loading.load(source, fields)
    settings = validate(config)
    if given.topology:
        findings, answers = _elsewhere(settings, given.topology, note, compiles=not given.trace), ""
    else:
        start_up.start_jax()
        start_up.join(given, settings.processes.start_timeout_s, settings.processes.heartbeat_timeout_s)
        joint_start.check(config.to_dict(), settings, "", restart=True)  # no DIR, and no checkpoint that counts
        _check_devices(settings.mesh.shape, given.config, fields)
        run = assembly.build(settings)
        guard.started = True
        with told(note):
            findings, answers = checked(run, note)
    if start_up.is_first():
        print("\n\n".join(filter(None, [table(findings), answers])))
    return FAILED if any(found.verdict == STOP for found in findings) else 0


def _elsewhere(settings: "Settings", topology: str, note: Callable[[str], None], compiles: bool) -> "list[Finding]":
    """Return the rows for chips that are not here; what their compiler writes goes to a file."""
    from absl import logging

    from jaxrl_llm.check.elsewhere import rows
    from jaxrl_llm.plan.chips import compilers_to_a_file

    logging.set_verbosity(logging.WARNING)
    with compilers_to_a_file() as log:
        found = rows(settings, topology, note, compiles)
    if log.stat().st_size:
        note(f"the compiler's messages: {log}")
    return found


def _check_devices(shape: Sequence[int], config: str, fields: Sequence[tuple[str, str]]) -> None:
    """Raise ValueError, with the command for chips that are not here, if the mesh needs more devices than there are."""
    from jaxrl_llm.ground import sharding

    needed, here = math.prod(map(abs, shape)), len(sharding.visible())
    if needed <= here:
        return
    chips = f"h100:{needed if needed < 8 else math.lcm(needed, 8)}"  # whole nodes
    given = [f"--config.{name}={value}" for name, value in fields]
    check = shlex.join(["python", "-m", "jaxrl_llm.check", "--config", config, "--topology", chips, "--trace", *given])
    raise ValueError(
        f"mesh.shape={tuple(shape)} needs {needed} devices, {here} are visible, and a rehearsal takes all of them; for "
        f"memory and time without them: {check}"
    )


def checked(run: "Run", note: Callable[[str], None]) -> "tuple[list[Finding], str]":
    """The rows of a check, and a few answers to read; a run that does not fit the memory is not rehearsed."""
    from jaxrl_llm.check import data_rows, rehearsal_rows
    from jaxrl_llm.check.findings import stopped
    from jaxrl_llm.check.fits import fits
    from jaxrl_llm.check.rehearsal import rehearse

    examples = data_rows.examples_of(run)
    found = data_rows.rows(run, examples)
    try:
        predicted = fits(run, note)
        predicted.check()
    except ValueError as error:
        return [*found, stopped("memory", error)], ""
    rehearsal = rehearse(run, note)
    found += rehearsal_rows.rows(run, rehearsal, examples, predicted)
    return found, rehearsal_rows.shown_answers(run.settings, rehearsal.answers)


if __name__ == "__main__":
    sys.exit(main())
