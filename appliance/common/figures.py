"""Times and counts as short text for a terminal, and foreign text made safe for it. Pure."""

from __future__ import annotations

from datetime import datetime, tzinfo

from policy.wording import counted as counted

NS = 1_000_000_000
"""Nanoseconds in a second."""


def duration(seconds: float | None) -> str:
    """Three significant digits and a unit: ``0.21 ms``, ``842 ms``, ``1.84 s``, ``2 min 05 s``."""
    if seconds is None:
        return "-"
    if seconds < 0.9995:
        return f"{_three(seconds * 1_000)} ms"
    if seconds < 100:
        return f"{_three(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes:02d} min"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours:02d} h"


def mark(seconds: float) -> str:
    """A round time on an axis, without trailing zeros: ``0``, ``0.5 ms``, ``200 ms``, ``2 s``."""
    if seconds == 0:
        return "0"
    return f"{seconds * 1_000:g} ms" if seconds < 1 else f"{seconds:g} s"


def rate(token_s: float | None) -> str:
    """Tokens a second from seconds a token."""
    return "-" if not token_s else _three(1 / token_s)


def count(number: int | None) -> str:
    """A whole number with thin groups: ``12,345``; ``-`` when it is not known."""
    return "-" if number is None else f"{number:,}"


def clock(ns: int, zone: tzinfo | None = None, *, date: bool = False) -> str:
    """Unix nanoseconds as time of day, local unless a zone is given."""
    moment = datetime.fromtimestamp(ns / NS, zone)
    return moment.strftime("%Y-%m-%d %H:%M:%S" if date else "%H:%M:%S")


def printable(text: str) -> str:
    """The text with control characters replaced: what a caller chose must not steer a terminal."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def size(count: int) -> str:
    """Bytes with a binary unit: ``512 B``, ``64 KiB``, ``1.5 GiB``."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.1f} {units[0]}" if value < 10 and units[0] != "B" else f"{value:,.0f} {units[0]}"


def _three(value: float) -> str:
    if value < 9.995:
        return f"{value:.2f}"
    return f"{value:.1f}" if value < 99.95 else f"{value:.0f}"
