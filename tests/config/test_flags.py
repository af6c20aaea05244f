"""Flags that overlap collectives: chosen by platform, none of the user's is touched, all of them are known."""

import importlib.util
import mmap
import os
import subprocess
import sys
from pathlib import Path

import jaxlib
import pytest

from jaxrl_llm.config import flags


def test_a_cpu_gets_none():
    environment = {"XLA_FLAGS": "--xla_cpu_enable_fast_math=false"}
    assert flags.set_flags("cpu", environment) == ""
    assert environment == {"XLA_FLAGS": "--xla_cpu_enable_fast_math=false"}


@pytest.mark.parametrize(("platform", "variable"), [("tpu", "LIBTPU_INIT_ARGS"), ("gpu", "XLA_FLAGS")])
def test_what_the_user_sets_wins(platform, variable):
    everything = {}
    said = flags.set_flags(platform, everything)
    assert said == f"{variable}='{everything[variable]}'"
    first, *others = everything[variable].split()
    mine = first.replace("=true", "=false")
    for where in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"):
        environment = {where: mine}
        flags.set_flags(platform, environment)
        words = " ".join(environment.values()).split()
        assert [word for word in words if word.startswith(first.partition("=")[0] + "=")] == [mine]
        assert set(words) == {mine, *others}
    assert flags.set_flags(platform, everything) == ""  # a second call adds nothing
    assert flags.set_flags(platform, {"JAXRL_LLM_FLAGS": "none"}) == ""


def test_jaxlib_knows_the_names_of_gpus():
    (given,) = flags.added("gpu", {}).values()
    library = max(Path(jaxlib.__file__).parent.glob("*.so"), key=lambda path: path.stat().st_size)
    with open(library, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        known = {word: content.find(word.strip("-").partition("=")[0].encode()) >= 0 for word in given.split()}
        assert all(known.values()), known
        assert content.find(b"xla_gpu_none_of_it") < 0


def run(program, **environment):
    known = os.environ | {"JAX_PLATFORMS": "cpu"} | environment
    return subprocess.run([sys.executable, "-c", program], env=known, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_xla_knows_the_flags_of_gpus():
    """XLA reads all of its flags on every platform, and ends the process at one that it does not know."""
    (given,) = flags.added("gpu", {}).values()
    program = "import jax; jax.devices(); print('known')"
    assert run(program, XLA_FLAGS=given).stdout == "known\n"
    assert "Unknown flag" in run(program, XLA_FLAGS="--xla_gpu_none_of_it=true").stderr


_COMPILED = """
import os
import jax, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

mesh = Mesh(np.array(topologies.get_topology_desc("v5e:2x2", "tpu").devices), "x")
rows = NamedSharding(mesh, PartitionSpec("x"))
x = jax.ShapeDtypeStruct((1024, 1024), "bfloat16", sharding=rows)
jax.jit(lambda x, w: x @ w @ w, out_shardings=rows).lower(x, x).compile()
print("known")
"""


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="compiling for TPUs is optional: pip install 'jax[tpu]'"
)
def test_libtpu_knows_the_flags_of_tpus():
    (given,) = flags.added("tpu", {}).values()
    quiet = {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_SKIP_MDS_QUERY": "1"}
    assert run(_COMPILED, LIBTPU_INIT_ARGS=given, **quiet).stdout.endswith("known\n")
    assert "Unknown command line flag" in run(_COMPILED, LIBTPU_INIT_ARGS="--xla_tpu_none_of_it=true", **quiet).stderr
