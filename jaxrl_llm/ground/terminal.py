"""Text of others on the terminal."""

import re
import textwrap

# Control characters but newline and tab; what ends a line or turns its direction; halves of surrogate pairs.
_STEERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    r"""The text with what could steer a terminal written out (`\x1b`); newline, tab and all ordinary text stay."""
    return _STEERS.sub(lambda found: f"\\x{ord(found[0]):02x}" if found[0] < "\u0100" else ascii(found[0])[1:-1], text)


def one_line(text: str, width: int) -> str:
    """The text in a line of at most `width` characters that cannot steer a terminal; a long one keeps both ends."""
    line = visible(text).replace("\n", "\\n").replace("\t", "\\t")
    start = (width - 5) // 2
    return line if len(line) <= width else f"{line[:start]} ... {line[start + 5 - width :]}"


def said_in_one_line(error: BaseException, most: int = 300) -> str:
    """The message of an error, else its type, in one line of at most `most` characters."""
    return (" ".join(str(error).split()) or type(error).__name__)[:most]


def wrapped(text: str, width: int) -> str:
    """The text with its lines broken at words, later parts indented by two; no word is broken, which may be a path."""
    how = {"subsequent_indent": "  ", "break_long_words": False, "break_on_hyphens": False}
    return "\n".join(textwrap.fill(line, width, **how) if len(line) > width else line for line in text.split("\n"))
