"""What the console and its history count of engines."""

from __future__ import annotations

from appliance.gateway.engine_link import EngineLink
from appliance.gateway.rooms import ModelRooms


class TokenCount:
    """Output tokens of all engines since the start; an engine counts its own from nothing."""

    def __init__(self) -> None:
        self._ended: dict[tuple[str, str], int] = {}
        self._seen: dict[tuple[str, str], tuple[EngineLink, int]] = {}
        self.total = 0

    def look(self, rooms: ModelRooms) -> int:
        """The tokens of these rooms since the start, as far as they were looked at."""
        key = rooms.name, rooms.tenant
        link = rooms.engine
        if link is not None:
            before = self._seen.get(key)
            new = link.tokens - (before[1] if before is not None and before[0] is link else 0)
            self._seen[key] = link, link.tokens
            self._ended[key] = self._ended.get(key, 0) + new
            self.total += new
        return self._ended.get(key, 0)


def running(engine: EngineLink | None) -> int:
    """Requests in the engine's last step, those that have ended since left out."""
    return min(engine.stats.running, len(engine.live)) if engine is not None else 0


def waiting(engine: EngineLink | None) -> int:
    """Requests that waited inside the engine at its last step, those that have ended since left out."""
    return min(engine.stats.waiting, len(engine.live) - running(engine)) if engine is not None else 0
