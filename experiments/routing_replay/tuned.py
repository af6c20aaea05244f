"""Write tuned.json, which `full` reads: for every N and arm the learning rate whose run in `tune` ended highest.

    python experiments/routing_replay/tuned.py runs/routing_replay/tune

Highest in held-out sampled accuracy; a run that diverged counts as 0. A missing run is an error, so that every arm is
tuned with the same budget.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path

from jaxrl_llm.report.comparisons import OUTCOMES
from jaxrl_llm.report.read import load


def tuned(folder: str | Path) -> dict[str, dict[str, float]]:
    """{"N = 8": {"GRPO": 0.0002, ...}, ...} of the sweep in a folder.

    Raises:
        ValueError: a run of the sweep has not ended.
    """
    measured: dict[str, dict[str, dict[float, float]]] = defaultdict(lambda: defaultdict(dict))
    sampled = next(outcome for outcome in OUTCOMES if outcome.name == "held-out sampled, end")
    for run in load(folder).runs:
        if not run.ended:
            raise ValueError(f"{run.workdir} is {run.status}; let the sweep of {folder} end first")
        updates, rate = run.condition.split(", lr ")
        measured[updates][run.arm][float(rate)] = sampled.measure(run)
    best = {n: {arm: max(rates, key=rates.__getitem__) for arm, rates in arms.items()} for n, arms in measured.items()}
    for n, arms in best.items():
        for arm, rate in arms.items():
            if rate in (min(measured[n][arm]), max(measured[n][arm])):
                print(f"{n}, {arm}: {rate:g} is at the edge of what was tried")
    return best


def main() -> None:
    path = Path(__file__).with_name("tuned.json")
    known = json.loads(path.read_text()) if path.exists() else {}
    try:
        path.write_text(json.dumps(known | tuned(sys.argv[1]), indent=1) + "\n")
    except (OSError, ValueError, IndexError) as error:
        sys.exit(f"usage: tuned.py DIR of a finished `tune` ({error})")
    print(path.read_text(), end="")


if __name__ == "__main__":
    main()
