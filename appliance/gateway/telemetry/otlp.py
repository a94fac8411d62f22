"""Exporters as OpenTelemetry's own environment variables define them: where spans and metrics go, over which protocol,
and how many.

Both protocols of OTLP are spoken, http/protobuf unless the environment says grpc; their exporters are the SDK's. They
take 0.3 s to import, a quarter of a gateway's start, so that only those that the environment asks for are loaded.
"""

from __future__ import annotations

import os
from urllib.parse import urlsplit

import structlog
from opentelemetry.sdk.metrics.export import MetricExporter, PeriodicExportingMetricReader
from opentelemetry.sdk.trace.export import SpanExporter

from appliance.common.errors import ConfigError

METRICS_INTERVAL_S = 30.0
"""Seconds between two exports of metrics: two scrapes of a common Prometheus set-up."""

HTTP, GRPC = "http/protobuf", "grpc"

PORTS = {HTTP: 4318, GRPC: 4317}
"""Where collectors speak each protocol, by convention (OTLP specification 1.x)."""

RATIOS = {"always_on": 1.0, "always_off": 0.0, "traceidratio": None}
"""Samplers by their standard names, with their share; None: OTEL_TRACES_SAMPLER_ARG says it."""


def span_exporter() -> SpanExporter | None:
    """Return the exporter that the environment asks for, or None.

    Raises:
        ConfigError: the environment asks for a protocol that is not spoken here.
    """
    protocol = _wanted("TRACES")
    if protocol == GRPC:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter()
    if protocol == HTTP:
        from appliance.gateway.telemetry import otlp_http

        return otlp_http.span_exporter()
    return None


def metric_reader() -> PeriodicExportingMetricReader | None:
    """Return a reader that sends metrics where the environment says, or None.

    Raises:
        ConfigError: as ``span_exporter``.
    """
    protocol = _wanted("METRICS")
    if not protocol:
        return None
    exporter: MetricExporter
    if protocol == GRPC:
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter

        exporter = OTLPMetricExporter()
    else:
        from appliance.gateway.telemetry import otlp_http

        exporter = otlp_http.metric_exporter()
    return PeriodicExportingMetricReader(exporter, METRICS_INTERVAL_S * 1_000)


def sample_ratio() -> float:
    """Return the share of traces that OTEL_TRACES_SAMPLER asks for, 0 to 1; all where it is not set.

    With ``parentbased_`` before it the name means the same: what callers say about sampling decides nothing.

    Raises:
        ConfigError: a sampler that is not known, or an argument that is no share.
    """
    name = _value("OTEL_TRACES_SAMPLER").lower() or "always_on"
    try:
        ratio = RATIOS[name.removeprefix("parentbased_")]
    except KeyError:
        known = ", ".join(RATIOS)
        raise ConfigError(f"OTEL_TRACES_SAMPLER is {name!r}; known are {known}, with or without parentbased_") from None
    if ratio is not None:
        return ratio
    told = _value("OTEL_TRACES_SAMPLER_ARG") or "1"
    try:
        ratio = float(told)
    except ValueError:
        ratio = -1.0
    if not 0 <= ratio <= 1:
        raise ConfigError(f"OTEL_TRACES_SAMPLER_ARG is {told!r}; it is a share of the traces, from 0 to 1")
    return ratio


def _value(name: str) -> str:
    return os.environ.get(name, "").strip()


def _wanted(signal: str) -> str:
    """Return the protocol over which ``TRACES`` or ``METRICS`` are to be sent; empty when they are not."""
    if _value("OTEL_SDK_DISABLED").lower() == "true":
        return ""
    if _value(f"OTEL_{signal}_EXPORTER").lower() == "none":
        return ""
    endpoint = _value(f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT") or _value("OTEL_EXPORTER_OTLP_ENDPOINT")
    if not endpoint:
        return ""
    spoken = _value(f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL") or _value("OTEL_EXPORTER_OTLP_PROTOCOL") or HTTP
    if spoken not in PORTS:
        raise ConfigError(f"OTEL_EXPORTER_OTLP_PROTOCOL is {spoken!r}; {HTTP} and {GRPC} are spoken")
    _hint_at_port(endpoint, spoken)
    return spoken


def _hint_at_port(endpoint: str, spoken: str) -> None:
    """Warn when the endpoint has the port of the other protocol: the commonest mistake, which looks like a dead
    collector."""
    (other,) = PORTS.keys() - {spoken}
    if urlsplit(endpoint).netloc.endswith(f":{PORTS[other]}"):
        structlog.get_logger("athanor.telemetry").warning(
            "collector_port",
            hint=f"port {PORTS[other]} is OTLP over {other} by convention; over {spoken} it is {PORTS[spoken]}. "
            f"OTEL_EXPORTER_OTLP_PROTOCOL={other} speaks the other",
        )
