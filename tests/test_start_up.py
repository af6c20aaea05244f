import platform
import subprocess
import sys

import pytest

_TWICE = """
import resource
from jaxrl_llm.start_up import start_jax

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
