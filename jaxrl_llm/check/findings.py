"""Findings of a check, as rows: what was checked, what was seen, whether that is well, and the remedy."""

import dataclasses
import textwrap
from collections.abc import Sequence

from jaxrl_llm.ground.terminal import visible

OK, LOOK, STOP = "ok", "look", "stop"


@dataclasses.dataclass(frozen=True)
class Finding:
    """look: doubtful; stop: what is trained so would be wrong or nothing."""

    check: str  # at most 16 characters
    seen: str
    verdict: str = OK
    remedy: str = ""


def stopped(check: str, error: ValueError) -> Finding:
    """A row that says stop, with what an error says before its last semicolon and the remedy behind it."""
    seen, _, remedy = str(error).rpartition("; ")
    return Finding(check, seen, STOP, remedy)


def table(findings: Sequence[Finding]) -> str:
    """All rows in 80 columns, a remedy below what it is for, and the count of the verdicts."""
    lines = [f"{'checked':<17}{'':6}seen", "-" * 80]
    for found in findings:
        seen = textwrap.wrap(visible(found.seen), 57)
        remedy = [f"-> {line}" if not i else f"   {line}" for i, line in enumerate(textwrap.wrap(found.remedy, 54))]
        first, *rest = seen + [visible(line) for line in remedy]
        lines += [f"{found.check:<17}{found.verdict:<6}{first}", *(f"{'':23}{line}" for line in rest)]
    count = [sum(found.verdict == verdict for found in findings) for verdict in (OK, LOOK, STOP)]
    return "\n".join([*lines, "-" * 80, "{} ok, {} to look at, {} to stop for".format(*count)])
