"""The programs that XLA compiles, or reads from its cache, while a test runs."""

import contextlib
from collections.abc import Iterator

import jax
from jax._src import monitoring

_EVENT = "/jax/core/compile/backend_compile_duration"


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """The names of the functions whose programs are made meanwhile, in their order."""
    names: list[str] = []

    def heard(event: str, seconds: float, **told: str | int) -> None:
        if event == _EVENT:
            names.append(str(told.get("fun_name")))

    jax.monitoring.register_event_duration_secs_listener(heard)
    try:
        yield names
    finally:
        monitoring.unregister_event_duration_listener(heard)
