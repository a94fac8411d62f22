"""A pytest plugin: names each failure when it happens and not only at the end, which may be hours away.

Named in pyproject.toml's ``addopts``. With several workers it runs in the process that collects their reports.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from _pytest.terminal import TerminalReporter

_reporters: list[TerminalReporter] = []


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Remember what writes to the terminal; a worker has nothing of the kind."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and not hasattr(config, "workerinput"):
        _reporters.append(reporter)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write the name of a test that failed, or could not begin or end."""
    if report.failed:
        for reporter in _reporters:
            reporter.write_line(f"\nfailed: {report.nodeid}", red=True)
