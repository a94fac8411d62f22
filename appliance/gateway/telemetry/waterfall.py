"""Stored traces as text for a terminal. Pure.

One request is a waterfall: a row a span, its bar on a common time axis with half a cell's
precision. Several are a table. Both fit the width they are given, say the same without colour,
and fall back to ASCII where the terminal has nothing better.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import tzinfo

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from appliance.common import figures
from appliance.common.figures import NS, counted, duration, printable
from appliance.common.outcomes import CANCELLED, FAILED, INVALID, OK, REFUSED
from appliance.common.status import is_unsafe
from appliance.gateway.telemetry import names
from appliance.gateway.telemetry.store import StoredSpan, StoredTrace, TraceSummary

GAP = 2
"""Columns between two columns of the table."""

MIN_TEXT = 7
"""Columns to which a text in the table shrinks at most."""

MIN_BAR = 12
"""Columns of the time axis at least."""

TICK_ROOM = 12
"""Columns between two marks of the time axis: a duration and some air."""

SHORT_ID = 8
"""Digits of an id in the table: enough to name it to ``athanor traces``."""

OUTCOME_STYLES = {OK: "green", REFUSED: "yellow", INVALID: "yellow", CANCELLED: "dim", FAILED: "bold red"}

_WIDE = ("ID", "ENDED", "TENANT", "MODEL", "OUTCOME", "IN", "CACHED", "OUT", "TTFT", "TOK/S", "TOTAL")
_MEDIUM = ("ID", "ENDED", "TENANT", "MODEL", "OUTCOME", "IN", "OUT", "TTFT", "TOTAL")
_LAYOUTS = ((100, _WIDE), (76, _MEDIUM), (0, ("ID", "TENANT", "OUTCOME", "TOTAL")))
"""Columns of the terminal from which on the table shows so much; the waterfall shows the rest."""

_NUMBERS = frozenset({"IN", "CACHED", "OUT", "TTFT", "TOK/S", "TOTAL"})

_PHASE_STYLES = {"policy": "magenta", "text": "cyan", "queue": "yellow", "prefill": "blue", "decode": "green"}


@dataclass(frozen=True, slots=True)
class _Glyphs:
    full: str
    left: str
    right: str
    grid: str


_LINES = _Glyphs("\u2501", "\u2578", "\u257a", "\u250a")
_ASCII = _Glyphs("=", "-", "-", ":")


def waterfall(trace: StoredTrace, zone: tzinfo | None = None) -> RenderableType:
    """Return one request as a heading, a bar for each span, and the facts below; times in ``zone`` or local."""
    parts: list[RenderableType] = [_heading(trace.summary, zone), "", _Bars(trace), ""]
    if trace.dropped_spans:
        parts += [Text(f"  {counted(trace.dropped_spans, 'more span')} not kept", "dim"), ""]
    return Group(*parts, Padding(_Facts(trace), (0, 0, 0, 2)))


def trace_table(traces: Sequence[TraceSummary], zone: tzinfo | None = None) -> RenderableType:
    """Return a table of requests, one on each line, in the order given."""
    return _TraceTable(tuple(traces), zone)


@dataclass(frozen=True, slots=True)
class _TraceTable:
    traces: tuple[TraceSummary, ...]
    zone: tzinfo | None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        titles = next(shown for least, shown in _LAYOUTS if options.max_width >= least)
        rows = [_cells(one, self.zone) for one in self.traces]
        widths = {title: max([len(title), *(len(row[title]) for row in rows)]) for title in titles}
        _shrink(widths, options.max_width - GAP * (len(titles) - 1))
        table = Table(box=None, padding=(0, GAP, 0, 0), header_style="dim", pad_edge=False)
        for title in titles:
            table.add_column(
                title,
                width=widths[title],
                justify="right" if title in _NUMBERS else "left",
                no_wrap=True,
                overflow="ellipsis",
            )
        for row in rows:
            table.add_row(*(row[title] for title in titles))
        yield table


def _cells(one: TraceSummary, zone: tzinfo | None) -> dict[str, Text]:
    def number(text: str) -> Text:
        return Text(text, "dim" if text in ("-", "0") else "")

    return {
        "ID": Text(printable(one.request_id.removeprefix("req_"))[:SHORT_ID], "bold"),
        "ENDED": Text(figures.clock(one.started_ns + round(one.duration_s * NS), zone), "dim"),
        "TENANT": Text(printable(one.tenant or "-")),
        "MODEL": Text(printable(one.model or "-")),
        "OUTCOME": Text(printable(one.error or one.outcome), OUTCOME_STYLES.get(one.outcome, "")),
        "IN": number(figures.count(one.input_tokens)),
        "CACHED": number(figures.count(one.cached_tokens)),
        "OUT": number(figures.count(one.output_tokens)),
        "TTFT": number(duration(one.ttft_s)),
        "TOK/S": number(figures.rate(one.token_s)),
        "TOTAL": number(duration(one.duration_s)),
    }


def _shrink(widths: dict[str, int], room: int) -> None:
    """Take columns away from the texts, the model's name first, until the table fits."""
    for title in ("MODEL", "OUTCOME", "TENANT"):
        excess = sum(widths.values()) - room
        if title in widths and excess > 0:
            widths[title] = max(widths[title] - excess, min(MIN_TEXT, widths[title]))


