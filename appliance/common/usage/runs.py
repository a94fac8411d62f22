"""Times at which the appliance ran, in the usage book: from the opening of the audit log to the last entry. Blocks.

An entry that the log was opened begins a run; every later entry proves that the run still went on. So what a killed
appliance did not write is not counted, and a book that is made again from the log has the same runs. Times are
milliseconds since the Unix epoch.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from appliance.common.audit.entry import Entry

OPENING = frozenset({"opened", "recovered"})
"""Events of the log with which a run begins."""

_FOLLOW = "UPDATE runs SET last = MAX(last, ?) WHERE began = (SELECT MAX(began) FROM runs)"


def follow(connection: sqlite3.Connection, batch: Sequence[tuple[int, Entry]]) -> None:
    """Take the times of entries of the audit log, in their order."""
    latest = 0
    for time_ms, one in batch:
        if one.kind == "log" and one.fields["event"] in OPENING:
            connection.execute(_FOLLOW, (latest,))
            connection.execute("INSERT OR IGNORE INTO runs VALUES (?, ?)", (time_ms, time_ms))
            latest = 0
        if one.kind:
            latest = max(latest, time_ms)
    connection.execute(_FOLLOW, (latest,))


def awake_ms(connection: sqlite3.Connection, since_ms: int, until_ms: int, now_ms: int | None) -> int:
    """Return the milliseconds between two moments in which the appliance ran; ``now_ms``: it runs now, so that the
    last run lasts until then, and None where it does not."""
    runs = connection.execute("SELECT began, last FROM runs ORDER BY began").fetchall()
    if runs and now_ms is not None:
        runs[-1] = runs[-1][0], max(runs[-1][1], now_ms)
    return sum(max(0, min(last, until_ms) - max(began, since_ms)) for began, last in runs)
