"""The keys that docs/metrics.md describes: what stands in backticks in the first column of its tables."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def documented():
    rows = re.findall(r"^\| (`[^|]*`) \|", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE)
    return {key for row in rows for key in re.findall(r"`([^`]+)`", row)}
