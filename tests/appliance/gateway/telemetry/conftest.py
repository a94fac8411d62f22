"""Fixtures of the telemetry tests."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.appliance.gateway.telemetry.collector import WAIT_S, Collector, running


@pytest.fixture(autouse=True)
def _no_collector_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the tester's own OpenTelemetry configuration out of the way."""
    for signal in ("", "TRACES_", "METRICS_"):
        for word in ("ENDPOINT", "PROTOCOL", "HEADERS", "TIMEOUT"):
            monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_{signal}{word}", raising=False)
    for name in (
        "OTEL_SERVICE_NAME",
        "OTEL_SDK_DISABLED",
        "OTEL_TRACES_EXPORTER",
        "OTEL_METRICS_EXPORTER",
        "OTEL_TRACES_SAMPLER",
        "OTEL_TRACES_SAMPLER_ARG",
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    """Every thread that a test started has ended soon after it: an exporter left alone would go on
    retrying during all tests that follow.
    """
    before = set(threading.enumerate())
    yield
    # The event loop of an admin listener that lives longer keeps its workers for as long.
    left = {thread for thread in threading.enumerate() if "AnyIO" not in thread.name} - before
    for thread in left:
        thread.join(WAIT_S)
    assert [thread.name for thread in left if thread.is_alive()] == []


@pytest.fixture
def collector() -> Iterator[Collector]:
    """A working collector."""
    with running() as one:
        yield one
