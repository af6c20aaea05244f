"""The keys that the documentation describes: what stands in backticks in the first column of tables."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def documented():
    pages = [(ROOT / "docs" / f"{name}.md").read_text() for name in ("metrics", "preferences")]
    rows = re.findall(r"^\| (`[^|]*`) \|", "\n".join(pages), re.MULTILINE)
    return {key for row in rows for key in re.findall(r"`([^`]+)`", row)}