def _heading(one: TraceSummary, zone: tzinfo | None) -> Text:
    style = OUTCOME_STYLES.get(one.outcome, "")
    text = Text()
    text.append(printable(one.request_id), "bold")
    text.append("   ")
    text.append(one.outcome, style)
    text.append(f" in {duration(one.duration_s)}\n")
    text.append(f"{printable(one.route)}   {figures.clock(one.started_ns, zone, date=True)}", "dim")
    text.append(f"\ntrace {printable(one.trace_id)}", "dim")
    return text


@dataclass(frozen=True, slots=True)
class _Row:
    label: str
    span: StoredSpan
    style: str


@dataclass(frozen=True, slots=True)
class _Bars:
    """Spans of a request on a time axis that ends with the request."""

    trace: StoredTrace

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rows = list(_rows(self.trace.spans))
        if not rows:
            yield Text("  no spans were recorded", "dim")
            return
        start_ns = min(row.span.start_ns for row in rows)
        total_ns = max(max(row.span.end_ns for row in rows) - start_ns, 1)
        times = [duration((row.span.end_ns - row.span.start_ns) / NS) for row in rows]
        label_width = max(len(row.label) for row in rows)
        time_width = max(len(text) for text in times)
        before = 2 + label_width + 2 + time_width + 2
        width = max(options.max_width - before - 1, MIN_BAR)
        glyphs = _ASCII if options.ascii_only else _LINES
        marks = _marks(total_ns, width)
        yield Text(" " * before + _axis(marks, total_ns, width), "dim", no_wrap=True)
        for row, text in zip(rows, times, strict=True):
            line = Text(f"  {row.label:<{label_width}}  ", no_wrap=True)
            line.append(f"{text:>{time_width}}  ", "dim")
            begin = (row.span.start_ns - start_ns) / total_ns
            end = (row.span.end_ns - start_ns) / total_ns
            line.append_text(_bar((begin, end), width, marks, glyphs, row.style))
            line.rstrip()
            yield line


def _rows(spans: Iterable[StoredSpan]) -> Iterator[_Row]:
    ordered = list(spans)
    depths: dict[str, int] = {}
    for span in ordered:
        depth = depths[span.span_id] = depths.get(span.parent_id or "", -1) + 1
        phase = span.name.removeprefix(names.OWN_PREFIX)
        label = phase if phase != span.name else str(span.attributes.get(names.OPERATION, "request"))
        style = "red" if span.error else _PHASE_STYLES.get(phase, "bright_black")
        yield _Row("  " * depth + printable(label), span, style)


