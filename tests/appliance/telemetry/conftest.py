"""Fixtures of the telemetry tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.appliance.telemetry.collector import Collector, running


@pytest.fixture(autouse=True)
def _no_collector_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the tester's own OpenTelemetry configuration out of the way."""
    for signal in ("", "TRACES_", "METRICS_"):
        for word in ("ENDPOINT", "PROTOCOL", "HEADERS", "TIMEOUT"):
            monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_{signal}{word}", raising=False)
    for name in ("OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER", "OTEL_METRICS_EXPORTER"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def collector() -> Iterator[Collector]:
    """A working collector."""
    with running() as one:
        yield one
