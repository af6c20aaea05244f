"""vLLM servers that a run starts on its own machine, in their own environment, and that end with it."""

import collections
import contextlib
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

from absl import logging

from jaxrl_llm.rollout.bounded_http import Fault
from jaxrl_llm.rollout.server import Server

TOKEN = "JAXRL_LLM_TOKEN"  # the variable with what a server must be told by who asks it
_SERVED = Path(__file__).parent / "served"
# What the user has set stays.
_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # without it no verb replaces weights
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
_START_S = 600.0


class Serving:
    """Starts servers of one environment; those it started end with this object, and with the process."""

    def __init__(self, python: str, weights: Path, *, token: str, dtype: str, max_length: int, at_once: int):
        """python: the interpreter of an environment with vLLM, or the folder of the environment.

        weights: the folder of all weights, which the servers remove where this process is killed and cannot.
        token: which they ask for.
        """
        path = Path(python).expanduser()
        self._python = path / "bin" / "python" if path.is_dir() else path
        if not self._python.is_file():
            raise ValueError(
                f"rollout.launch={python!r} is no environment with vLLM; `make vllm` installs one in .venv-vllm "
                "(docs/engines.md)"
            )
        self._told = {"PYTHONPATH": str(_SERVED), "JAXRL_LLM_WEIGHTS": str(weights), TOKEN: token}
        self._options = ["--dtype", dtype, "--max-model-len", str(max_length), "--max-num-seqs", str(at_once)]
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._starts = collections.Counter[str]()
        self._logs = Path(tempfile.mkdtemp(prefix="jaxrl-llm-servers-"))
        self._end = weakref.finalize(self, _end, self._running, self._logs)

    def start(self, server: Server, folder: Path) -> None:
        """Start the server on the checkpoint of a folder, unless it runs, and wait until it answers.

        Raises:
          Fault: it ended, or does not answer in time.
        """
        running = self._running.get(server.address)
        if fresh := running is None or running.poll() is not None:
            if running is not None:
                logging.warning("%s and is started again", self._ended(server.address))
                _let_go(running)
            running = self._running[server.address] = self._started(server.address, folder)
        assert running is not None
        end = time.monotonic() + _START_S
        while not server.healthy():
            if running.poll() is not None:
                if not fresh:  # it was about to end
                    return self.start(server, folder)
                raise Fault(f"{self._ended(server.address)} while it started")
            if time.monotonic() > end:
                raise Fault(
                    f"{server.address} does not answer {_START_S:g} s after its start; see {self._log(server.address)}"
                )
            time.sleep(0.5)

    def close(self) -> None:
        self._end()

    def _started(self, address: str, folder: Path) -> subprocess.Popen[bytes]:
        command = [str(self._python), str(_SERVED / "vllm_launch.py"), "serve", str(folder), *self._options]
        command += ["--host", "127.0.0.1", "--port", address.rpartition(":")[2]]
        environment = {**_ENVIRONMENT, **os.environ, **self._told}
        self._starts[address] += 1
        with self._log(address).open("wb") as said:
            return subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=said, stderr=said, start_new_session=True
            )

    def _ended(self, address: str) -> str:
        log = self._log(address)
        return f"{address} ended ({_first_error(log)}; see {log})"

    def _log(self, address: str) -> Path:
        """Return what the server printed since its last start."""
        return self._logs / f"{address.rpartition(':')[2]}-{self._starts[address]}.log"


def addresses(given: Sequence[str]) -> list[str]:
    """The addresses as they are, or one of this machine with a free port."""
    if given:
        return list(given)
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return [f"http://127.0.0.1:{probe.getsockname()[1]}"]


def _end(running: dict[str, subprocess.Popen[bytes]], logs: Path) -> None:
    """Close the pipe that each server waits at, which ends it and all that it started; logs of faults stay."""
    if all(process.poll() is None for process in running.values()):
        shutil.rmtree(logs, ignore_errors=True)
    for process in running.values():
        _let_go(process)
    for process in running.values():
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)


def _let_go(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()


def _first_error(log: Path) -> str:
    """The cause: what follows from it comes later, and what a warning fears is none."""
    text = log.read_text(errors="replace")
    found = re.search(r"^(?!.*\bWARNING\b).*?(\b[A-Z]\w*Error: .*)", text, re.MULTILINE)
    return (found[1] if found else (text.splitlines() or ["it said nothing"])[-1]).strip()[:300]
