"""A pytest plugin: workers tell the process that collects their reports only what it shows.

pytest-xdist sends six messages for each test: its begin and its end, three reports, and that it is complete. Each is
taken apart and put together again in Python by both sides, and the reports are kept until the end. Of a test that
passes the report of its call, its end and its completion are used; those of its set-up and teardown only where they
took long (``--durations``), and what it printed only where that is asked for (``-rP``). A report that failed or was
skipped is sent as it is, and all are where a file of results is written (``--junitxml``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

LONG_S = 1.0
"""Seconds from which on a set-up or a teardown is told: less than the Makefile's ``--durations-min``."""

Send = Callable[..., None]


def used(name: str, told: dict[str, Any]) -> bool:
    """Whether the other side has a use for a message of a worker: its name and what it tells."""
    if name != "testreport":
        return name != "logstart"
    report = told["data"]
    passed = report["outcome"] == "passed" and "wasxfail" not in report
    return not passed or report["when"] == "call" or report["duration"] >= LONG_S or bool(report["user_properties"])


def fewer(send: Send, printed: bool) -> Send:
    """What sends a worker's messages, but those alone that are used. ``printed``: with what passing tests print."""

    def send_used(name: str, **told: Any) -> None:
        if not used(name, told):
            return
        if name == "testreport" and told["data"]["outcome"] == "passed" and not printed:
            told["data"]["sections"] = []
        send(name, **told)

    return send_used


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Send fewer from a worker; elsewhere nothing is sent."""
    config = session.config
    if not hasattr(config, "workerinput") or config.getoption("xmlpath", None):
        return
    for plugin in config.pluginmanager.get_plugins():
        if type(plugin).__name__ == "WorkerInteractor":
            plugin.sendevent = fewer(plugin.sendevent, "P" in config.getoption("reportchars"))
