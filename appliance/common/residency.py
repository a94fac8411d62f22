"""Sandboxes of single tenants: who has some, how many there may be at once, and who has to go for another. Pure.

Both host processes hold to it: the gateway chooses who goes, since it knows who is busy; the supervisor counts for
itself, since the gateway may have been taken over. Times are monotonic seconds, given by the caller.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from policy.adapters import base_of
from policy.model import IsolationClass, PolicySet
from policy.routes import reachable

TEXT_MEMORY_BYTES = 2 << 30
"""Memory of a text sandbox: tokenizer tables of a few hundred MiB and one rendering, two grammars that are compiled
(512 MiB each, ``engine.text.grammar_child``), and some twenty that are kept (39 MiB each with 152,000 token ids)."""

IDLE_S = 30.0
"""Seconds that sandboxes stay after their last request, however much another tenant would like their place: without
them two tenants that take turns would wait for a boot each time."""

Key = tuple[str, str]
"""Model and tenant."""


class NoPlaceError(Exception):
    """There may be no more sandboxes, and none that are there can go. ``retry_after_s``: when one could."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class Need:
    """Sandboxes of one tenant and model."""

    engines: int
    texts: int

    def __add__(self, other: Need) -> Need:
        return Need(self.engines + other.engines, self.texts + other.texts)


NOTHING = Need(0, 0)


def without_engine(need: Need) -> Need:
    """The need for a model that is computed outside of the appliance."""
    return Need(0, need.texts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentLimits:
    """What all sandboxes of single tenants may be together."""

    engines: int
    texts: int
    memory_bytes: int
    """Each sandbox counts with its limit."""
    engine_bytes: int
    """Limit of one engine's memory."""

    def hold(self, need: Need) -> bool:
        """Whether so many may be there."""
        memory = need.engines * self.engine_bytes + need.texts * TEXT_MEMORY_BYTES
        return need.engines <= self.engines and need.texts <= self.texts and memory <= self.memory_bytes


def need_of(isolation_class: IsolationClass) -> Need:
    """The sandboxes of its own that a tenant of this class has for each model it uses."""
    return Need(int(isolation_class.own_engine), int(isolation_class.own_text))


def declared(policy: PolicySet, key: Key) -> Need:
    """What the policy grants for a model and a tenant; nothing where it does not know the tenant or allow the model."""
    model, tenant = key
    known = policy.tenants.get(tenant)
    if known is None or not reachable(policy.routes, known.models, known.adapters, (model,)):
        return NOTHING
    return need_of(known.isolation_class)


def granted_adapters(policy: PolicySet, key: Key) -> frozenset[str]:
    """Adapters with which an engine for this model and tenant computes, by their whole names."""
    model, tenant = key
    known = policy.tenants.get(tenant)
    return frozenset(name for name in (known.adapters if known is not None else ()) if base_of(name) == model)


def total(needs: Iterable[Need]) -> Need:
    """Sum of several needs."""
    return sum(needs, NOTHING)


@dataclass(slots=True)
class _Resident:
    need: Need
    adapters: frozenset[str] = frozenset()
    """Adapters that the policy granted when the engine was asked for: it takes up no others while it runs."""
    users: int = 0
    used_at: float = 0.0
    unwanted: bool = False
    """Whether the policy no longer grants it as it is: it is released with its last user."""


@dataclass(slots=True)
class Residency:
    """Resident sandboxes of single tenants, as the gateway knows them."""

    limits: ResidentLimits
    tenants: int = 1
    """Tenants that may have engines of their own, by the policy in force."""
    _residents: dict[Key, _Resident] = field(default_factory=dict)
    _policy: PolicySet | None = None
    """Policy in force."""

    @property
    def keys(self) -> tuple[Key, ...]:
        """Model and tenant of everything resident."""
        return tuple(self._residents)

    def enter(self, key: Key, need: Need, now: float) -> list[Key]:
        """A request comes for sandboxes of its own; gives those that go for it. Each call is followed by ``leave``.

        Raises:
            NoPlaceError: they cannot be had; nothing has changed.
        """
        mine = self._residents.get(key)
        had = mine.need if mine is not None else NOTHING
        wanted = Need(max(need.engines, had.engines), max(need.texts, had.texts))
        going: list[Key] = []
        if wanted != had:
            going = self._going(key, wanted, now)
        for other in going:
            del self._residents[other]
        resident = self._residents.setdefault(key, _Resident(wanted))
        if wanted.engines > had.engines and self._policy is not None:
            resident.adapters = granted_adapters(self._policy, key)
        resident.need = wanted
        resident.users += 1
        resident.used_at = now
        return going

    def leave(self, key: Key, now: float) -> bool:
        """End one use; gives whether the sandboxes are to be released, because no request may use them any more."""
        resident = self._residents[key]
        resident.users -= 1
        resident.used_at = now
        return self._drop_unwanted(key, resident)

    def reconsider(self, policy: PolicySet) -> list[Key]:
        """A policy came into force; gives those that go at once because they are idle and not granted any more, or
        lack an adapter that is granted now or have one that is not."""
        self.tenants = sum(tenant.isolation_class.own_engine for tenant in policy.tenants.values())
        self._policy = policy
        for key, resident in self._residents.items():
            old = resident.need.engines and resident.adapters != granted_adapters(policy, key)
            resident.unwanted = bool(old) or resident.need != declared(policy, key)
        return [key for key, resident in list(self._residents.items()) if self._drop_unwanted(key, resident)]

    def _drop_unwanted(self, key: Key, resident: _Resident) -> bool:
        gone = resident.unwanted and resident.users == 0
        if gone:
            del self._residents[key]
        return gone

    def doom(self, key: Key) -> None:
        """Mark sandboxes that could not be had after all: they are forgotten once the last user has left."""
        if key in self._residents:
            self._residents[key].unwanted = True

    def end(self, key: Key) -> None:
        """Forget sandboxes that have ended, at once where no request is in them, else when the last has left."""
        self.doom(key)
        if key in self._residents:
            self._drop_unwanted(key, self._residents[key])

    def _going(self, key: Key, wanted: Need, now: float) -> list[Key]:
        """Whom to end so that the wanted ones fit: the tenant's own where it is over its share, then those that have
        been idle longest."""
        if not self.limits.hold(wanted):
            raise NoPlaceError("this appliance is not set up for so many sandboxes of single tenants", 0.0)
        staying = {other: one for other, one in self._residents.items() if other != key}
        idle = [other for other, one in sorted(staying.items(), key=lambda item: item[1].used_at) if not one.users]
        going: list[Key] = []
        while True:
            there = total([*(one.need for one in staying.values()), wanted])
            mine = total([*(one.need for other, one in staying.items() if other[1] == key[1]), wanted])
            if wanted.engines and mine.engines > self._share:
                candidates = [other for other in idle if other[1] == key[1] and staying[other].need.engines]
            elif self.limits.hold(there):
                return going
            else:
                candidates = [other for other in idle if other[1] == key[1] or now - staying[other].used_at >= IDLE_S]
            if not candidates:
                waits = [IDLE_S - (now - staying[other].used_at) for other in idle]
                wait = max(1.0, min(waits, default=IDLE_S))
                raise NoPlaceError("all places for sandboxes of single tenants are taken", wait)
            going.append(candidates[0])
            idle.remove(candidates[0])
            del staying[candidates[0]]

    @property
    def _share(self) -> int:
        """Most engines of one tenant, so that a tenant with many models leaves room for others."""
        return max(1, self.limits.engines // max(1, self.tenants))
