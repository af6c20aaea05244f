"""python -m tests.reference.wrong_inputs [--only WORD ...] [--all]: the table of endings by class."""

import argparse
import collections
import sys
import tempfile
from pathlib import Path

from tests.reference.wrong_inputs.running import BAD, GOOD, Outcome, run
from tests.reference.wrong_inputs.tables import TABLES


def main() -> int:
    parser = argparse.ArgumentParser(description="What the commands say to wrong inputs, by class.")
    parser.add_argument("--only", nargs="+", default=[], help="kinds whose class, words or line hold one of these")
    parser.add_argument("--all", action="store_true", help="print what every kind said")
    given = parser.parse_args()
    chosen = [
        kind
        for kind in TABLES
        if not given.only or any(word in f"{kind.group}: {kind.what} {kind.line}" for word in given.only)
    ]
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        for outcome in run(chosen, Path(folder)):
            outcomes.append(outcome)
            if given.all or outcome.ending in BAD:
                print(told(outcome), flush=True)
    print(table(outcomes))
    return int(any(outcome.ending in BAD for outcome in outcomes))


def told(outcome: Outcome) -> str:
    """A kind and what it ended in, with the end of what it printed."""
    kind = outcome.kind
    said = "\n".join(f"    {line[:400]}" for line in (outcome.error or outcome.printed).splitlines()[-4:])
    wanted = f"{outcome.ending}, {kind.expects} {kind.says!r} wanted, exit code {outcome.code}, {outcome.seconds:.1f} s"
    return f"{kind.group}: {kind.what} ({wanted})\n    $ {kind.line}\n{said}"


def table(outcomes: list[Outcome]) -> str:
    """Kinds of every class by what they ended in, in Markdown."""
    endings = [name for name in (*GOOD, *BAD) if name in GOOD or any(one.ending == name for one in outcomes)]
    groups = list(dict.fromkeys(_class(one) for one in outcomes))
    lines = [f"| class | kinds | {' | '.join(endings)} |", "| -- " * (len(endings) + 2) + "|"]
    for group in [*groups, "all"]:
        counts = collections.Counter(one.ending for one in outcomes if group in (_class(one), "all"))
        shown = " | ".join(str(counts[ending] or "") for ending in endings)
        lines.append(f"| {group} | {counts.total()} | {shown} |")
    return "\n".join(lines)


def _class(outcome: Outcome) -> str:
    return outcome.kind.group.partition(":")[0]


if __name__ == "__main__":
    sys.exit(main())
