"""Panels and dashboards for Grafana as values, and their JSON (schema 39), with one look for all.

A dashboard is rows of panels; a row has a title and its panels share its width, so no position is written by hand. A
panel asks Prometheus (PromQL), Tempo (TraceQL) or Jaeger (a search), each by a data source that the page lets choose.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

COLUMNS = 24
"""Columns of Grafana's grid."""

HEIGHTS = {"stat": 4, "timeseries": 8, "table": 8, "bargauge": 8, "traces": 16}

SHOWN_TRACES = 20
"""Traces or spans that a table asks for."""

WITH_EXEMPLARS = ("gen_ai_server_time_to_first_token_seconds", "gen_ai_server_request_duration_seconds")
"""Histograms whose buckets lead to traces, in panels of lines."""

Source = Literal["prometheus", "tempo", "jaeger"]
VARIABLES: dict[Source, str] = {"prometheus": "datasource", "tempo": "tempo", "jaeger": "jaeger"}
"""Kind of a data source -> the variable that names one."""

GREEN, YELLOW, ORANGE, RED, BLUE, PURPLE, GREY = (
    "#56A64B",
    "#E0B400",
    "#FF780A",
    "#E02F44",
    "#3274D9",
    "#8F3BB8",
    "#8E8E8E",
)

MEANINGS = {
    "ok": GREEN,
    "refused": YELLOW,
    "invalid": ORANGE,
    "cancelled": GREY,
    "failed": RED,
    "p50": BLUE,
    "p95": ORANGE,
    "p99": RED,
    "input": BLUE,
    "output": GREEN,
    "cached": PURPLE,
    "running": GREEN,
    "waiting": ORANGE,
    "oom": RED,
    "gpu_lost": RED,
    "gpu_memory": RED,
    "fault": PURPLE,
    "ended": GREY,
    "objective": RED,
}
"""A word in a legend has one colour on every panel; anything else takes the palette's."""

Steps = tuple[tuple[float | None, str], ...]
"""Values from which on a colour holds, the first from minus infinity."""

GOOD_LOW: Steps = ((None, GREEN), (0.8, YELLOW), (0.95, RED))
GOOD_ZERO: Steps = ((None, GREEN), (1, RED))
PLAIN: Steps = ((None, BLUE),)


@dataclass(frozen=True)
class Search:
    """A search of Jaeger: traces with a span of an operation, of these tags and no shorter than a duration."""

    operation: str = ""
    tags: str = ""
    """Pairs ``name=value`` with blanks between them; all hold for one span."""
    at_least: str = ""


@dataclass(frozen=True)
class Panel:
    """One panel. ``queries`` are pairs of legend and expression; ``why`` is shown at a panel's corner."""

    title: str
    why: str
    queries: tuple[tuple[str, str | Search], ...]
    unit: str = "short"
    kind: str = "timeseries"
    stacked: bool = False
    steps: Steps = PLAIN
    top: float | None = None
    """The axis ends here; None: where the data do."""
    source: Source = "prometheus"
    trace_page: str = ""
    """Page that shows a trace which a table names; empty: Grafana's own."""


@dataclass(frozen=True)
class Row:
    """Panels beside each other, all of one height, under a title."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Dashboard:
    """A page. ``choices`` are pairs of a variable's name and the query of its values."""

    uid: str
    title: str
    about: str
    rows: tuple[Row, ...]
    choices: tuple[tuple[str, str], ...] = ()
    range: str = "now-1h"
    sources: tuple[Source, ...] = ("prometheus",)
    texts: tuple[tuple[str, str, str], ...] = ()
    """Fields to type in: variable, label and first value."""


