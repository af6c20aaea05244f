"""python -m experiments.scale.run 30b-v5p [--layers 2] [--only update] [--json OUT]: the plan of one workload."""

import argparse
from pathlib import Path

from experiments.scale.workloads import WORKLOADS, settings_of
from jaxrl_llm.plan import as_json, plan, table
from jaxrl_llm.planning.programs import PROGRAMS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--layers", type=int, help="of the model, instead of all")
    parser.add_argument("--only", nargs="*", default=(), choices=PROGRAMS)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    workload = WORKLOADS[given.workload]
    made = plan(settings_of(workload, given.layers), workload.topology, given.only)
    print(table(made))
    if given.json:
        given.json.write_text(as_json(made))


if __name__ == "__main__":
    main()
