"""Every family is trained from a tiny checkpoint, with replay, on a mesh, resumed and exported, as the page says."""

import re
from pathlib import Path

import pytest

from jaxrl_llm.models.checkpoints.family_table import FAMILIES
from tests.reference.trained_families import GOLDENS, ONE_EACH, trained

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("family", GOLDENS)
def test_ten_steps(tmp_path, family):
    """Sampler and trainer agree to 1e-5 on every token and choose the same experts; parameters move."""
    found = trained(family, tmp_path)
    assert found.gap < 1e-5
    assert not found.flips
    assert found.moved > 1e-4


def test_the_page_has_numbers_of_families():
    """The script runs one form of each family, and the page's rows are of those and within the bounds above."""
    assert set(ONE_EACH) == set(FAMILIES)
    section = PAGE.read_text().split("## Trained here")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` +\| +(\S+) +\| +(\S*) *\|", section, re.MULTILINE)
    assert rows
    for family, gap, flips in rows:
        assert family in ONE_EACH
        assert float(gap) < 1e-5
        assert flips in ("", "0")
