"""Metrics: OpenTelemetry instruments, read by Prometheus and, if one is named, by a collector.

Label values are bounded, because each new one is a time series for ever. A tenant or model counts
under its own name only when the policy in force knows it and it has a place (``SeriesNames``);
every other name is ``other``. Callers cannot add a series by asking for a model that does not
exist. ``tenants`` gives the sums of every tenant, without a bound.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from opentelemetry import metrics as api
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import CallbackOptions, Meter, Observation
from opentelemetry.sdk.metrics import Counter, Histogram, MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader
from opentelemetry.sdk.metrics.view import ExplicitBucketHistogramAggregation, View
from opentelemetry.sdk.resources import Resource
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.openmetrics import exposition
from prometheus_client.registry import Collector

from appliance.common.figures import NS
from appliance.common.outcomes import FAILED, OUTCOMES, REFUSED
from appliance.common.status import TenantTable
from appliance.gateway.telemetry import names
from appliance.gateway.telemetry.exemplars import Exemplars
from appliance.gateway.telemetry.names import Instrument
from appliance.gateway.telemetry.process_figures import ProcessFigures
from appliance.gateway.telemetry.series_names import OTHER, SeriesNames
from appliance.gateway.telemetry.store import StoredTrace, TraceSummary
from appliance.gateway.telemetry.tenant_table import TenantSums

MAX_TENANTS = 64
"""Tenants that have series of their own from their first request on: a busy series is about 1 KiB here and in
Prometheus."""

MAX_LATE_TENANTS = 32
"""Further tenants that get series because they turn out to use a 64th of all tokens, or more."""

MAX_MODELS = 32
"""Models with series of their own."""

MAX_ROUTES = 256
"""Routes with series of their own, in the order in which they are used: as many as a policy may have."""

MAX_POINTS = 8_192
"""Series of one metric; beyond them the SDK adds to one series marked ``otel.metric.overflow``."""


WITH_EXEMPLARS = (names.REQUEST_DURATION, names.TIME_TO_FIRST_TOKEN)
"""Histograms whose buckets lead to traces."""

MODEL_LABELS = ("athanor_model", "gen_ai_request_model")
"""Labels that name a model, as a scrape has them."""

Labels = dict[str, str]
"""Attribute names to values, both as they are emitted."""


@dataclass(frozen=True, slots=True)
class Level:
    """One value under the name and label words that ``names.GAUGES`` lists."""

    name: str
    value: float
    labels: Mapping[str, str]


class Levels:
    """Current values of every series of every gauge, which are read when somebody scrapes. ``replace`` is called by one
    thread; the meter reads in another.

    A level whose owner is gone must go as well, or a dashboard shows for ever what an engine had when it died. So
    levels are set all at once. Two rows that end under one label, because both tenants count as ``other``, are added
    up.
    """

    def __init__(self, meter: Meter, gauges: Mapping[str, Instrument]) -> None:
        self._told: dict[str, dict[tuple[tuple[str, str], ...], float]] = {name: {} for name in gauges}
        for name, gauge in gauges.items():
            meter.create_observable_gauge(name, [self._reader(name)], gauge.unit, gauge.description)

    def replace(self, rows: Iterable[tuple[str, float, Labels]]) -> None:
        """Set all series of all gauges; those that are not named are gone."""
        told: dict[str, dict[tuple[tuple[str, str], ...], float]] = {name: {} for name in self._told}
        for name, value, labels in rows:
            if math.isfinite(value):
                series = tuple(sorted(labels.items()))
                told[name][series] = told[name].get(series, 0.0) + value
        self._told = told

    def _reader(self, name: str) -> Callable[[CallbackOptions], list[Observation]]:
        def read(_: CallbackOptions) -> list[Observation]:
            return [Observation(value, dict(series)) for series, value in self._told[name].items()]

        return read


class MetricNameError(ValueError):
    """A counter, gauge or label that ``names`` does not list: a defect of the caller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRequest:
    """A finished request, for the store, the metrics and the log."""

    trace: StoredTrace
    front_end: str
    operation: str | None
    """None: the request ended before it was a generation; the GenAI metrics leave it out."""
    replays: int
    cost: int = 0
    """Billionths of the currency's unit."""
    exported: bool = False
    """Whether its trace goes to the collector."""


class _Shown(Collector):
    """A registry without the series of some models, and with exemplars where they are given."""

    def __init__(self, registry: CollectorRegistry, hidden: frozenset[str], exemplars: Exemplars | None = None) -> None:
        self._registry = registry
        self._hidden = hidden
        self._exemplars = exemplars

    def collect(self) -> Iterator[Metric]:
        """Yield every metric that has a series left, or never had one."""
        for metric in self._registry.collect():
            if self._hidden:
                metric.samples = [one for one in metric.samples if not self._hides(one.labels)]
            yield metric if self._exemplars is None else self._exemplars.beside(metric)

    def _hides(self, labels: Mapping[str, str]) -> bool:
        return any(labels.get(name) in self._hidden for name in MODEL_LABELS)


