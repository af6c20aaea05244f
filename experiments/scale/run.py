"""The plan of one workload.

python -m experiments.scale.run 30b-v5p [--layers 2] [--only update] [--rollout-mesh 1 1 1 64] [--json OUT]
"""

import argparse
import sys
from pathlib import Path

from experiments.scale.hlo_table import as_rows, plan, table
from experiments.scale.workloads import WORKLOADS, settings_of
from jaxrl_llm.plan import PROGRAMS
from jaxrl_llm.plan.chips import compilers_to_a_file
from jaxrl_llm.plan.table import as_json


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--layers", type=int, help="of the model, instead of all")
    parser.add_argument("--only", nargs="*", default=(), choices=PROGRAMS)
    parser.add_argument("--rollout-mesh", type=int, nargs="+", default=(), help="sample on a mesh of its own")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    workload = WORKLOADS[given.workload]
    try:
        with compilers_to_a_file() as log:
            made = plan(settings_of(workload, given.layers, tuple(given.rollout_mesh)), workload.topology, given.only)
    except (ImportError, ValueError) as error:  # a compiler that is not installed, a mesh that does not fit
        sys.exit(f"error: {error}")
    print(f"{table(made)}\nthe compiler's messages: {log}")
    if given.json:
        given.json.write_text(as_json(made, as_rows(made)))


if __name__ == "__main__":
    main()
