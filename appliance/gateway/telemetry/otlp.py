"""Exporters as OpenTelemetry's own environment variables define them: where spans and metrics go, over which protocol,
and how many.

Both protocols of OTLP are spoken, http/protobuf unless the environment says grpc; their exporters are the SDK's. What
a collector answers is read only as far as it matters: one that never ends its answer would fill our memory.
"""

from __future__ import annotations

import os
import time
from typing import Any
from urllib.parse import urlsplit

import requests
import structlog
from opentelemetry.exporter.otlp.proto.grpc import metric_exporter as grpc_metrics
from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as grpc_traces
from opentelemetry.exporter.otlp.proto.http import metric_exporter as http_metrics
from opentelemetry.exporter.otlp.proto.http import trace_exporter as http_traces
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.trace.export import SpanExporter

from appliance.common.errors import ConfigError

METRICS_INTERVAL_S = 30.0
"""Seconds between two exports of metrics: two scrapes of a common Prometheus set-up."""

MAX_ANSWER_BYTES = 64 << 10
"""Bytes of a collector's answer that are read: a partial success has a sentence, a proxy's error page a screen."""

ANSWER_S = 10.0
"""Seconds in which an answer's body must have come: the exporters' own limit applies to each read anew."""

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
        return grpc_traces.OTLPSpanExporter()
    return http_traces.OTLPSpanExporter(session=BoundedSession()) if protocol else None


def metric_reader() -> PeriodicExportingMetricReader | None:
    """Return a reader that sends metrics where the environment says, or None.

    Raises:
        ConfigError: as ``span_exporter``.
    """
    protocol = _wanted("METRICS")
    if not protocol:
        return None
    exporter = (
        grpc_metrics.OTLPMetricExporter()
        if protocol == GRPC
        else http_metrics.OTLPMetricExporter(session=BoundedSession())
    )
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


class BoundedSession(requests.Session):
    """A session that reads at most ``MAX_ANSWER_BYTES`` of an answer, for at most ``ANSWER_S``; a longer one counts by
    its status alone, and its connection is closed. A redirection is not followed, and is a failure: the exporters would
    take it for a success."""

    def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:
        """Send as ``requests.Session.send`` does; the answer is read up to a bound."""
        answer = super().send(request, **{**options, "stream": True, "allow_redirects": False})
        if answer.is_redirect:
            answer.close()
            raise requests.TooManyRedirects(f"the collector's address answers {answer.status_code}")
        until = time.monotonic() + ANSWER_S
        kept = bytearray()
        whole = False
        try:
            while len(kept) < MAX_ANSWER_BYTES and time.monotonic() < until:
                piece = answer.raw.read1(MAX_ANSWER_BYTES - len(kept))
                if not piece:
                    whole = True
                    break
                kept += piece
        finally:
            if not whole:
                answer.close()
        answer._content = bytes(kept)
        answer._content_consumed = True  # of requests: the body is not to be read again
        return answer


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