def render(page: Dashboard) -> dict[str, Any]:
    """The JSON model of a dashboard."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row in page.rows:
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": row.title,
                "collapsed": False,
                "panels": [],
                "gridPos": {"x": 0, "y": y, "w": COLUMNS, "h": 1},
            }
        )
        y += 1
        width, height = COLUMNS // len(row.panels), HEIGHTS[row.panels[0].kind]
        for place, panel in enumerate(row.panels):
            where = {"x": place * width, "y": y, "w": width, "h": height}
            panels.append({"id": len(panels) + 1, "gridPos": where, **_panel(panel)})
        y += height
    return {
        "uid": page.uid,
        "title": page.title,
        "description": page.about,
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": page.range, "to": "now"},
        "tags": ["athanor"],
        "links": [
            {
                "type": "dashboards",
                "tags": ["athanor"],
                "title": "Athanor",
                "asDropdown": False,
                "icon": "dashboard",
                "includeVars": True,
                "keepTime": True,
                "targetBlank": False,
                "tooltip": "",
                "url": "",
            }
        ],
        "templating": {
            "list": [
                *(
                    {"name": VARIABLES[one], "type": "datasource", "query": one, "label": one.capitalize()}
                    for one in page.sources
                ),
                *(_choice(name, query) for name, query in page.choices),
                *(_text(*one) for one in page.texts),
            ]
        },
        "panels": panels,
    }


def _choice(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "label": name.capitalize(),
        "datasource": _source(),
        "query": query,
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _text(name: str, label: str, first: str) -> dict[str, Any]:
    return {"name": name, "type": "textbox", "label": label, "query": first, "current": {"text": first, "value": first}}


def _source(kind: Source = "prometheus") -> dict[str, str]:
    return {"type": kind, "uid": f"${{{VARIABLES[kind]}}}"}


def _panel(panel: Panel) -> dict[str, Any]:
    series = panel.kind == "timeseries"
    defaults: dict[str, Any] = {
        "unit": panel.unit,
        "min": 0,
        "noValue": "nothing yet",
        "color": {"mode": "palette-classic" if series else "thresholds"},
        "thresholds": {"mode": "absolute", "steps": [{"value": value, "color": color} for value, color in panel.steps]},
    }
    if panel.top is not None:
        defaults["max"] = panel.top
    if series:
        defaults["custom"] = {
            "drawStyle": "line",
            "lineInterpolation": "smooth",
            "lineWidth": 2,
            "showPoints": "never",
            "spanNulls": 60_000,
            "fillOpacity": 30 if panel.stacked else 8,
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
        }
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.why,
        "datasource": _source(panel.source),
        "fieldConfig": {"defaults": defaults, "overrides": _overrides(panel)},
        "options": _options(panel),
        "targets": [
            {"refId": chr(65 + place), **_target(panel, legend, query)}
            for place, (legend, query) in enumerate(panel.queries)
        ],
    }


def _target(panel: Panel, legend: str, query: str | Search) -> dict[str, Any]:
    """A query as its data source takes it."""
    if isinstance(query, Search):
        return {
            "queryType": "search",
            "service": "$service",
            "operation": query.operation,
            "tags": query.tags,
            "minDuration": query.at_least,
            "limit": SHOWN_TRACES,
        }
    if panel.source == "jaeger":
        return {"query": query}
    series = panel.kind == "timeseries"
    if panel.source == "tempo":
        return {"queryType": "traceql", "query": query, "limit": SHOWN_TRACES, "tableType": "spans"}
    return {
        "expr": query,
        "legendFormat": legend,
        "instant": not series,
        "range": series,
        **({"format": "table"} if panel.kind == "table" else {}),
        **({"exemplar": True} if series and any(name in query for name in WITH_EXEMPLARS) else {}),
    }


def _overrides(panel: Panel) -> list[dict[str, Any]]:
    words = [_override(word, MEANINGS[word]) for word in _words(panel)]
    if not panel.trace_page:
        return words
    link = {"title": "Waterfall", "url": f"/d/{panel.trace_page}?${{__url_time_range}}&var-trace=${{__value.raw}}"}
    shown = {"matcher": {"id": "byRegexp", "options": "/^(traceID|Trace ID|traceIdHidden)$/"}}
    return [*words, {**shown, "properties": [{"id": "links", "value": [link]}]}]


def _words(panel: Panel) -> list[str]:
    """Words with a meaning that this panel's legends may hold; a label may have any of them as its value."""
    told = " ".join(legend for legend, _ in panel.queries)
    by_label = {
        "{{athanor_outcome}}": ("ok", "refused", "invalid", "cancelled", "failed"),
        "{{athanor_token_type}}": ("input", "output", "cached"),
        "{{athanor_reason}}": ("oom", "fault", "gpu_lost", "gpu_memory", "ended"),
    }
    found = [word for word in MEANINGS if word in told.replace("{", " ").replace("}", " ").split()]
    return found + [word for label, words in by_label.items() if label in told for word in words]


def _override(word: str, color: str) -> dict[str, Any]:
    return {
        "matcher": {"id": "byRegexp", "options": f"/^{word}\\b/"},
        "properties": [{"id": "color", "value": {"mode": "fixed", "fixedColor": color}}],
    }


def _options(panel: Panel) -> dict[str, Any]:
    reduce = {"calcs": ["lastNotNull"], "fields": "", "values": False}
    if panel.kind == "timeseries":
        return {
            "legend": {"displayMode": "table", "placement": "bottom", "showLegend": True, "calcs": ["mean", "max"]},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    if panel.kind == "traces":
        return {}
    if panel.kind == "table" and panel.source != "prometheus":
        return {"showHeader": True, "cellHeight": "sm", "sortBy": [{"displayName": "Duration", "desc": True}]}
    if panel.kind == "stat":
        return {"colorMode": "value", "graphMode": "none", "textMode": "auto", "reduceOptions": reduce}
    if panel.kind == "bargauge":
        return {"displayMode": "gradient", "orientation": "horizontal", "reduceOptions": reduce}
    return {"showHeader": True, "cellHeight": "sm"}
