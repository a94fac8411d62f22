"""How much each model is used, so that the least used one sleeps where not all fit. Pure; times are monotonic seconds
of the caller.

Each request counts one, and half as much after ``HALF_LIFE`` later uses of any model: counts fade with traffic
and not with time, so a night without requests changes nothing. Models that sleep keep their counts, so one that is
woken is known by what it was before. Where requests are independent of each other, keeping the most used models is the
best that can be done without knowledge of what comes; the fading follows a change of what is asked for.

Uses are counted by tenant. What a tenant's uses count together is at most as much as those of all other tenants: where
``n`` models fit, one tenant cannot keep all ``n`` places from a model that has more than one ``n``-th of the others'
uses. The order of a tenant's own models stays as it is, so that a tenant that is alone loses nothing.

Source: aging counters of admission policies for caches (Einziger, Friedman and Manes, TinyLFU, 2017).
"""

from __future__ import annotations

from collections.abc import Collection, Container
from dataclasses import dataclass, field

HALF_LIFE = 160.0
"""Counted uses of all models after which one counts half. Chosen by ``bench/residency_policies.py``: twice as many find
what is asked for no better where that stays the same, and follow too slowly where it changes every 150 requests."""

LEAST_GAP_S = 1.0
"""Requests of one tenant for one model that came within so many seconds count as one: a wake serves all of them. So
neither a burst nor a tenant that asks without pause makes its model dear. Uses of different models of one tenant within
it let counts fade as much as one does, so that a tenant cannot make the uses of others fade sooner by using many."""

REFUSED_GAP_S = 10.0
"""As ``LEAST_GAP_S``, for requests that were refused because their model sleeps. They cost their tenant nothing, so
they count more seldom. If they counted nothing, a model that is often asked for and sleeps would never be known for
it."""

ALWAYS_COUNTED = 16.0
"""What a tenant's uses may count together, however little others do: a tenth of ``HALF_LIFE``, so that a few uses of a
newcomer do not outweigh all of a tenant that was alone."""

_FORGOTTEN = 2.0**-10
"""Count below which an entry is dropped: ten half-lives after a single use. It bounds the entries by the uses of that
time."""

_LARGEST_UNIT = 1e100
"""Unit beyond which all counts are scaled down, long before numbers overflow."""


@dataclass(slots=True)
class _Count:
    value: float = 0.0
    """Count in the unit of ``ModelUses``."""
    came: float = float("-inf")
    """When the last request that was counted came."""


@dataclass(slots=True)
class _ModelCount:
    value: float = 0.0
    """Count of all tenants together, before the bound."""
    tenants: dict[str, _Count] = field(default_factory=dict)


@dataclass(slots=True)
class ModelUses:
    """Fading counts of the uses of models, one entry for each model and tenant.

    Counts are kept in a growing unit, the weight of a use that is counted now, so that nothing has to be written when
    they fade. At most one tenant can have more than all others together, so the bound costs the look at one tenant.
    """

    half_life: float = HALF_LIFE
    always: float = ALWAYS_COUNTED
    _unit: float = 1.0
    _models: dict[str, _ModelCount] = field(default_factory=dict)
    _tenants: dict[str, _Count] = field(default_factory=dict)
    """What the uses of each tenant count together, before the bound."""
    _all: float = 0.0
    """What the uses of all tenants count together, before the bound."""
    _largest: str = ""
    """Tenant whose uses count most, before the bound."""

    def note(self, model: str, tenant: str, came: float, gap_s: float = LEAST_GAP_S) -> bool:
        """Count a request of a tenant that came at this time, unless one that came less than ``gap_s`` before, or
        later, was counted for it and the model. ``gap_s`` is ``REFUSED_GAP_S`` for one that was refused. Returns
        whether it was counted."""
        known = self._models.setdefault(model, _ModelCount())
        one = known.tenants.setdefault(tenant, _Count())
        if came - one.came < gap_s:
            return False
        whole = self._tenants.setdefault(tenant, _Count())
        fades = min(1.0, max(0.0, came - whole.came) / LEAST_GAP_S)
        self._unit *= 2.0 ** (fades / self.half_life)
        one.came, whole.came = came, max(whole.came, came)
        for count in (one, whole, known):
            count.value += self._unit
        self._all += self._unit
        if whole.value >= self._tenants.get(self._largest, whole).value:
            self._largest = tenant
        if self._unit > _LARGEST_UNIT:
            self._scale()
        return True

    def of(self, model: str, asked_by: str = "") -> float:
        """Return a model's count; 0 for one that was never used. With ``asked_by`` a use of that tenant is added, as it
        will count if its request is served."""
        known = self._models.get(model)
        found = known.value if known else 0.0
        for tenant in {self._largest, asked_by} - {""}:
            more = self._unit if tenant == asked_by else 0.0
            one, whole = known.tenants.get(tenant) if known else None, self._tenants.get(tenant)
            own, mine = one.value if one else 0.0, whole.value if whole else 0.0
            bound = max(self.always * self._unit, self._all - mine)
            found += (own + more) * min(1.0, bound / (mine + more)) - own
        return found / self._unit

    def forget_others(self, tenants: Container[str]) -> None:
        """Forget all but these tenants: no name of one that the policy has no more stays here. What they used counts no
        more."""
        for known in self._models.values():
            known.tenants = {tenant: one for tenant, one in known.tenants.items() if tenant in tenants}
        self.keep(tuple(self._models))

    def keep(self, models: Collection[str]) -> None:
        """Forget all but these models, and what has faded away."""
        least, totals = _FORGOTTEN * self._unit, dict[str, float]()
        for name, known in list(self._models.items()):
            known.tenants = {tenant: one for tenant, one in known.tenants.items() if one.value >= least}
            known.value = sum(one.value for one in known.tenants.values())
            if name not in models or not known.tenants:
                del self._models[name]
                continue
            for tenant, one in known.tenants.items():
                totals[tenant] = totals.get(tenant, 0.0) + one.value
        self._tenants = {tenant: _Count(value, self._tenants[tenant].came) for tenant, value in totals.items()}
        self._all, self._largest = sum(totals.values()), max(totals, key=totals.__getitem__, default="")

    def _scale(self) -> None:
        """Take the unit back to 1."""
        counts = [one for known in self._models.values() for one in known.tenants.values()]
        for one in (*counts, *self._tenants.values()):
            one.value /= self._unit
        for known in self._models.values():
            known.value /= self._unit
        self._all, self._unit = self._all / self._unit, 1.0
