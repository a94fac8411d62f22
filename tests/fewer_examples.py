"""A pytest plugin: tests of drawn examples draw a third of them where full counts are left out.

Most of them draw others in each run, so that what one run leaves out another has, and `make verify` draws all. Tests
of the wire (``tests/isolation``) and of damaged bytes (``tests/fuzz``) keep their counts: they are the first line of
what keeps tenants and sandboxes apart.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

WITHOUT_FULL = "not full"
"""The selection of `make test`."""

SHARE = 3
"""Of so many examples one is drawn."""

LEAST = 10
"""Examples below which a count stays as it is."""

KEPT = tuple(Path(__file__).parent / name for name in ("isolation", "fuzz"))
"""Folders whose tests draw all."""

SETTINGS = "_hypothesis_internal_use_settings"
"""Where Hypothesis keeps what a test was decorated with."""


def fewer(count: int) -> int:
    """How many examples of so many are drawn."""
    return min(count, max(LEAST, count // SHARE))


def reduce(test: object) -> None:
    """Lower the count of one test function, if it draws examples."""
    given = getattr(test, SETTINGS, None)
    if isinstance(given, settings):
        setattr(test, SETTINGS, settings(given, max_examples=fewer(given.max_examples)))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Reduce each function once: a test with parameters is several items."""
    if config.option.markexpr != WITHOUT_FULL:
        return
    found = {}
    for item in items:
        if not any(item.path.is_relative_to(folder) for folder in KEPT):
            test = getattr(getattr(item, "obj", None), "__func__", getattr(item, "obj", None))
            found[id(test)] = test
    for test in found.values():
        reduce(test)
