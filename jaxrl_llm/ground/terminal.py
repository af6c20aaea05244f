"""Text of others on the terminal."""

import re

# Control characters but newline and tab; what ends a line or turns its direction; halves of surrogate pairs.
_STEERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    r"""The text with what could steer a terminal written out (`\x1b`); newline, tab and all ordinary text stay."""
    return _STEERS.sub(lambda found: f"\\x{ord(found[0]):02x}" if found[0] < "\u0100" else ascii(found[0])[1:-1], text)