def _marks(total_ns: int, width: int) -> list[tuple[int, str]]:
    """Return column and label of each mark: round times, about ``TICK_ROOM`` columns apart, as far as
    their labels do not run into the total at the end of the axis."""
    least_ns = total_ns * TICK_ROOM / width
    sizes = (size * 10**power for power in range(3, 16) for size in (1, 2, 5))
    step_ns = next((size for size in sizes if size >= least_ns), total_ns)
    room = width - len(duration(total_ns / NS)) - 1
    marks = []
    for ns in range(0, total_ns, step_ns):
        column, label = int(ns / total_ns * width), figures.mark(ns / NS)
        if column + len(label) <= room:
            marks.append((column, label))
    return marks


def _axis(marks: list[tuple[int, str]], total_ns: int, width: int) -> str:
    end = duration(total_ns / NS)
    line = [" "] * width
    for column, label in marks:
        line[column : column + len(label)] = label
    line[width - len(end) :] = end
    return "".join(line)


def _bar(reach: tuple[float, float], width: int, marks: list[tuple[int, str]], glyphs: _Glyphs, style: str) -> Text:
    halves = 2 * width
    first = min(int(reach[0] * halves), halves - 1)
    last = min(max(round(reach[1] * halves), first + 1), halves)
    grid = {column for column, _ in marks}
    text = Text(no_wrap=True)
    for column in range(width):
        left, right = first <= 2 * column < last, first <= 2 * column + 1 < last
        if left or right:
            text.append(glyphs.full if left and right else glyphs.left if left else glyphs.right, style)
        else:
            text.append(glyphs.grid if column in grid else " ", "bright_black")
    return text


@dataclass(frozen=True, slots=True)
class _Facts:
    """Yield the facts of a request (caller, subject, result), in one or two columns."""

    trace: StoredTrace

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        facts = list(_facts(self.trace))
        columns = 2 if options.max_width >= 70 else 1
        table = Table.grid(padding=(0, 2, 0, 0))
        for _ in range(columns):
            table.add_column(style="dim", no_wrap=True)
            table.add_column(overflow="fold")
        height = -(-len(facts) // columns)
        for index in range(height):
            row = facts[index::height]
            table.add_row(*(cell for fact in row for cell in fact))
        yield table


def _facts(trace: StoredTrace) -> Iterator[tuple[Text, Text]]:
    one = trace.summary
    known = {name: value for span in trace.spans for name, value in span.attributes.items()}

    def fact(label: str, value: str | None, style: str = "") -> Iterator[tuple[Text, Text]]:
        if value:
            yield Text(label), Text(printable(value), style)

    yield from fact("tenant", one.tenant, "bold")
    yield from fact("model", one.model)
    if one.input_tokens or one.output_tokens:
        cached = f" ({one.cached_tokens:,} cached)" if one.cached_tokens else ""
        yield from fact("tokens", f"{one.input_tokens:,} in{cached}, {one.output_tokens:,} out")
    if one.ttft_s is not None:
        speed = f", {figures.rate(one.token_s)} tokens/s" if one.token_s else ""
        yield from fact("speed", f"first token {duration(one.ttft_s)}{speed}")
    yield from fact("error", one.error, OUTCOME_STYLES.get(one.outcome, ""))
    yield from fact("finish", one.finish_reason)
    yield from fact("rule", one.policy_rule)
    yield from fact("policy", _short(known.get(names.POLICY_DIGEST)))
    unsafe = one.sandbox is not None and is_unsafe(one.sandbox)
    yield from fact("sandbox", one.sandbox, "bold red" if unsafe else "")
    yield from fact("replays", _short(known.get(names.own_attribute("replays"))))


def _short(value: object) -> str | None:
    """Return a value's first digits, enough to name a digest; None for None."""
    return None if value is None else str(value)[:16]
