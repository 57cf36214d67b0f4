"""The page that says what works is the one that the tests make."""

from __future__ import annotations

import support


def test_the_support_page_is_current() -> None:
    assert support.PAGE.read_text() == support.page(), "run python tests/support.py"
