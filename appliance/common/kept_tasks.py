"""Tasks that run as long as a process serves. None ends unseen: its end is logged, and told to the process, which ends
too where it is no use without it; what starts it again serves better than half a process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any

import structlog

log = structlog.get_logger()

ENDED = "it ended, and it should not have"
"""Why a task failed that has returned."""


def log_failure(task: asyncio.Task[Any]) -> None:
    """Log the failure of a task that is not awaited."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a task failed", task=task.get_name(), error=repr(error), exc_info=error)


def kept_task(work: Coroutine[Any, Any, None], name: str, failed: Callable[[str], None]) -> asyncio.Task[None]:
    """Start work whose failure is logged and told to ``failed`` in one line; it may end well at any time."""

    def note(task: asyncio.Task[None]) -> None:
        log_failure(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            failed(f"{name} failed: {error!r}")

    task = asyncio.create_task(work, name=name)
    task.add_done_callback(note)
    return task


@contextlib.contextmanager
def kept(works: Mapping[str, Coroutine[Any, Any, None]], failed: Callable[[str], None]) -> Iterator[None]:
    """Run work beside the block until its end; to be entered in the event loop.

    Args:
        works: what runs until it is cancelled, by its name.
        failed: told in one line when one of them has ended before, with an error or without.
    """
    open_to_failures = True

    def note(task: asyncio.Task[None]) -> None:
        if not open_to_failures:
            return
        log_failure(task)
        error = None if task.cancelled() else task.exception()
        failed(f"{task.get_name()} failed: {ENDED if error is None else repr(error)}")

    tasks = [asyncio.create_task(work, name=name) for name, work in works.items()]
    for task in tasks:
        task.add_done_callback(note)
    try:
        yield
    finally:
        open_to_failures = False
        for task in tasks:
            task.cancel()
