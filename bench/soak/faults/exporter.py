"""The collector of spans is away, silent, refusing or mad. No request may notice."""

from __future__ import annotations

from bench.soak.collector import Mood
from bench.soak.ground import Act, Fault, Ground

DROPPED = "athanor_telemetry_dropped_spans"
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

        before = await ground.served.metric(DROPPED, reason="export_failed")
        await ground.collector.become(mood)
        try:
            await ground.last(4.0, 8.0)
            return await ground.until(is_missed if mood == "away" else is_met, MET_S)
        finally:
            await ground.collector.become("well")

    return act


FAULTS = (
    Fault("exporter-away", "nobody listens where spans go", _mood("away")),
    Fault("exporter-silent", "the collector takes spans and never answers", _mood("silent")),
    Fault("exporter-refusing", "the collector answers 503", _mood("refusing")),
    Fault("exporter-mad", "the collector answers with nonsense", _mood("mad")),
)
