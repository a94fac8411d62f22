"""Exceptions that were handled, and the frames they came through."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable

import pytest

from appliance.common.tracebacks import forget_frames


class Held:
    """Something that a frame has."""


def plain(error: ValueError) -> None:
    """Raise it."""
    raise error


def context(error: ValueError) -> None:
    """Raise another while it is handled."""
    try:
        raise error
    except ValueError:
        raise KeyError("another") from None


def cause(error: ValueError) -> None:
    """Raise another because of it."""
    raise KeyError("another") from error


def group(error: ValueError) -> None:
    """Raise it in a group."""
    raise ExceptionGroup("several", [error])


def circle(error: ValueError) -> None:
    """Raise it as the cause of its own cause."""
    error.__cause__ = KeyError("another")
    error.__cause__.__cause__ = error
    raise error


@pytest.mark.parametrize("raised", [plain, context, cause, group, circle])
def test_frames_of_a_handled_exception_are_freed_at_once(raised: Callable[[ValueError], None]) -> None:
    """What a frame has that refers to its own exception, as a task's frame does, is freed without the collector, in
    whichever way the exception that is handled refers to that one; before, it is there (control)."""
    seen: list[weakref.ref[Held]] = []

    def fail() -> None:
        error, held = ValueError("one"), Held()
        seen.append(weakref.ref(held))
        try:
            raise error  # its traceback has this frame, which has it
        except ValueError:
            raised(error)

    gc.disable()
    try:
        try:
            fail()
        except (ValueError, KeyError, ExceptionGroup) as handled:
            assert seen[0]() is not None
            forget_frames(handled)
        assert seen[0]() is None
    finally:
        gc.enable()


def test_without_that_they_wait_for_the_collector() -> None:
    """Control: what such a frame has outlives the handler."""
    seen: list[weakref.ref[Held]] = []

    def fail() -> None:
        error, held = ValueError("one"), Held()
        seen.append(weakref.ref(held))
        raise error

    gc.disable()
    try:
        with contextlib.suppress(ValueError):
            fail()
        assert seen[0]() is not None
    finally:
        gc.enable()
    gc.collect()
    assert seen[0]() is None
