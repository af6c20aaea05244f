"""Lengths are rounded up to a few widths: a program compiles once for each."""

__all__ = ["bucket"]


def bucket(longest: int, time: int, buckets: int) -> int:
    """The smallest of `buckets` equal divisions of `time` that holds the longest row."""
    step = -(-time // buckets)
    return min(time, -(-max(longest, 1) // step) * step)
