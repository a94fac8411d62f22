"""Figures as tables for a terminal of 80 columns; pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from appliance.operator.bench.metrics import Distribution, Figures

LATE_S = 0.005
"""A client later than this at p99 was itself short of processor: the server's latencies are then upper bounds."""


def tables(results: Sequence[Figures], heading: str) -> RenderableType:
    """Tables of the loads that went through HTTP."""
    parts: list[RenderableType] = ["", Text(heading, "bold"), "", _throughput(results), "", _latency(results), ""]
    parts += [_goodput(results), ""]
    if any(one.server_us_per_token for one in results):
        parts += [_processor(results), ""]
    if any(len(one.by_tenant) > 1 for one in results):
        parts += [_tenants(results), ""]
    notes = list(_notes(results))
    if notes:
        parts += [*(Padding(note, (0, 0, 0, 2)) for note in notes), ""]
    return Group(*parts)


def engine_table(rows: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> RenderableType:
    """The engine alone."""
    table = _table("ENGINE ALONE")
    for title in ("PREFILL/S", "DECODE/S", "STEP", "OF ROOFLINE"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            Text(f"{row['batch']} sequences"),
            number(row["prefill_tokens_per_s"]),
            number(row["decode_tokens_per_s"]),
            milliseconds(row["step_s"]),
            Text(f"{100 * row['roofline_share']:.0f} %"),
        )
    text = (
        f"{facts['model']}, {facts['dtype']}, {facts['threads']} thread(s); memory read at "
        f"{facts['read_bytes_per_s'] / 1e9:.1f} GB/s in this run, weights {facts['weight_bytes'] / 1e6:,.1f} MB"
    )
    parts: list[RenderableType] = ["", table, "", Text(f"  {text}", "dim"), Text(f"  {facts['backend']}", "dim")]
    if facts["weight_bytes"] < facts["cache_bytes"]:
        parts.append(Text("  these weights fit the processor's cache: the roofline of memory says little here", "dim"))
    return Group(*parts, "")


def _throughput(results: Sequence[Figures]) -> Table:
    table = _table("LOAD")
    priced = any(one.cost_per_million is not None for one in results)
    for title in ("REQUESTS", "FAILED", "REQ/S", "TOKENS/S", "CACHED", *(("$/M TOKENS",) if priced else ())):
        table.add_column(title, justify="right", no_wrap=True)
    for one in results:
        cells = [
            Text(f"{one.requests:,}"),
            Text(f"{one.failed:,}", "bold red" if one.failed else "dim"),
            number(one.requests_per_s),
            number(one.output_tokens_per_s),
            Text(f"{100 * one.cached_share:.1f} %", "" if one.cached_tokens else "dim"),
        ]
        if priced:
            cells.append(Text("-" if one.cost_per_million is None else f"{one.cost_per_million:.2f}"))
        table.add_row(Text(one.label, "bold"), *cells)
    return table


def _latency(results: Sequence[Figures]) -> Table:
    table = _table("LATENCY")
    for title in ("", "P50", "P95", "P99", "WORST"):
        table.add_column(title, justify="right" if title else "left", no_wrap=True)
    for one in results:
        rows = (("first token", one.ttft), ("each later token", one.tpot), ("gap", one.itl), ("whole", one.e2e))
        for place, (name, spread) in enumerate(rows):
            load = Text("" if place else one.label, "bold")
            table.add_row(load, Text(name, "dim"), *_cells(spread))
    return table


def _goodput(results: Sequence[Figures]) -> Table:
    table = _table("WITHIN")
    names = [good.objective for good in results[0].good]
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
        table.add_column("REQ/S", justify="right", no_wrap=True)
    for one in results:
        cells: list[Text] = []
        for good in one.good:
            style = "green" if good.share >= 0.99 else "yellow" if good.share >= 0.5 else "red"
            cells += [Text(f"{100 * good.share:.1f} %", style), number(good.requests_per_s)]
        table.add_row(Text(one.label, "bold"), *cells)
    return table


def _processor(results: Sequence[Figures]) -> Table:
    table = _table("PROCESSOR TIME, us a token")
    labels = sorted({label for one in results for label in one.server_us_per_token})
    for label in (*labels, "client"):
        table.add_column(label.upper(), justify="right", no_wrap=True)
    for one in results:
        values = [one.server_us_per_token.get(label, 0.0) for label in labels]
        table.add_row(Text(one.label, "bold"), *map(number, values), number(one.client_us_per_token))
    return table


def _tenants(results: Sequence[Figures]) -> Table:
    table = _table("TENANT")
    for title in ("", "REQUESTS", "TOKENS", "CACHED", "TTFT P50", "TTFT P99"):
        table.add_column(title, justify="right" if title else "left", no_wrap=True)
    for one in results:
        for place, (tenant, row) in enumerate(one.by_tenant.items()):
            share = row["cached_tokens"] / row["prompt_tokens"] if row["prompt_tokens"] else 0.0
            table.add_row(
                Text("" if place else one.label, "bold"),
                Text(f"key {tenant + 1}", "dim"),
                Text(f"{row['requests']:,.0f}"),
                Text(f"{row['output_tokens']:,.0f}"),
                Text(f"{100 * share:.1f} %"),
                milliseconds(row["ttft_p50_s"]),
                milliseconds(row["ttft_p99_s"]),
            )
    return table


def _notes(results: Sequence[Figures]) -> Iterator[Text]:
    for one in results:
        if one.failed:
            kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(one.failures.items()))
            yield Text(f"{one.label}: {one.failed} of {one.requests} failed ({kinds}); its rates are void", "red")
        if one.client_late is not None and one.client_late.p99 > LATE_S:
            late = f"{one.client_late.p99 * 1e3:.0f} ms"
            yield Text(f"{one.label}: this client was late by {late} at p99; latencies hold that too", "yellow")
        if not one.counted and one.requests > one.failed:
            yield Text(f"{one.label}: the server reports no counts; an event was taken for a token", "yellow")
        if one.reconnects:
            yield Text(f"{one.label}: {one.reconnects} idle connections were closed by the server", "dim")


def _cells(spread: Distribution | None) -> list[Text]:
    if spread is None:
        return [Text("-", "dim")] * 4
    return [milliseconds(value) for value in (spread.p50, spread.p95, spread.p99, spread.most)]


def milliseconds(seconds: float) -> Text:
    """Three significant digits."""
    value = seconds * 1e3
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    return Text(f"{value:,.{digits}f} ms", "" if value >= 0.005 else "dim")


def number(value: float) -> Text:
    """A rate with as many digits as mean something."""
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    return Text(f"{value:,.{digits}f}", "" if value else "dim")


def _table(title: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column(title, no_wrap=True)
    return table
