"""The guards of every test: four devices, strict ranks, checked shapes, no reused key, a warm compiler."""

import contextlib
import gc
import os
from importlib.metadata import version
from pathlib import Path
from unittest import mock

# Before the first import of jax, and in the environment so that processes started by a test inherit it.
os.environ["JAX_PLATFORMS"] = "cpu"
# Compilation dominates these tests: the cheapest code is several times as quick to make and fast enough at tiny shapes.
_FLAGS = "--xla_force_host_platform_device_count=4"
_FLAGS += " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
if version("jaxlib").startswith("0.10."):  # a third of the time; later versions have no such flag
    _FLAGS += " --xla_cpu_use_fusion_emitters=false"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAGS}".strip()
os.environ.setdefault("MPLBACKEND", "agg")
_TESTS = Path(__file__).parent
_HOME = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
_CACHE = Path(os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_HOME / "jaxrl_llm" / "xla-tests")))
# Every program is kept, since most are small: reading one takes a fifth of compiling it. With a bound every write would
# look at all other entries. A file that another worker is still writing fails its checksum: it is compiled instead.
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
os.environ["JAX_COMPILATION_CACHE_MAX_SIZE"] = "-1"
_MOST_BYTES = 2 * 2**30

import hypothesis
import jax
import pytest
from jaxtyping import install_import_hook

# Array types are checked at trace time, in the package only; it must not have been imported yet.
install_import_hook("jaxrl_llm", "beartype.beartype")

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


@pytest.fixture(autouse=True, scope="module")
def _room_for_programs():
    forget_programs()


@pytest.fixture(autouse=True)
def _room_amid_long_tests(request):
    """Of which one file has programs of more than a process may hold."""
    if request.node.get_closest_marker("long"):
        forget_programs()


def forget_programs():
    from jaxrl_llm.ground import machine  # after the import hook

    machine.forget_programs()


# The files that take longest come first: a worker that starts one of them last leaves the others without work.
_LONGEST = [
    "run/test_trainer",
    "test_commands",
    "run/test_reward_model",
    "rollout/test_engine",
    "training/test_step",
    "training/test_replay_everywhere",
    "training/test_routing_replay",
    "sweep/test_sweep",
    "objectives/test_extremes",
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
