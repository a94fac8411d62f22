"""How many HTTP connections, or gRPC calls, one address and one tenant hold, so that neither can take all there are.

An address is known when a connection opens, a tenant with its first credential. Single-threaded, as the event loop is.
"""

from __future__ import annotations

from collections import Counter


class Connections:
    """The counts; ``most``: connections, or calls, of one address or of one tenant."""

    def __init__(self, most: int) -> None:
        self.ending = False
        """Whether each connection ends with its next answer: nothing new is taken."""
        self._most = most
        self._held: Counter[tuple[str, str]] = Counter()

    def enter(self, kind: str, name: str) -> bool:
        """Count one in; False, and not counted, when ``name`` holds as many as it may."""
        if self._held[kind, name] >= self._most:
            return False
        self._held[kind, name] += 1
        return True

    def leave(self, kind: str, name: str) -> None:
        """Count one out that was counted in."""
        self._held[kind, name] -= 1
        if not self._held[kind, name]:
            del self._held[kind, name]
