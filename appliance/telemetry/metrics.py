"""Metrics: OpenTelemetry instruments, read by Prometheus and, if one is named, by a collector.

Label values are bounded, because each new one is a time series for ever. A tenant or model counts
under its own name only when the policy in force knows it and it was among the first
``MAX_TENANTS`` or ``MAX_MODELS`` that this process met; every other name is ``other``. Callers
cannot add a series by asking for a model that does not exist.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from opentelemetry import metrics as api
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import Counter, Histogram, MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader
from opentelemetry.sdk.metrics.view import ExplicitBucketHistogramAggregation, View
from opentelemetry.sdk.resources import Resource
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from appliance.telemetry import names
from appliance.telemetry.levels import Labels, Level, Levels
from appliance.telemetry.names import Instrument

MAX_TENANTS = 64
"""Tenants with series of their own: one busy series is about 1 KiB here and in Prometheus."""

MAX_MODELS = 32
"""Models with series of their own."""

OTHER = "other"
"""Label value of every name beyond the bounds."""

MAX_POINTS = 8_192
"""Series of one metric; beyond them the SDK adds to one series marked ``otel.metric.overflow``."""


class MetricNameError(ValueError):
    """A counter, gauge or label that ``names`` does not list: a defect of the caller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """What one finished request adds to the metrics. Durations in seconds."""

    front_end: str
    outcome: str
    duration_s: float
    tenant: str | None = None
    model: str | None = None
    operation: str | None = None
    """None: the request ended before it was a generation; the GenAI metrics leave it out."""
    error_type: str | None = None
    ttft_s: float | None = None
    token_s: float | None = None
    """Mean time per output token after the first."""
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    phases: tuple[tuple[str, float], ...] = ()
    replays: int = 0


@dataclass(slots=True)
class BoundedNames:
    """Names that may be label values: those told by ``admit``, until there are ``limit``."""

    limit: int
    _admitted: set[str] = field(default_factory=set)

    def admit(self, known: Iterable[str]) -> None:
        """Admit names in their order; one that is in stays in, since its series exists already."""
        for name in known:
            if len(self._admitted) >= self.limit:
                return
            self._admitted.add(name)

    def label(self, name: str) -> str:
        """The name itself, or ``OTHER``."""
        return name if name in self._admitted else OTHER


