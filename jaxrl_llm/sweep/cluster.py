"""Hand a sweep's runs to a scheduler through submitit (an optional dependency)."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["submit"]


def submit(
    lines: Sequence[str],
    workdir: str | os.PathLike[str],
    *,
    cluster: str | None,
    cores_per_run: int,
    minutes: float | int,
) -> list[Any]:
    """Submit one job a command line as an array and return the submitit jobs.

    Args:
        lines: shell lines, as in commands.txt.
        workdir: the sweep's DIR; logs of the scheduler go to its folder `submitit`.
        cluster: submitit's executor: slurm, local or debug; None lets submitit find out.
        cores_per_run: cores of each job.
        minutes: expected minutes of a run; the job may take three times as long.

    Raises:
        ModuleNotFoundError: submitit is not installed.
    """
    try:
        import submitit
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("launcher=submitit needs submitit; install jaxrl_llm[cluster]") from error
    executor = submitit.AutoExecutor(folder=Path(workdir) / "submitit", cluster=cluster)
    executor.update_parameters(timeout_min=max(int(3 * minutes), 10), cpus_per_task=cores_per_run, name="jaxrl_llm")
    with executor.batch():
        return [executor.submit(submitit.helpers.CommandFunction(["bash", "-c", line])) for line in lines]
