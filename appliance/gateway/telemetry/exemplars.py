"""Exemplars: for each bucket of a histogram the last request that fell into it and whose trace went to the collector.

A scraper that asks for OpenMetrics gets them behind the buckets, so a dashboard leads from a slow quantile to the trace
of a slow request. The Prometheus exporter of OpenTelemetry gives none, hence this module. Used by one thread at a time
for each method: ``note`` by that which records, ``beside`` by that which renders.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from prometheus_client.core import Metric
from prometheus_client.samples import Exemplar, Sample

from appliance.common.figures import NS

MAX_EXEMPLARS = 4_096
"""Exemplars kept, about 1 MiB; beyond them that which was set longest ago is dropped."""

LABEL = "trace_id"
"""Label by which Grafana finds the trace."""

Series = frozenset[tuple[str, str]]
"""Labels of a series as a scrape has them, without the bucket's."""


class Exemplars:
    """The last exemplar of each bucket of each series of some histograms."""

    def __init__(self, buckets: Mapping[str, Sequence[float]], most: int = MAX_EXEMPLARS) -> None:
        """``buckets``: upper bounds in seconds by the histogram's name as it is emitted."""
        self._buckets = buckets
        self._most = most
        self._shown = frozenset(map(family_name, buckets))
        self._kept: OrderedDict[tuple[str, Series, float], Exemplar] = OrderedDict()

    def note(self, name: str, labels: Mapping[str, str], value: float, trace_id: str, at_ns: int) -> None:
        """Set the exemplar of the bucket that a value of a histogram falls into; ``at_ns`` is Unix time."""
        bounds = self._buckets[name]
        place = bisect_left(bounds, value)
        bound = bounds[place] if place < len(bounds) else float("inf")
        series = frozenset((label.replace(".", "_"), told) for label, told in labels.items())
        key = (family_name(name), series, bound)
        self._kept[key] = Exemplar({LABEL: trace_id}, value, at_ns / NS)
        self._kept.move_to_end(key)
        if len(self._kept) > self._most:
            self._kept.popitem(last=False)

    def beside(self, metric: Metric) -> Metric:
        """Return a metric of a scrape whose buckets have their exemplars."""
        if metric.name in self._shown:
            metric.samples = [self._told(metric.name, sample) for sample in metric.samples]
        return metric

    def _told(self, family: str, sample: Sample) -> Sample:
        bound = sample.labels.get("le")
        if bound is None:
            return sample
        labels = frozenset((name, value) for name, value in sample.labels.items() if name != "le")
        found = self._kept.get((family, labels, float(bound)))
        return sample if found is None else sample._replace(exemplar=found)


def family_name(histogram: str) -> str:
    """Return the name under which a scrape has a histogram of seconds."""
    return f"{histogram.replace('.', '_')}_seconds"
