"""A pytest plugin: no garbage collection while modules are found and their assertions rewritten.

CPython 3.11 loses count of its depth when the collector runs inside ``ast.parse`` (SystemError, "AST constructor
recursion depth mismatch"), and pytest parses every test module and plugin. Named in pyproject.toml's ``addopts``, so
that it is there before any other plugin. Hypothesis may otherwise be parsed at the end of a run; it is imported here.
"""

from __future__ import annotations

import gc

gc.disable()

import hypothesis  # noqa: E402, F401
import pytest  # noqa: E402


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish() -> None:
    """Everything is parsed: collect again, but not what was made so far."""
    gc.freeze()
    gc.enable()
