"""Times on the command line: one reader for every command that takes a time."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from appliance.operator.cli import exits
from appliance.operator.cli.terminal import fail

SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
"""Seconds of the units of a time that lies back."""

MOMENTS = (
    "now, today, yesterday, month, last-month, 90m, 36h, 7d, 2w, 2026-11, 2026-11-24, 2026-11-24T13 or "
    "2026-11-24T13:30:00Z"
)
"""Forms that help and errors name; ``90m`` is ninety minutes before now."""

_BACK = re.compile(r"([0-9]{1,6})([smhdw])")
_FORMS = ("%Y-%m", "%Y-%m-%d", "%Y-%m-%dT%H")


def read_moment(text: str, now: datetime, option: str) -> datetime:
    """Read a time, UTC where it names no zone; one that is none ends the command with a usage error."""
    today = now.replace(hour=0, minute=0, second=0, microsecond=0)
    month = today.replace(day=1)
    named = {
        "now": now,
        "today": today,
        "yesterday": today - timedelta(days=1),
        "month": month,
        "last-month": (month - timedelta(days=1)).replace(day=1),
    }
    if text in named:
        return named[text]
    try:
        return _back(text, now) or _absolute(text)
    except (ValueError, OverflowError):
        fail(exits.USAGE, f"{option} {text!r} is no time; write {MOMENTS}", "UTC where no zone is named")


def _back(text: str, now: datetime) -> datetime | None:
    found = _BACK.fullmatch(text)
    return now - timedelta(seconds=int(found[1]) * SECONDS[found[2]]) if found is not None else None


def _absolute(text: str) -> datetime:
    for form in _FORMS:
        try:
            return datetime.strptime(text, form).replace(tzinfo=UTC)
        except ValueError:
            continue
    moment = datetime.fromisoformat(text)
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
