"""Requests and tokens of each tenant since the start: shown by every surface, never used for a decision.

A request counts when it ends. Tokens count as they flow: those of requests that still run are read from their outcomes
whenever somebody asks, so that a long answer is seen while it is written, and a token costs nothing here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields

from appliance.common.errors import ApplianceError
from appliance.common.outcomes import outcome_of
from appliance.common.status import Counts

STRANGER = ""
"""Name under which callers without a valid credential count: in the sum of all, and as no tenant."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens of one request up to now."""

    tenant: str
    model: str
    input: int = 0
    """0 until an engine took the request up."""
    cached: int = 0
    output: int = 0


FIELDS = tuple(one.name for one in fields(Counts))


def plus(one: Counts, other: Counts) -> Counts:
    """Return the sum of two counts."""
    return Counts(*(getattr(one, name) + getattr(other, name) for name in FIELDS))


class TenantCounts:
    """Counts of all tenants. Tenants come from verified credentials only, so there are no more than policies name."""

    def __init__(self, running: Callable[[], Iterable[Tokens]] = tuple) -> None:
        """``running`` gives the tokens of each request that has not ended."""
        self._running = running
        # A plain dictionary, the latest caller last: a copy of 10,000 tenants is several times quicker than an ordered
        # one's, and there is one each second.
        self._ended: dict[str, Counts] = {}
        self._total = Counts()
        self._tokens: Counter[tuple[str, str, str]] = Counter()
        """Tokens of requests that have ended, by tenant, model and type."""
        self._changed: set[tuple[str, str, str]] = set()

    @property
    def latest(self) -> Iterator[tuple[str, Counts]]:
        """Tenants with a request that has ended, the latest first, each with the counts of those."""
        return reversed(self._ended.items())

    def now(self) -> tuple[Mapping[str, Counts], Counts]:
        """Return the counts of every tenant that has called, strangers' under ``STRANGER``, and their sum."""
        found, total = dict(self._ended), self._total
        for one in self._running():
            flowing = _flowing(one)
            found[one.tenant], total = plus(found.get(one.tenant, Counts()), flowing), plus(total, flowing)
        return found, total

    def of(self, tenant: str) -> Counts:
        """Return one tenant's counts; zeros for one that never called."""
        return self.now()[0].get(tenant, Counts())

    def add(self, tokens: Tokens, error: ApplianceError | None) -> None:
        """Count a request that has ended, with its tokens; ``running`` gives it no more."""
        more = plus(Counts(**{outcome_of(error): 1}), _flowing(tokens))
        whose = tokens.tenant
        self._ended[whose], self._total = plus(self._ended.pop(whose, Counts()), more), plus(self._total, more)
        for key, amount in _by_type(tokens):
            if amount:
                self._tokens[key] += amount
                self._changed.add(key)

    def moved(self) -> dict[tuple[str, str, str], int]:
        """Return the tokens by tenant, model and type, of those that may have changed since the last call."""
        found = {key: self._tokens[key] for key in self._changed}
        self._changed.clear()
        for one in self._running():
            for key, amount in _by_type(one):
                if amount:
                    found[key] = found.get(key, self._tokens[key]) + amount
        return found


def _flowing(one: Tokens) -> Counts:
    return Counts(input_tokens=one.input, cached_tokens=one.cached, output_tokens=one.output)


def _by_type(one: Tokens) -> tuple[tuple[tuple[str, str, str], int], ...]:
    whose = one.tenant, one.model
    return ((*whose, "input"), one.input), ((*whose, "cached"), one.cached), ((*whose, "output"), one.output)
