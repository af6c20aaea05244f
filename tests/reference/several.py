"""Several real processes on this machine, with four devices together; gloo carries their collectives."""

import dataclasses
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

DEVICES = 4
SIGTERM_IS_JAXS = """
import signal
own = signal.signal
signal.signal = lambda number, handler: None if number == signal.SIGTERM else own(number, handler)
"""  # in Python: what a process runs first that leaves the signal to the listener of JAX's preemption service


@dataclasses.dataclass
class Job:
    """Processes of one command, each with its output in a file; as a context manager it ends them."""

    folder: Path
    members: list[subprocess.Popen]

    def printed(self, index: int) -> str:
        return (self.folder / f"{index}.txt").read_text()

    def wait_for(self, text: str, index: int = 0, timeout: float = 1800) -> None:
        """Until process `index` has printed a text."""
        end = time.monotonic() + timeout
        while text not in self.printed(index):
            assert self.members[index].poll() is None, self.printed(index)
            assert time.monotonic() < end, self.printed(index)
            time.sleep(0.05)

    def codes(self, timeout: float = 1800, of: Sequence[int] | None = None) -> list[int]:
        """The exit codes of all processes, or of some of them."""
        members = self.members if of is None else [self.members[i] for i in of]
        end = time.monotonic() + timeout
        return [member.wait(max(0.1, end - time.monotonic())) for member in members]

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *error: object) -> None:
        for member in self.members:
            member.kill()
            member.wait()


def start(folder: Path, count: int, *arguments: Sequence[str]) -> Job:
    """`python ARGUMENTS --coordinator ... --processes COUNT --process INDEX`, or one process without these.

    arguments: of every process in turn, or once for all.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in flag]
    flags.append(f"--xla_force_host_platform_device_count={DEVICES // count}")
    environment = os.environ | {"XLA_FLAGS": " ".join(flags), "PYTHONUNBUFFERED": "1"}
    members = []
    for index in range(count):
        place = [f"--coordinator=localhost:{port}", f"--processes={count}", f"--process={index}"]
        command = [sys.executable, *arguments[min(index, len(arguments) - 1)], *(place if count > 1 else [])]
        with open(folder / f"{index}.txt", "w") as output:
            members.append(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment))
    return Job(folder, members)


def ended(folder: Path, count: int, *arguments: Sequence[str], code: int = 0, timeout: float = 1800) -> Job:
    """`start`, once all have ended with this exit code."""
    with start(folder, count, *arguments) as job:
        assert job.codes(timeout) == [code] * count, "".join(map(job.printed, range(count)))
    return job
