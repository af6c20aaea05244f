"""A process that has imported every module of a tree, and forks for each command that it is sent.

    PYTHONPATH=TREE python worker.py   (a job in JSON on each line of standard input; a reply on standard output)

Imports take seconds, a refusal a tenth of one. No array is made before the fork: JAX starts its backend in the child.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import pkgutil
import resource
import select
import signal
import sys
import threading
import time
from typing import Any

# Of permission bits root takes no notice while it has these two: to read and to write what it may not.
_READ_AND_WRITE_ALL, _CAPABILITIES_VERSION = 0b110, 0x20080522
_MEMORY = 12 * 2**30  # of addresses: what would take more must not take the machine's


def import_all() -> None:
    """What the commands import once their arguments are read."""
    package = importlib.import_module("jaxrl_llm")
    for module in pkgutil.walk_packages(package.__path__, "jaxrl_llm."):
        with contextlib.suppress(ImportError):  # of an optional library
            importlib.import_module(module.name)


def _bind_by_permissions() -> None:
    """Make permission bits hold for this process, though it be root's."""
    libc, header = ctypes.CDLL(None), (ctypes.c_uint32 * 2)(_CAPABILITIES_VERSION, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; then their upper halves
    if libc.capget(header, sets) == 0:
        sets[0] &= ~_READ_AND_WRITE_ALL
        sets[1] &= ~_READ_AND_WRITE_ALL
        libc.capset(header, sets)


def _child(job: dict[str, Any]) -> int:
    """The command as in a process of its own; returns its exit code."""
    os.setsid()
    modes = {"in": os.O_RDONLY, "out": os.O_WRONLY, "err": os.O_WRONLY}
    for number, (name, mode) in enumerate(modes.items()):
        os.dup2(os.open(f"{job['streams']}/{name}", mode), number)
    sys.stdin = open(0, closefd=False)
    os.chdir(job["folder"])
    os.environ.update(job["environment"])
    sys.path[0] = job["folder"]  # as under `python -m`
    sys.argv = [job["module"], *job["arguments"]]
    _bind_by_permissions()
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    if job["most_bytes"]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (job["most_bytes"],) * 2)
    return importlib.import_module(job["module"]).main()


def _leave(code: int) -> None:
    """The end of a process as Python makes it, but for the modules, which it would take apart one by one."""
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


def _end_of(child: int, seconds: float) -> int | None:
    """The exit code, negative for a signal; None if it had to be killed. Nothing that it started stays."""
    ended, _, _ = select.select([os.pidfd_open(child)], [], [], seconds)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code if ended else None


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    sys.path.insert(0, "")
    import_all()
    gc.freeze()  # so that collections in a child do not copy its pages
    print("ready", file=replies, flush=True)
    for line in iter(sys.stdin.readline, ""):
        job, start = json.loads(line), time.monotonic()
        child = os.fork()
        if not child:
            replies.close()
            _leave(_child(job))
        code = _end_of(child, job["seconds"])
        print(json.dumps({"code": code, "seconds": time.monotonic() - start}), file=replies, flush=True)


if __name__ == "__main__":
    main()
