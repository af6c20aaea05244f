"""Errors of a call in a worker process, as the texts that callers compare with."""

TIMEOUT = "timeout"
DIED = "the worker died"  # of a crash, or of memory that the system took back


def described(error: Exception) -> str:
    """The type and the text of an exception, cut to a readable length."""
    return f"{type(error).__name__}: {error}"[:500]
