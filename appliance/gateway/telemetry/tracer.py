"""Telemetry of one process: traces, metrics and the log line of each request, over OpenTelemetry.

Sampling decides about export only; the embedded store keeps every request. The caller's
``traceparent`` makes our spans children of theirs, but its sampled flag decides nothing: a tenant
can neither force the operator's collector to take its traces nor hide from it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass

import structlog
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from appliance.common.lines import RefusedLines
from appliance.common.operator_calls import OperatorCall
from appliance.common.outcomes import FAILED, INVALID, REFUSED
from appliance.gateway.generate_request import CallContext
from appliance.gateway.telemetry import names
from appliance.gateway.telemetry.attributes import MAX_VALUE_CHARS, clean
from appliance.gateway.telemetry.export import BoundedExport, stop_within
from appliance.gateway.telemetry.metrics import FinishedRequest, Level, Metrics
from appliance.gateway.telemetry.otlp import metric_reader, sample_ratio, span_exporter
from appliance.gateway.telemetry.request_trace import RequestTrace
from appliance.gateway.telemetry.spans import PresetIds, Sampler, SpanExport, TraceIds, operator_span, prompt_span
from appliance.gateway.telemetry.store import TraceStore, TraceSummary

SHUTDOWN_S = 3.0
"""Seconds that a stopping process gives its exporters; systemd waits far longer."""

MAX_SPAN_ATTRIBUTES = 64
"""Attributes of one span; the conventions and our own come to about 25."""


LOGGED = (
    *("request_id", "trace_id", "outcome", "error", "route", "tenant", "model"),
    *("input_tokens", "cached_tokens", "output_tokens", "finish_reason"),
)
"""Fields of a ``TraceSummary`` that the log line of a request has as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetrySettings:
    """Settings that OpenTelemetry's own environment variables do not have."""

    version: str
    """``service.version``."""
    sample_ratio: float | None = None
    """Share of requests sent to the collector, 0 to 1, in place of what the environment says; the embedded store keeps
    all."""


class OtelTelemetry:
    """Traces, metrics and log lines of one process, made after any fork."""

    def __init__(
        self, store: TraceStore, metrics: Metrics, spans: SpanExport | None = None, export: BoundedExport | None = None
    ) -> None:
        self.store = store
        self.metrics = metrics
        self._spans = spans
        self._export = export
        self._log = structlog.get_logger("athanor.request")
        self._lines = RefusedLines(time.monotonic())

    def start(self, context: CallContext, request_id: str, tenant: str | None) -> RequestTrace:
        """Return the trace of a call, whose server span is open."""
        return RequestTrace(self._spans, context, request_id, tenant, self._finished)

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        """Add to a counter; see ``Metrics.count``."""
        self.metrics.count(name, amount, **labels)

    def operator_call(self, call: OperatorCall) -> None:
        """Count a call of the operator's API that has ended, and export its span where a collector takes spans."""
        self.count(names.OPERATOR_CALLS, method=call.method, outcome=call.outcome)
        if self._spans is not None:
            self._spans.tell(TraceIds.of(None), [operator_span(call)])

    def prompt_computed(
        self, traceparent: str | None, request: str, tenant: str, model: str, outcome: str, took_s: float
    ) -> None:
        """Export the span of a prompt that was computed for another host, below that host's span."""
        if self._spans is not None:
            ids = TraceIds.of(traceparent)
            known = clean(request), clean(tenant), clean(model)
            self._spans.tell(ids, [prompt_span(*known, outcome, took_s, ids.remote_parent)])

    def levels(self, told: Iterable[Level]) -> None:
        """Set every gauge at once; see ``Metrics.levels``."""
        queued = [] if self._export is None else [Level(names.QUEUED_SPANS, self._export.queued, {})]
        self.metrics.levels((*told, *queued))

    def close(self, deadline_s: float = SHUTDOWN_S) -> bool:
        """Flush and stop the exporters within the deadline; False when spans may be lost.

        Blocks up to the deadline: call it off the event loop, after the last request.
        """
        in_time = stop_within(deadline_s, self._stop)
        if not in_time and self._export is not None:
            self._export.abandon()
        return in_time

    def _stop(self) -> None:
        if self._spans is not None:
            self._spans.shutdown()
        self.metrics.shutdown(SHUTDOWN_S)

    def _finished(self, request: FinishedRequest) -> None:
        self.store.record(request.trace)
        self.metrics.record(request)
        summary = request.trace.summary
        fields = log_fields(summary)
        if summary.outcome in (REFUSED, INVALID):
            unsaid = self._lines.take(summary.tenant, time.monotonic())
            if unsaid is None:
                return
            fields |= {"unsaid": unsaid} if unsaid else {}
        log = self._log.error if summary.outcome == FAILED else self._log.info
        log("request", **fields)


def open_telemetry(settings: TelemetrySettings, exporter: SpanExporter | None = None) -> OtelTelemetry:
    """Build the telemetry of this process; a collector is used when the environment names one.

    ``exporter`` takes the place of the environment's.

    Raises:
        ConfigError: the environment asks for an OTLP protocol or a sampler that is not known.
    """
    ratio = sample_ratio() if settings.sample_ratio is None else settings.sample_ratio
    reader = metric_reader()
    resource = _resource(settings.version)
    metrics = Metrics(resource, () if reader is None else (reader,))
    metrics.expect(names.SENT_SPANS)
    metrics.expect(names.DROPPED_SPANS, reason=names.DROP_REASONS)
    exporter = exporter or span_exporter()
    if exporter is None:
        return OtelTelemetry(TraceStore(), metrics)
    export = BoundedExport(
        exporter,
        lambda spans, reason: metrics.count(names.DROPPED_SPANS, spans, reason=reason),
        lambda spans: metrics.count(names.SENT_SPANS, spans),
    )
    ids = PresetIds()
    provider = TracerProvider(
        # Which traces are exported is decided before the SDK gets them, whatever the caller's sampled flag says.
        sampler=ALWAYS_ON,
        resource=resource,
        shutdown_on_exit=False,
        id_generator=ids,
        span_limits=SpanLimits(max_span_attributes=MAX_SPAN_ATTRIBUTES, max_span_attribute_length=MAX_VALUE_CHARS),
    )
    provider.add_span_processor(export)
    tracer = provider.get_tracer(names.SCOPE, settings.version, schema_url=names.SCHEMA_URL)
    return OtelTelemetry(TraceStore(), metrics, SpanExport(provider, tracer, ids, Sampler(ratio)), export)


def _resource(version: str) -> Resource:
    """Return the resource that names this service; OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES override it."""
    ours = {"service.name": names.SCOPE, "service.version": version, "service.instance.id": secrets.token_hex(8)}
    return Resource.create({}).merge(Resource(ours)).merge(OTELResourceDetector().detect())


def log_fields(summary: TraceSummary) -> dict[str, str | int | float]:
    """Return the fields of a request's one log line; those that are not known are left out."""
    fields = {name: getattr(summary, name) for name in LOGGED}
    fields["duration_ms"] = round(summary.duration_s * 1_000, 1)
    fields["ttft_ms"] = None if summary.ttft_s is None else round(summary.ttft_s * 1_000, 1)
    return {name: value for name, value in fields.items() if value is not None}
