"""Run kinds through their commands, two at a time, and tell what each ended in."""

import contextlib
import json
import os
import queue
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from tests.reference.wrong_inputs import Kind, valid

ROOT = Path(__file__).parents[3]
MODULES = {
    "train": "jaxrl_llm.main",
    "check": "jaxrl_llm.check.__main__",
    "evaluate": "jaxrl_llm.evaluation",
    "generate": "jaxrl_llm.generate",
    "export": "jaxrl_llm.export",
    "upcycle": "jaxrl_llm.upcycle",
    "sweep": "jaxrl_llm.sweep.__main__",
    "branch": "jaxrl_llm.sweep.branching",
    "plan": "jaxrl_llm.plan.__main__",
    "audit": "jaxrl_llm.audit.__main__",
    "report": "jaxrl_llm.report.__main__",
    "compare": "jaxrl_llm.report.compare",
}
GOOD = ("line", "warning", "runs")
# What is not as it should be: a line that does not name what is wrong, or has another exit code; one where the input
# is harmless; and what else a command can end in.
BAD = ("vague", "refused", "many lines", "traceback", "silent", "hang")
_SECONDS = 100.0
_FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"  # to compile in less time


class Outcome(NamedTuple):
    """What a kind ended in."""

    kind: Kind
    ending: str
    code: int | None
    printed: str
    error: str
    seconds: float


def run(kinds: Sequence[Kind], folder: Path, preload: bool = True) -> Iterator[Outcome]:
    """The outcome of every kind, in order, each in a folder of its own below `folder`, which is made for it.

    preload: in processes that have imported all that commands need; otherwise every kind must be `alone`.
    """
    environment = _environment(folder)
    with contextlib.ExitStack() as stack:
        workers: queue.Queue[Any] = queue.Queue()
        for _ in range(2 if preload else 0):
            workers.put(stack.enter_context(_worker(environment)))
        for worker in list(workers.queue):
            assert worker.stdout.readline() == "ready\n", "a worker cannot import jaxrl_llm"

        def one(job: dict[str, Any], place: Path) -> dict[str, Any]:
            worker = workers.get()
            try:
                return _asked(worker, job, place)
            finally:
                workers.put(worker)

        if preload:
            valid.make(folder / "valid", lambda line, place: one(_job(Kind("", "", line), place), place))

        def outcome(number: int) -> Outcome:
            kind, place = kinds[number], folder / f"{number:03}"
            _lay_out(kind, folder / "valid", place / "here")
            job = _job(kind, place / "here")
            ended = _in_a_process(job, place, environment) if kind.alone else one(job, place)
            out, err = ((place / name).read_text(errors="replace") for name in ("out", "err"))
            shutil.rmtree(place, onerror=_writable)
            return Outcome(kind, ending(kind, ended["code"], out, err), ended["code"], out, err, ended["seconds"])

        with ThreadPoolExecutor(2) as two:
            yield from two.map(outcome, range(len(kinds)))


def _environment(folder: Path) -> dict[str, str]:
    """One for all: a cache folder of these kinds, and compiled programs where the tests keep theirs."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxrl_llm" / "xla-tests"
    own = {
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": _FLAGS,
    }
    own |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
    own |= {"JAX_COMPILATION_CACHE_MAX_SIZE": "-1", "MPLBACKEND": "agg", "HF_HUB_OFFLINE": "1", "COLUMNS": "120"}
    return os.environ | {"JAX_COMPILATION_CACHE_DIR": str(cache)} | own


@contextlib.contextmanager
def _worker(environment: dict[str, str]) -> Iterator[Any]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": "/"}
    command = [sys.executable, str(Path(__file__).with_name("worker.py"))]
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, **pipes) as worker:
        try:
            yield worker
        finally:
            worker.kill()


def _job(kind: Kind, place: Path) -> dict[str, Any]:
    command, *arguments = shlex.split(kind.line)
    job = {"module": MODULES[command], "arguments": arguments, "folder": str(place), "seconds": _SECONDS}
    return job | {
        "streams": str(place.parent),
        "environment": dict(kind.environment),
        "most_bytes": kind.most_bytes,
    }


def _asked(worker: Any, job: dict[str, Any], place: Path) -> dict[str, Any]:
    """The reply of a worker; what the command printed is in files beside the folder where it ran."""
    streams = Path(job["streams"])
    for name in ("in", "out", "err"):
        (streams / name).write_text("")
    worker.stdin.write(f"{json.dumps(job)}\n")
    worker.stdin.flush()
    return json.loads(worker.stdout.readline())


def _in_a_process(job: dict[str, Any], place: Path, environment: dict[str, str]) -> dict[str, Any]:
    command = [sys.executable, "-m", job["module"].removesuffix(".__main__"), *job["arguments"]]
    with open(place / "out", "w") as out, open(place / "err", "w") as err:
        try:
            code = subprocess.run(
                command,
                cwd=job["folder"],
                env=environment | job["environment"],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                timeout=_SECONDS,
            ).returncode
        except subprocess.TimeoutExpired:
            code = None
    return {"code": code, "seconds": 0.0}


def _lay_out(kind: Kind, originals: Path, here: Path) -> None:
    """The folder in which the command runs: copies of the valid inputs that it names, with the kind's changes."""
    here.mkdir(parents=True)
    named = f" {kind.line} {' '.join(kind.files)}"
    for original in originals.iterdir() if originals.is_dir() else ():
        if re.search(rf"(?<![\w./-]){re.escape(original.name)}(?![\w-])", named):
            (shutil.copytree if original.is_dir() else shutil.copy)(original, here / original.name)
    for name, change in kind.files.items():
        path = here / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if callable(change):
            change(path)
        elif change is None:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        else:
            path.write_bytes(change.encode() if isinstance(change, str) else change)


def _writable(remove: Any, path: str, _: Any) -> None:
    """Remove what its folder's permissions protect."""
    os.chmod(Path(path).parent, 0o700)
    os.chmod(path, 0o700)
    remove(path)


def ending(kind: Kind, code: int | None, out: str, err: str) -> str:
    """One of GOOD or BAD."""
    if code is None:
        return "hang"
    if code < 0 or code == 70 or "Traceback (most recent call last)" in out + err:
        return "traceback"
    if code == 0 and kind.expects == "line":
        return "silent"
    if code == 0:
        return kind.expects if kind.says in out + err else "silent"
    if kind.expects != "line":
        return "refused"
    lines = [line for line in err.splitlines() if not line.startswith(("warning", "waiting for other processes"))]
    if [line.startswith("error: ") for line in lines] != [True]:
        return "many lines"
    return "line" if kind.says in err and code == kind.code else "vague"
