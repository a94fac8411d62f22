"""The collector of spans is away, silent, refusing or mad. No request may notice.

Each lasts until the queue of spans is full, where the load fills it in time: then every such fault costs the gateway
the same memory, the most that it may, and what grows from one to the next is no queue that was a bit longer this time.
"""

from __future__ import annotations

from bench.soak.collector import Mood
from bench.soak.ground import Act, Fault, Ground

DROPPED = "athanor_telemetry_dropped_spans"
FULL_S = 25.0
"""Within which the load fills the queue on an idle machine: 4,096 spans, of some hundred requests a second."""

MET_S = 30.0
"""Within which an export has come, or has been given up: one is made every few seconds and tried again for ten."""


def _mood(mood: Mood) -> Act:
    async def act(ground: Ground) -> str:
        met = ground.collector.met[mood]

        async def is_met() -> str:
            """Whoever is away does not know who came."""
            more = ground.collector.met[mood] - met
            return f"{more} exports met it" if more else ""

        async def is_missed() -> str:
            lost = await ground.served.metric(DROPPED, reason="export_failed") - before
            return f"{lost:g} spans were given up" if lost > 0 else ""

        async def is_full() -> str:
            more = await ground.served.metric(DROPPED, reason="queue_full") - fitted
            return f"; the queue was full, {more:g} spans found no place" if more > 0 else ""

        before = await ground.served.metric(DROPPED, reason="export_failed")
        fitted = await ground.served.metric(DROPPED, reason="queue_full")
        await ground.collector.become(mood)
        try:
            await ground.last(4.0, 8.0)
            shown = await ground.until(is_missed if mood == "away" else is_met, MET_S)
            return shown and shown + await ground.until(is_full, FULL_S)
        finally:
            await ground.collector.become("well")

    return act


FAULTS = (
    Fault("exporter-away", "nobody listens where spans go", _mood("away")),
    Fault("exporter-silent", "the collector takes spans and never answers", _mood("silent")),
    Fault("exporter-refusing", "the collector answers 503", _mood("refusing")),
    Fault("exporter-mad", "the collector answers with nonsense", _mood("mad")),
)
