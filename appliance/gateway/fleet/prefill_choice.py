"""Choice of the host that computes a prompt: the router's, if it is one of the configured hosts, else the one with the
least tokens in flight. Tenants have parts of each host's places. Pure; time is an argument."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from appliance.common.split_config import PrefillHost

MAX_CALLS = 8
"""Most calls in flight to one host: a prefill engine computes one or two long prompts at once, and what waits behind
eight is sooner computed locally. A host gives each caller twice as many connections (``operator_door.MAX_EACH``). One
tenant has four of them at most, which keep such an engine busy (``has_part``)."""

REST_S = 2.0
"""Seconds for which a host that was away or silent is not asked: each attempt costs a request up to 250 ms. One that
let a prompt wait for longer than this, and computed nothing for anybody meanwhile, is not asked for as long again. One
that answers that it cannot compute a prompt is not asked for that tenant alone: the tenant's model may be at fault."""

MAX_EMPTY_REST_S = 32.0
"""Longest rest, for a tenant's prompts, of a host that says that it has computed them and gives nothing to the store:
its first such word costs a prompt 200 ms (``supervisor.fleet_seek.WAIT_S``), and each further one in a row doubles the
rest from ``REST_S`` on."""

REMEMBERED_S = 600.0
"""Seconds after a tenant's last rest for which it is remembered how long that was."""


def has_part(held: int, free: int) -> bool:
    """Return whether a tenant that holds so many places may take one more, with so many free: while it holds fewer than
    are free. So one tenant alone has half of the places, two a third each, and a place is left for who has none, until
    there are very many."""
    return held < free


@dataclass(slots=True)
class _Empty:
    """Computed prompts in a row of which nothing came."""

    count: int = 0
    until: float = 0.0
    """Monotonic time until which the host rests."""


@dataclass(slots=True)
class _Load:
    calls: int = 0
    tokens: int = 0
    rests_until: float = float("-inf")
    computed_at: float = float("-inf")
    """Monotonic time of the last prompt that the host has computed."""
    of_tenants: Counter[str] = field(default_factory=Counter)
    """Calls of each tenant; a tenant without calls has no row."""
    empty: dict[str, _Empty] = field(default_factory=dict)
    """By tenant: of those that share, of whose last computed prompt nothing came, less than ``REMEMBERED_S`` ago."""
    tenant_rests: dict[str, float] = field(default_factory=dict)
    """By tenant the monotonic time until which the host is not asked for it; those that are over are removed."""
    stalled: tuple[str, float] = ("", float("-inf"))
    """Tenant that waited in vain last, and when it gave up."""


@dataclass(slots=True)
class PrefillHosts:
    """The hosts that may be asked, and what they were asked for."""

    hosts: Sequence[PrefillHost]
    _loads: dict[str, _Load] = field(default_factory=dict)

    def named(self, address: str) -> PrefillHost | None:
        """Return the host with this HOST:PORT; None where there is none."""
        return next((one for one in self.hosts if one.address == address), None)

    def choose(self, address: str, tenant: str, now: float) -> PrefillHost | None:
        """Return the host to ask; None where none has room for the tenant, or all of them rest.

        Args:
            address: HOST:PORT that the router named. Unless it is that of a host with room, the least loaded is taken.
            tenant: whose prompt it is.
            now: monotonic seconds.
        """
        ready = [one for one in self.hosts if self._ready(one, tenant, now)]
        wanted = self.named(address)
        if wanted is not None and wanted in ready:
            return wanted
        return min(ready, key=lambda one: self._load(one).tokens, default=None)

    @contextmanager
    def asking(self, host: PrefillHost, tenant: str, tokens: int) -> Iterator[None]:
        """Count a call with so many tokens for the time of the block."""
        load = self._load(host)
        load.calls += 1
        load.of_tenants[tenant] += 1
        load.tokens += tokens
        try:
            yield
        finally:
            load.calls -= 1
            load.tokens -= tokens
            load.of_tenants[tenant] -= 1
            if not load.of_tenants[tenant]:
                del load.of_tenants[tenant]

    def rest(self, host: PrefillHost, now: float, seconds: float = REST_S, *, tenant: str = "") -> None:
        """Ask a host no more for a while; for a ``tenant``'s prompts alone, where one is named. A rest that is longer
        stays: prompts that were under way together end one by one."""
        load, until = self._load(host), now + seconds
        if not tenant:
            load.rests_until = max(load.rests_until, until)
            return
        load.tenant_rests = {name: end for name, end in load.tenant_rests.items() if end > now}
        load.tenant_rests[tenant] = max(until, load.tenant_rests.get(tenant, until))

    def computed(self, host: PrefillHost, now: float) -> None:
        """Note that a host has computed a prompt."""
        self._load(host).computed_at = now

    def rests_for(self, tenant: str, now: float) -> bool:
        """Return whether a host has room, and rests for this tenant since nothing came of its prompts (``taken``)."""
        return any(self._has_room(one, tenant, now) and self._is_empty(one, tenant, now) for one in self.hosts)

    def taken(self, host: PrefillHost, tenant: str, now: float, *, nothing: bool) -> float:
        """Note whether the local engine got ``nothing`` of a prompt that a host said to have computed. Then the host
        rests for the tenant alone: one whose blocks are lost on their way, because it sends too much, has no host rest
        for others. Returns the seconds of a rest that begins; 0: none does."""
        load = self._load(host)
        if not nothing:
            load.empty.pop(tenant, None)
            return 0.0
        empty = load.empty.get(tenant, _Empty())
        if now < empty.until:  # Prompts that were under way together count once.
            return 0.0
        load.empty = {name: one for name, one in load.empty.items() if now < one.until + REMEMBERED_S}
        load.empty[tenant] = empty
        rest_s: float = min(MAX_EMPTY_REST_S, REST_S * 2 ** min(empty.count, 10))
        empty.until = now + rest_s
        empty.count += 1
        return rest_s

    def late(self, host: PrefillHost, tenant: str, began: float, now: float) -> bool:
        """Note that a prompt was given up at its deadline though the host said that it works on it; returns whether the
        host rests now. It does where it has computed nothing for anybody in more than ``REST_S``: for as long as the
        prompt has waited, for the tenant alone until another one waited in vain too. So a host that stalls has half of
        the time at most, and a tenant whose prompts are long and whose deadlines are short has no host rest for others.
        """
        waited, load = now - began, self._load(host)
        if waited < REST_S or load.computed_at >= began:
            return False
        other, when = load.stalled
        alone = other in ("", tenant) or when <= load.computed_at
        if alone:
            load.stalled = tenant, now
        self.rest(host, now, waited, tenant=tenant if alone else "")
        return True

    def in_flight(self, host: PrefillHost) -> tuple[int, int]:
        """Return the calls to a host that have not ended, and their tokens."""
        load = self._load(host)
        return load.calls, load.tokens

    def _ready(self, host: PrefillHost, tenant: str, now: float) -> bool:
        return self._has_room(host, tenant, now) and not self._is_empty(host, tenant, now)

    def _has_room(self, host: PrefillHost, tenant: str, now: float) -> bool:
        load = self._load(host)
        rests_until = max(load.rests_until, load.tenant_rests.get(tenant, load.rests_until))
        return now >= rests_until and has_part(load.of_tenants[tenant], MAX_CALLS - load.calls)

    def _is_empty(self, host: PrefillHost, tenant: str, now: float) -> bool:
        empty = self._load(host).empty.get(tenant)
        return empty is not None and now < empty.until

    def _load(self, host: PrefillHost) -> _Load:
        return self._loads.setdefault(host.host, _Load())
