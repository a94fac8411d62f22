"""docs/reference/metrics.md: every metric with its unit and labels."""

from __future__ import annotations

from collections.abc import Mapping

from appliance.gateway.telemetry import names
from appliance.gateway.telemetry.names import Instrument
from appliance.operator.reference.markdown import code, page, section, table

ABOUT = """
The admin listener gives these at `/metrics` for Prometheus, and OpenTelemetry's exporter sends them where a collector
is configured (docs/observability.md). The first name is OpenTelemetry's, the second Prometheus'. Names under `gen_ai.`
are those of the GenAI semantic conventions, pinned at v1.41.1. Of more than 64 tenants some count as `other`, and so do
models beyond the first 32.
"""

WORDS = {"s": "seconds", "By": "bytes", "1": "0 or 1", "%": "percent", "W": "watts", "Cel": "degrees Celsius"}
"""UCUM units in words; the others are ``{thing}``."""

SUFFIXES = {"s": "seconds", "By": "bytes", "%": "percent", "W": "watts", "Cel": "celsius"}
"""Units that become part of a Prometheus name."""


def render() -> str:
    """The page."""
    return page(
        "Metrics",
        ABOUT,
        _section("Histograms", names.HISTOGRAMS, ""),
        _section("Counters", names.COUNTERS, "_total"),
        _section("Gauges", names.GAUGES, ""),
    )


def _section(title: str, instruments: Mapping[str, Instrument], suffix: str) -> str:
    rows = []
    for name, one in sorted(instruments.items()):
        unit = WORDS.get(one.unit, _plural(one.unit.strip("{}")))
        labels = ", ".join(sorted(one.labels)) or "none"
        if one.buckets:
            labels = "see above"
        rows.append([code(name), code(prometheus(name, one, suffix)), unit, labels, one.description])
    about = ""
    if title == "Histograms":
        about = (
            "Labels are `gen_ai.operation.name`, `gen_ai.request.model` and, where it applies, the phase, the type of "
        )
        about += "tokens or `error.type`.\n"
    return section(title, about, table(("name", "in Prometheus", "unit", "labels", "meaning"), rows))


def _plural(word: str) -> str:
    return f"{word}es" if word.endswith("s") else f"{word}s"


def prometheus(name: str, one: Instrument, suffix: str) -> str:
    """Name as OpenTelemetry's Prometheus exporter writes it."""
    plain = name.replace(".", "_")
    unit = SUFFIXES.get(one.unit, "")
    return plain + (f"_{unit}" if unit and not plain.endswith(unit) else "") + suffix
