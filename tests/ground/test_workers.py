"""Worker processes: nothing that one started outlives it, however it or the program ends, and its memory is bounded."""

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from jaxrl_llm.ground import machine
from jaxrl_llm.ground.worker_errors import DIED, TIMEOUT
from jaxrl_llm.ground.workers import Pool, Reply
from jaxrl_llm.tasks.verifiers import verifier_pool
from tests.reference import hostile

ROOT = Path(__file__).parents[2]
FORKS = 8
GIB = 2**30


def alive(folder):
    """The processes of `hostile.forks` that still run."""
    return [pid for pid in map(int, os.listdir(folder)) if psutil.pid_exists(pid)]


@pytest.fixture
def pool():
    made = Pool(1, GIB)
    yield made
    made.close()


@pytest.mark.parametrize(("then", "reply"), [("hang", Reply(error=TIMEOUT)), ("die", Reply(error=DIED))])
def test_what_a_worker_started_ends_with_it(pool, tmp_path, then, reply):
    """At a limit of time; and when it dies, although its children hold its pipe open."""
    began = time.monotonic()
    limit = 2.0 if then == "hang" else 100.0
    replies = pool.ask("f", pickle.dumps(hostile.forks), limit, [(str(tmp_path), FORKS, then)])
    assert time.monotonic() - began < 30
    assert replies == [reply]
    assert len(os.listdir(tmp_path)) == FORKS
    assert alive(tmp_path) == []


def test_what_a_worker_started_ends_when_the_pool_closes(pool, tmp_path):
    assert pool.ask("f", pickle.dumps(hostile.forks), 100.0, [(str(tmp_path), FORKS, "return")]) == [Reply("return")]
    assert len(alive(tmp_path)) == FORKS
    pool.close()
    assert alive(tmp_path) == []


@pytest.mark.slow
def test_what_a_worker_started_ends_when_the_program_is_killed(tmp_path):
    script = (
        "import pickle\n"
        "from jaxrl_llm.ground.workers import Pool\n"
        "from tests.reference import hostile\n"
        f"Pool(1, 2**30).ask('f', pickle.dumps(hostile.forks), 100.0, [({str(tmp_path)!r}, {FORKS}, 'hang')])\n"
    )
    program = subprocess.Popen([sys.executable, "-c", script])
    until = time.monotonic() + 60
    while len(os.listdir(tmp_path)) < FORKS and time.monotonic() < until:
        time.sleep(0.02)
    started = psutil.Process(program.pid).children(recursive=True)
    program.send_signal(signal.SIGKILL)
    program.wait()
    psutil.wait_procs(started, timeout=30)
    while alive(tmp_path) and time.monotonic() < until:
        time.sleep(0.02)
    assert len(os.listdir(tmp_path)) == FORKS
    assert alive(tmp_path) == []
    assert not any(process.is_running() for process in started)


def test_memory_is_bounded(pool):
    replies = pool.ask("f", pickle.dumps(hostile.allocate), 10.0, [(2**20,), (GIB,), (2**21,)])
    assert replies == [Reply(2**20), Reply(error="MemoryError: "), Reply(2**21)]


@pytest.mark.parametrize(
    ("memory", "cores", "most", "each"),
    [(64 * GIB, 4, 4, 8 * GIB), (64 * GIB, 100, 16, 2 * GIB), (8 * GIB, 16, 4, GIB), (GIB, 16, 1, GIB // 2)],
)
def test_the_memory_of_verifiers_is_that_of_all_together(monkeypatch, memory, cores, most, each):
    """Half of the machine's; fewer workers before less than 1 GiB each."""
    monkeypatch.setattr(verifier_pool, "memory_bytes", lambda: memory)
    monkeypatch.setattr(verifier_pool, "usable_cores", lambda: list(range(cores)))
    made = verifier_pool._pool.__wrapped__()
    assert (made._most, made._memory) == (most, each)


def test_the_memory_of_a_container_counts(monkeypatch):
    assert 2**20 < machine.memory_bytes() <= psutil.virtual_memory().total
    texts = {
        "/proc/self/cgroup": "5:memory:/job/1\n3:cpu:/\n0::/user/me\n",
        "/sys/fs/cgroup/memory.max": "max\n",
        "/sys/fs/cgroup/user/memory.max": "5000000\n",
        "/sys/fs/cgroup/memory/job/memory.limit_in_bytes": "4000000\n",
    }

    def read(path):
        if str(path) not in texts:
            raise FileNotFoundError(path)
        return texts[str(path)]

    monkeypatch.setattr(machine.Path, "read_text", read)
    assert machine.memory_bytes() == 4_000_000
    del texts["/sys/fs/cgroup/memory/job/memory.limit_in_bytes"]
    assert machine.memory_bytes() == 5_000_000
    assert machine.free_memory_bytes() == 5_000_000
    texts["/proc/meminfo"] = "MemTotal:  9000000 kB\nMemAvailable:    3000 kB\nHugePages_Free:   0\n"
    texts["/proc/self/status"] = "Name:\tpython\nVmHWM:\t    1500 kB\nVmRSS:\t    1000 kB\n"
    assert machine.free_memory_bytes() == 4000 * 1024
    assert machine.resident_bytes("VmHWM") == 1500 * 1024


def test_a_worker_whose_answer_nobody_reads_ends_without_a_word():
    """The pipe of a program that ends is reset then, not at its end."""
    ours, theirs = multiprocessing.Pipe()
    code = f"from jaxrl_llm.ground.workers import work; work({theirs.fileno()}, 2**33)"
    command = [sys.executable, "-c", code]
    pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, pass_fds=(theirs.fileno(),), cwd=ROOT, start_new_session=True, **pipes) as guard:
        theirs.close()
        ours.send_bytes(pickle.dumps(("load", pickle.dumps(len))))
        assert ours.poll(60)
        ours.close()
        assert (guard.wait(60), guard.stderr.read()) == (0, b"")
