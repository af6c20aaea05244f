"""The page of audited captures says what `audit` says."""

import pytest

from tests.reference.audited_page import CAPTURES, PAGE, text, without_rounding


@pytest.mark.slow
def test_the_page_is_what_audit_prints():
    page = PAGE.read_text()
    assert without_rounding(page) == without_rounding(text())
    assert page.count("no fault found") == len(CAPTURES) == 5
