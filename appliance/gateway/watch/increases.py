"""Totals of others as increases. Pure."""

from __future__ import annotations


class Increases:
    """Turns totals into what has been added; a new process behind them counts from nothing."""

    def __init__(self, *, ours: bool) -> None:
        """``ours``: this process keeps the totals. What another one has counted before the first call was added in an
        earlier life of this process, and is not added again."""
        self._ours = ours
        self._seen: dict[tuple[str, ...], int] = {}

    def since(self, name: tuple[str, ...], total: int) -> int:
        """Return what has been added since the last call with this name."""
        before, self._seen[name] = self._seen.get(name, 0 if self._ours else total), total
        return total - before if total >= before else total
