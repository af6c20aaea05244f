"""The guards of every test: four devices, strict ranks, checked shapes, no reused key, a warm compiler."""

import os
from pathlib import Path

# Before the first import of jax: these are read once.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4".strip()
os.environ.setdefault("MPLBACKEND", "agg")
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxrl_llm" / "xla"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_CACHE))

import hypothesis
import jax
from jaxtyping import install_import_hook

# Array types are checked at trace time, in the package only; it must not have been imported yet.
install_import_hook("jaxrl_llm", "beartype.beartype")

# An advantage [b] times a ratio [b t] broadcasts silently where b == t.
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_debug_key_reuse", True)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
# With a bound, entries are written under a lock, so that parallel runs may share the cache.
jax.config.update("jax_compilation_cache_max_size", 4 * 2**30)

# The first example of a shape compiles: no deadline. The same examples on every machine: a failure can be repeated.
hypothesis.settings.register_profile("jaxrl_llm", deadline=None, derandomize=True, max_examples=25)
hypothesis.settings.load_profile("jaxrl_llm")