class Metrics:
    """All instruments of one process, with a Prometheus registry of its own."""

    def __init__(self, resource: Resource, readers: Sequence[MetricReader] = ()) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(ProcessFigures())
        prometheus = PrometheusMetricReader(
            scope_info_enabled=False,
            registry=self._registry,
            cardinality_limits=dict.fromkeys((Counter, Histogram), MAX_POINTS),
        )
        self._readers = tuple(readers)
        provider = MeterProvider(
            metric_readers=[prometheus, *readers], resource=resource, views=_views(), shutdown_on_exit=False
        )
        meter = provider.get_meter(names.SCOPE, schema_url=names.SCHEMA_URL)
        self._histograms: dict[str, api.Histogram] = {
            name: meter.create_histogram(name, one.unit, one.description) for name, one in names.HISTOGRAMS.items()
        }
        self._counters: dict[str, api.Counter] = {
            name: meter.create_counter(name, one.unit, one.description) for name, one in names.COUNTERS.items()
        }
        self._levels = Levels(meter, names.GAUGES)
        self._tenants = SeriesNames(MAX_TENANTS, MAX_LATE_TENANTS)
        self._models = SeriesNames(MAX_MODELS)
        self._routes = SeriesNames(MAX_ROUTES)
        self._sums = TenantSums(time.time())
        self._told_as: dict[str, str] = {}
        """Labels of tenants in cumulative gauges, which no tenant changes."""
        self._seen: set[tuple[str, str, str]] = set()
        """Tenants and models that have series of requests; as bounded as their labels."""
        self._hidden: set[str] = set()
        """Models that are served no more."""
        self._render_lock = threading.Lock()
        self._exemplars = Exemplars({name: names.HISTOGRAMS[name].buckets for name in WITH_EXEMPLARS})

    def know(self, *, tenants: Iterable[str] = (), models: Iterable[str] = ()) -> None:
        """Note which tenants and models exist; called at the start and after each policy reload."""
        self._tenants.know(tenants)
        models = list(models)
        self._hidden.difference_update(models)
        self._models.know(models)
        for model in models:
            self._models.place(model)

    def follow(self, come: Iterable[str], gone: Iterable[str]) -> None:
        """Note models that have come, and leave the series of those that are gone out of scrapes until they come again:
        their counts go on then, and no counter ever goes back."""
        self.know(models=come)
        self._hidden.update(gone)

    def expect(self, name: str, **words: Iterable[str]) -> None:
        """Begin the series of a counter at 0, one for each combination of its labels' values: Prometheus sees no
        increase in a series that begins at 1.

        Raises:
            MetricNameError: as ``count``.
        """
        for values in product(*words.values()):
            self.count(name, 0, **dict(zip(words, values, strict=True)))

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        """Add to a counter.

        Raises:
            MetricNameError: no such counter, or a label that it does not take.
        """
        self._tenants.place(labels.get("tenant", ""))  # tokens are counted before their request has ended
        if route := labels.get("route", ""):
            # A name comes from the policy and never from a caller; many policies have more than there are places.
            self._routes.know([route])
            self._routes.place(route)
        attributes = self._labels(names.COUNTERS, name, labels)
        self._counters[name].add(amount, attributes)

    def levels(self, told: Iterable[Level]) -> None:
        """Set every gauge at once: a series that is not told any more is gone. Rows of one label are added up.

        Raises:
            MetricNameError: no such gauge, or a label that it does not take; nothing is changed.
        """
        rows = []
        for one in told:
            lasting = one.name in names.CUMULATIVE and one.value > 0
            rows.append((one.name, one.value, self._labels(names.GAUGES, one.name, one.labels, lasting=lasting)))
        self._levels.replace(rows)

    def record(self, request: FinishedRequest) -> None:
        """Add one finished request to everything that counts requests."""
        summary = request.trace.summary
        tenant, model = summary.tenant or "", summary.model or ""
        self._tenants.place(tenant)
        self._sums.add(tenant if not tenant or self._tenants.is_known(tenant) else OTHER, summary)
        self._begin(tenant, model, request.front_end)
        self.count(names.REQUESTS, tenant=tenant, model=model, outcome=summary.outcome, front_end=request.front_end)
        blamed = {REFUSED: names.REFUSALS, FAILED: names.FAILURES}.get(summary.outcome)
        if blamed is not None:
            self.count(blamed, tenant=tenant, reason=summary.error or "")
        if request.cost:
            self.count(names.COST, request.cost, tenant=tenant, model=model)
        if request.replays:
            self.count(names.REPLAYS, request.replays, model=model)
        for span in request.trace.spans:
            if span.name.startswith(names.OWN_PREFIX):
                phase = span.name.removeprefix(names.OWN_PREFIX)
                self._histograms[names.PHASE_DURATION].record((span.end_ns - span.start_ns) / NS, {names.PHASE: phase})
        if request.operation is not None:
            self._record_generation(summary, request.operation, exported=request.exported)
        if self._tenants.weigh(tenant, summary.input_tokens + summary.output_tokens):
            # Behind the request's counts, and from 0 on: what follows is seen as an increase.
            self._begin(tenant, model, request.front_end)
            self.expect(names.TOKENS, token_type=names.TOKEN_TYPES, tenant=[tenant], model=[model])

    def tenants(self) -> TenantTable:
        """Return the exact sums of all tenants. Called by the thread that records."""
        return self._sums.table(self._tenants.label)

    def render(self, openmetrics: bool = False) -> tuple[str, bytes]:
        """Return the content type and body of a scrape, Prometheus text format 0.0.4 or OpenMetrics 1.0 with exemplars.
        Blocks for milliseconds with many series: call it off the event loop.
        """
        with self._render_lock:
            hidden = frozenset(self._hidden)
            if openmetrics:
                return exposition.CONTENT_TYPE_LATEST, _openmetrics(_Shown(self._registry, hidden, self._exemplars))
            return CONTENT_TYPE_PLAIN_0_0_4, generate_latest(_Shown(self._registry, hidden))

    def shutdown(self, timeout_s: float) -> None:
        """Flush to the collector, if there is one, and stop sending. A scrape still works: the
        last ones tell what was lost.
        """
        for reader in self._readers:
            reader.shutdown(timeout_s * 1_000)

    def _begin(self, tenant: str, model: str, front_end: str) -> None:
        """Begin the series of requests of a tenant and a model, unless that was done."""
        whose = (self._tenants.label(tenant), self._models.label(model), front_end)
        if whose not in self._seen:
            self._seen.add(whose)
            self.expect(names.REQUESTS, tenant=[tenant], model=[model], front_end=[front_end], outcome=OUTCOMES)

    def _record_generation(self, summary: TraceSummary, operation: str, *, exported: bool) -> None:
        common = {
            names.OPERATION: operation,
            names.PROVIDER: names.SCOPE,
            names.TENANT: self._tenants.label(summary.tenant or ""),
            names.REQUEST_MODEL: self._models.label(summary.model or ""),
        }
        failed = {names.ERROR_TYPE: summary.error} if summary.error else {}
        histograms = self._histograms
        ended_ns = summary.started_ns + round(summary.duration_s * NS)
        timed = [(names.REQUEST_DURATION, summary.duration_s, common | failed)]
        if summary.ttft_s is not None:
            timed.append((names.TIME_TO_FIRST_TOKEN, summary.ttft_s, common))
        for name, seconds, labels in timed:
            histograms[name].record(seconds, labels)
            if exported:
                self._exemplars.note(name, labels, seconds, summary.trace_id, ended_ns)
        if summary.token_s is not None:
            histograms[names.TIME_PER_OUTPUT_TOKEN].record(summary.token_s, common)
            histograms[names.OUTPUT_TOKEN_LATENCY].record(summary.token_s, common)
        for kind, amount in (("input", summary.input_tokens), ("output", summary.output_tokens)):
            if amount:
                usage = common | {names.TOKEN_TYPE: kind}
                histograms[names.TOKEN_USAGE].record(amount, usage)

    def _labels(
        self, table: dict[str, Instrument], name: str, given: Mapping[str, str], *, lasting: bool = False
    ) -> Labels:
        instrument = table.get(name)
        if instrument is None:
            raise MetricNameError(f"no metric {name!r} of this kind in appliance.gateway.telemetry.names")
        odd = given.keys() - instrument.labels
        if odd:
            raise MetricNameError(f"metric {name} takes no label {', '.join(sorted(odd))}")
        bounded = {"tenant": self._lasting_label if lasting else self._tenants.label, "model": self._models.label}
        bounded["route"] = self._routes.label
        return {
            names.own_attribute(word): bounded[word](value) if word in bounded and value else value
            for word, value in given.items()
        }

    def _lasting_label(self, tenant: str) -> str:
        """Return the label that a tenant had when a sum of it was first told: a later label would take from one series
        and add to another, which looks like a restart."""
        if not self._tenants.is_known(tenant):
            return OTHER
        return self._told_as.setdefault(tenant, self._tenants.label(tenant))


def _openmetrics(shown: Collector) -> bytes:
    """Return metrics in OpenMetrics 1.0."""
    return bytes(exposition.generate_latest(shown))  # type: ignore[no-untyped-call]  # it is left untyped


def _views() -> list[View]:
    return [
        View(instrument_name=name, aggregation=ExplicitBucketHistogramAggregation(boundaries=instrument.buckets))
        for name, instrument in names.HISTOGRAMS.items()
    ]
