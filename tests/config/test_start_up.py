import os
import platform
import subprocess
import sys

import pytest

_TWICE = """
import resource
from jaxrl_llm.config.start_up import start_jax

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    b"x" * 2**26  # 16384 pages
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


start_jax()
faults()
print(faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told to keep freed memory")
def test_freed_memory_is_used_again(tmp_path):
    run = subprocess.run([sys.executable, "-c", _TWICE], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 1000


_CACHE = """
import os, sys, jax
from jaxrl_llm.config.start_up import start_jax

for _ in range(2):
    start_jax()
    print(jax.config.jax_compilation_cache_max_size, os.listdir(sys.argv[1]))
    os.environ.pop("JAX_COMPILATION_CACHE_MAX_SIZE", None)
"""


def test_the_environment_decides_about_the_compilation_cache(tmp_path):
    """With a bound, an entry without its time of access is removed: it would stop all writes. Else none has one."""
    (tmp_path / "one-cache").write_bytes(b"")
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "JAX_COMPILATION_CACHE_MAX_SIZE": "-1"}
    command = [sys.executable, "-c", _CACHE, str(tmp_path)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == ["-1 ['one-cache']", f"{4 * 2**30} ['.lockfile']"]
