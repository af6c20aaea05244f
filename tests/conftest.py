"""The guards of every test: four devices, strict ranks, checked shapes, no reused key, a warm compiler."""

import contextlib
import functools
import gc
import os
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

# Before the first import of jax, and in the environment so that processes started by a test inherit it.
os.environ["JAX_PLATFORMS"] = "cpu"
# Compilation dominates these tests: the cheapest code is several times as quick to make and fast enough at tiny shapes.
_FLAGS = "--xla_force_host_platform_device_count=4"
_FLAGS += " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
_MEASURED = version("jaxlib").startswith("0.10.")
# A third of the time; later versions have no such flag, and libtpu ends a process with a flag that it does not know.
if _MEASURED and find_spec("libtpu") is None:
    _FLAGS += " --xla_cpu_use_fusion_emitters=false"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAGS}".strip()
os.environ.setdefault("MPLBACKEND", "agg")
_TESTS = Path(__file__).parent
_HOME = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
_CACHE = Path(os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_HOME / "jaxrl_llm" / "xla-tests")))
# Where in the source an operation stands costs a twentieth of tracing and is read by no test.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
# Every program is kept, since most are small: reading one takes a fifth of compiling it. With a bound every write would
# look at all other entries. A file that another worker is still writing fails its checksum: it is compiled instead.
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
os.environ["JAX_COMPILATION_CACHE_MAX_SIZE"] = "-1"
_MOST_BYTES = 2 * 2**30

import hypothesis
import jax
import pytest

from tests.reference import shape_checks

# Each program is lowered in an MLIR context of its own, which costs half of what the lowering of a small one takes.
if _MEASURED:
    from jax._src.interpreters import mlir

    mlir.make_ir_context = functools.cache(mlir.make_ir_context)

# Array types are checked at trace time, in the package only; it must not have been imported yet.
shape_checks.install("jaxrl_llm")

# An advantage [b] times a ratio [b t] broadcasts silently where b == t.
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_debug_key_reuse", True)

# Tracing makes objects by the million and hardly a cycle: looking for them as often as usual costs a twentieth.
gc.set_threshold(200_000, 20, 100)

# The first example of a shape compiles: no deadline. The same examples on every machine: a failure can be repeated.
# The slow tests draw more: `make test-slow` takes the second profile and all properties.
for _profile, _examples in {"quick": 10, "thorough": 50}.items():
    hypothesis.settings.register_profile(_profile, deadline=None, derandomize=True, max_examples=_examples)
hypothesis.settings.load_profile("quick")


@pytest.fixture(autouse=True, scope="session")
def _figures_as_png_only():
    """SVG and PDF take most of the time of a report; report/test_files.py writes them."""
    with mock.patch("jaxrl_llm.report.page.save_vectors"):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What all tests of a file share, such as data and warm starts."""
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(autouse=True, scope="module")
def _room_for_programs():
    forget_programs()


@pytest.fixture(autouse=True)
def _room_amid_slow_tests(request):
    """The slow tests of one file may have programs of more than a process may hold."""
    if request.node.get_closest_marker("slow"):
        forget_programs()


def forget_programs():
    from jaxrl_llm.ground import machine  # after the import hook

    machine.forget_programs()


# The files that take longest come first: a worker that starts one of them last leaves the others without work.
_LONGEST = [
    "test_page_runs",
    "run/test_several_processes",
    "run/test_vllm",
    "run/test_trainer",
    "run/test_best_so_far",
    "sweep/test_sweep",
    "sweep/test_branching",
    "test_commands",
    "run/test_reward_model",
    "rollout/test_engine",
    "training/test_step",
    "training/test_routing_replay",
    "models/test_transformer",
    "models/test_experts",
    "models/test_families",
    "report/test_report",
]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    place = {_TESTS / f"{name}.py": number for number, name in enumerate(_LONGEST)}
    assert all(path.exists() for path in place), "correct _LONGEST"
    items.sort(key=lambda item: place.get(item.path, len(place)))


def pytest_sessionstart():
    """The oldest programs are forgotten once they are many."""
    _CACHE.mkdir(parents=True, exist_ok=True)
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    with contextlib.suppress(FileNotFoundError):  # another session forgets them
        entries = sorted((path.stat().st_mtime, path) for path in _CACHE.glob("*-cache"))
        excess = sum(path.stat().st_size for _, path in entries) - _MOST_BYTES
        for _, path in entries:
            if excess <= 0:
                break
            excess -= path.stat().st_size
            path.unlink()
