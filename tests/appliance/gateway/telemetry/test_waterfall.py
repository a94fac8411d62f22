"""The waterfall and the table of requests: exact looks at several widths, and safe texts."""

from __future__ import annotations

import io
from dataclasses import replace
from datetime import UTC
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console, RenderableType
from rich.text import Text

from appliance.common import figures
from appliance.gateway.telemetry.store import StoredTrace
from appliance.gateway.telemetry.waterfall import trace_table, waterfall
from tests.appliance import golden
from tests.appliance.gateway.telemetry import samples

GOLDEN = Path(__file__).parent / "golden"

TRACES = {
    "answered": samples.answered(),
    "refused": samples.refused(),
    "failed": samples.failed(),
    "bare": StoredTrace(samples.refused().summary, (), dropped_spans=3),
}


def render(what: RenderableType, width: int, *, color: bool = False, ascii_only: bool = False) -> str:
    """What a terminal of this width would show."""
    buffer = io.BytesIO()
    file = io.TextIOWrapper(buffer, encoding="ascii" if ascii_only else "utf-8")
    console = Console(file=file, width=width, force_terminal=color, color_system="truecolor" if color else None)
    console.print(what)
    file.flush()
    return buffer.getvalue().decode()


@pytest.mark.parametrize("width", [56, 80, 120])
@pytest.mark.parametrize("name", TRACES)
def test_waterfall_looks_as_agreed(name: str, width: int) -> None:
    """Each kind of request at each width is exactly as last looked at, and fits."""
    text = render(waterfall(TRACES[name], UTC), width)
    assert max(map(len, text.splitlines())) <= width
    golden.check(GOLDEN / f"waterfall-{name}-{width}.txt", text)


@pytest.mark.parametrize("width", [56, 80, 120])
def test_table_looks_as_agreed(width: int) -> None:
    """The list of requests drops columns as the terminal narrows, never figures within one."""
    traces = [trace.summary for trace in TRACES.values()]
    traces.append(replace(samples.SUMMARY, model="a-model-with-a-very-long-name-indeed", tenant=None))
    text = render(trace_table(traces, UTC), width)
    assert max(map(len, text.splitlines())) <= width
    golden.check(GOLDEN / f"table-{width}.txt", text)


def test_ascii_terminal() -> None:
    """Where the terminal has ASCII only, the bars are still bars."""
    text = render(waterfall(samples.answered(), UTC), 80, ascii_only=True)
    assert text.isascii()
    golden.check(GOLDEN / "waterfall-answered-ascii.txt", text)


def test_colour_adds_nothing_but_colour() -> None:
    """Without its colour codes the coloured output is the plain one."""
    coloured = render(waterfall(samples.failed(), UTC), 80, color=True)
    plain = render(waterfall(samples.failed(), UTC), 80)
    assert "\x1b[" in coloured
    assert Text.from_ansi(coloured).plain.split() == plain.split()


def test_texts_of_others_cannot_steer_the_terminal() -> None:
    """Escape sequences and rich's own markup in names come out as harmless text."""
    evil = "\x1b]0;owned\x07[bold red]x[/]"
    summary = replace(samples.SUMMARY, model=evil, tenant=evil, error=evil, route=evil, policy_rule=evil)
    trace = replace(samples.answered(), summary=summary)
    text = render(waterfall(trace, UTC), 200) + render(trace_table([summary], UTC), 200)
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[bold red]x[/]" in text


def test_an_unsafe_sandbox_is_red() -> None:
    """A request served without a sandbox says so in red; one in gVisor does not."""
    unsafe = replace(samples.SUMMARY, sandbox="none")
    red = render(waterfall(replace(samples.answered(), summary=unsafe)), 80, color=True)
    calm = render(waterfall(samples.answered()), 80, color=True)
    assert "\x1b[1;31mnone" in red
    assert "\x1b[1;31m" not in calm


@settings(max_examples=60, deadline=None)
@given(
    times=st.lists(st.tuples(st.integers(0, 10**13), st.integers(0, 10**13)).map(sorted), min_size=1, max_size=8),
    width=st.integers(40, 200),
)
def test_any_times_fit_any_width(times: list[list[int]], width: int) -> None:
    """Whatever the spans' times, every line fits and every span has a visible bar."""
    spans = tuple(
        replace(samples.span(n + 1, 1 if n else None, "athanor.queue", 0, 0), start_ns=a, end_ns=b)
        for n, (a, b) in enumerate(times)
    )
    text = render(waterfall(StoredTrace(samples.SUMMARY, spans), UTC), width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    bars = [line for line in lines if "queue" in line]
    assert len(bars) == len(spans)
    assert all(set(line) & set("\u2501\u2578\u257a") for line in bars)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0, "0.00 ms"),
        (0.00021, "0.21 ms"),
        (0.0041, "4.10 ms"),
        (0.0999, "99.9 ms"),
        (0.842, "842 ms"),
        (0.9996, "1.00 s"),
        (1.84, "1.84 s"),
        (61.5, "61.5 s"),
        (125, "2 min 05 s"),
        (3_725, "1 h 02 min"),
        (200_000, "2 d 07 h"),
    ],
)
def test_durations(seconds: float | None, text: str) -> None:
    """Durations have three digits and the unit that suits them."""
    assert figures.duration(seconds) == text
