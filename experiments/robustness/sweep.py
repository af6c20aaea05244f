"""Two runs of the robustness study: python -m jaxrl_llm.sweep --sweep experiments/robustness/sweep.py:FOLDER ..."""

from pathlib import Path

from experiments.robustness.small import fields
from jaxrl_llm.sweep import Sweep


def get_sweep(variant: str) -> Sweep:
    """Runs whose data and warm start lie in the folder `variant`."""
    given = {name: str(value) if isinstance(value, Path) else value for name, value in fields(Path(variant)).items()}
    runs = [{"arm": "DAPO", "seed": seed, **given} for seed in (0, 1)]
    return Sweep("Does a sweep outlive SIGKILL?", runs, baseline="DAPO", config="configs/dapo.py:smoke", minutes=0.2)