class Metrics:
    """All instruments of one process, with a Prometheus registry of its own."""

    def __init__(self, resource: Resource, readers: Sequence[MetricReader] = ()) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        prometheus = PrometheusMetricReader(
            scope_info_enabled=False,
            registry=self._registry,
            cardinality_limits=dict.fromkeys((Counter, Histogram), MAX_POINTS),
        )
        self._readers = tuple(readers)
        provider = MeterProvider(
            metric_readers=[prometheus, *readers],
            resource=resource,
            views=_views(),
            shutdown_on_exit=False,
        )
        meter = provider.get_meter(names.SCOPE, schema_url=names.SCHEMA_URL)
        self._histograms: dict[str, api.Histogram] = {
            name: meter.create_histogram(name, one.unit, one.description) for name, one in names.HISTOGRAMS.items()
        }
        self._counters: dict[str, api.Counter] = {
            name: meter.create_counter(name, one.unit, one.description) for name, one in names.COUNTERS.items()
        }
        self._levels = Levels(meter, names.GAUGES)
        self._tenants = BoundedNames(MAX_TENANTS)
        self._models = BoundedNames(MAX_MODELS)
        self._seen: set[tuple[str, str, str]] = set()
        """Of whom there are series of requests; as bounded as their labels."""
        self._render_lock = threading.Lock()

    def know(self, *, tenants: Iterable[str] = (), models: Iterable[str] = ()) -> None:
        """Tell which tenants and models exist; called at start and after each policy reload."""
        self._tenants.admit(tenants)
        self._models.admit(models)

    def expect(self, name: str, **words: Iterable[str]) -> None:
        """Begin the series of a counter at 0, one for each combination of its labels' values: Prometheus sees no
        increase in a series that begins at 1.

        Raises:
            MetricNameError: as ``count``.
        """
        for values in product(*words.values()):
            self.count(name, 0, **dict(zip(words, values, strict=True)))

    def count(self, name: str, amount: int = 1, **labels: str) -> None:
        """Add to a counter.

        Raises:
            MetricNameError: no such counter, or a label that it does not take.
        """
        attributes = self._labels(names.COUNTERS, name, labels)
        self._counters[name].add(amount, attributes)

    def gauge(self, name: str, value: float, **labels: str) -> None:
        """Set one series of a gauge, until ``levels`` tells all of them.

        Raises:
            MetricNameError: no such gauge, or a label that it does not take.
        """
        self._levels.put(name, value, self._labels(names.GAUGES, name, labels))

    def levels(self, told: Iterable[Level]) -> None:
        """Set every gauge at once: a series that is not told any more is gone. Rows of one label are added up.

        Raises:
            MetricNameError: as ``gauge``; nothing is changed.
        """
        self._levels.replace([(one.name, one.value, self._labels(names.GAUGES, one.name, one.labels)) for one in told])

    def record(self, request: RequestRecord) -> None:
        """Add one finished request to everything that counts requests."""
        tenant, model = request.tenant or "", request.model or ""
        whose = (self._tenants.label(tenant), self._models.label(model), request.front_end)
        if whose not in self._seen:
            self._seen.add(whose)
            self.expect(names.REQUESTS, tenant=[tenant], model=[model], front_end=[request.front_end],
                        outcome=names.OUTCOMES)  # fmt: skip
        self.count(
            names.REQUESTS,
            tenant=tenant,
            model=model,
            outcome=request.outcome,
            front_end=request.front_end,
        )
        blamed = {"refused": names.REFUSALS, "failed": names.FAILURES}.get(request.outcome)
        if blamed is not None:
            self.count(blamed, tenant=tenant, reason=request.error_type or "")
        tokens = {
            "input": request.input_tokens,
            "cached": request.cached_tokens,
            "output": request.output_tokens,
        }
        for kind, amount in tokens.items():
            if amount:
                self.count(names.TOKENS, amount, token_type=kind, tenant=tenant, model=model)
        if request.replays:
            self.count(names.REPLAYS, request.replays, model=model)
        for phase, seconds in request.phases:
            self._histograms[names.PHASE_DURATION].record(seconds, {names.PHASE: phase})
        if request.operation is not None:
            self._record_generation(request, request.operation)

    def render(self) -> tuple[str, bytes]:
        """The content type and body of a scrape, Prometheus text format 0.0.4. Blocks for
        milliseconds with many series: call it off the event loop.
        """
        with self._render_lock:
            return CONTENT_TYPE_PLAIN_0_0_4, generate_latest(self._registry)

    def shutdown(self, timeout_s: float) -> None:
        """Flush to the collector, if there is one, and stop sending. A scrape still works: the
        last ones tell what was lost.
        """
        for reader in self._readers:
            reader.shutdown(timeout_s * 1_000)

    def _record_generation(self, request: RequestRecord, operation: str) -> None:
        common = {
            names.OPERATION: operation,
            names.PROVIDER: names.SCOPE,
            names.TENANT: self._tenants.label(request.tenant or ""),
            names.REQUEST_MODEL: self._models.label(request.model or ""),
        }
        failed = {names.ERROR_TYPE: request.error_type} if request.error_type else {}
        histograms = self._histograms
        histograms[names.REQUEST_DURATION].record(request.duration_s, common | failed)
        if request.ttft_s is not None:
            histograms[names.TIME_TO_FIRST_TOKEN].record(request.ttft_s, common)
        if request.token_s is not None:
            histograms[names.TIME_PER_OUTPUT_TOKEN].record(request.token_s, common)
            histograms[names.OUTPUT_TOKEN_LATENCY].record(request.token_s, common)
        for kind, amount in (("input", request.input_tokens), ("output", request.output_tokens)):
            if amount:
                usage = common | {names.TOKEN_TYPE: kind}
                histograms[names.TOKEN_USAGE].record(amount, usage)

    def _labels(self, table: dict[str, Instrument], name: str, given: Mapping[str, str]) -> Labels:
        instrument = table.get(name)
        if instrument is None:
            raise MetricNameError(f"no metric {name!r} of this kind in appliance.telemetry.names")
        odd = given.keys() - instrument.labels
        if odd:
            raise MetricNameError(f"metric {name} takes no label {', '.join(sorted(odd))}")
        bounded = {"tenant": self._tenants.label, "model": self._models.label}
        return {
            names.own_attribute(word): bounded[word](value) if word in bounded and value else value
            for word, value in given.items()
        }


def _views() -> list[View]:
    return [
        View(
            instrument_name=name,
            aggregation=ExplicitBucketHistogramAggregation(boundaries=instrument.buckets),
        )
        for name, instrument in names.HISTOGRAMS.items()
    ]
