"""python -m jaxrl_llm.sweep --sweep FILE[:variant] --workdir DIR: run or resume a sweep."""

import sys

from jaxrl_llm.sweep.run_sweep import main

__all__ = ["main"]


if __name__ == "__main__":
    sys.exit(main())
