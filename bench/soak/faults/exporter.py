"""The collector of spans is away, silent, refusing or mad. No request may notice."""

from __future__ import annotations

from bench.soak.collector import Mood
from bench.soak.ground import Act, Fault, Ground


def _mood(mood: Mood) -> Act:
    async def act(ground: Ground) -> None:
        await ground.collector.become(mood)
        try:
            await ground.last(4.0, 8.0)
        finally:
            await ground.collector.become("well")

    return act


FAULTS = (
    Fault("exporter-away", "nobody listens where spans go", _mood("away")),
    Fault("exporter-silent", "the collector takes spans and never answers", _mood("silent")),
    Fault("exporter-refusing", "the collector answers 503", _mood("refusing")),
    Fault("exporter-mad", "the collector answers with nonsense", _mood("mad")),
)
