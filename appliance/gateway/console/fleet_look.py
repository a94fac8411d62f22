"""What the console's page of the fleet shows: a row for each host, and in what hosts differ. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from appliance.common.fleet_hosts import Difference, HostState, compare
from appliance.common.fleet_status import FleetStatus
from appliance.common.status import ApplianceStatus

MAX_PROBLEM_CHARS = 300
"""Longest reason that another host gives, and longest name of what differs or of a model: the page shows no more."""

MAX_MODELS = 64
"""Most models of one look that no host pins, and most things that differ: a host has no more models."""

MEMBER_STATES = ("held", "none")
"""States of a fleet's keys on a member; anything else is no member."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetHostRow:
    """One host."""

    name: str
    state: str
    """As in ``HostState``."""
    problem: str = ""
    """Why it did not answer."""
    role: str = ""
    version: str = ""
    policy: str = ""
    """Digest of its policy."""
    running: int = 0
    waiting: int = 0
    kv_free: float | None = None
    """Free share of its KV; None where it has none or did not answer."""
    kv_keys: str = ""
    """``held``: it has the keys of its fleet under leases that run; ``none``: it is a member and has none."""
    shreds: int = 0
    """Shreds ordered on it that are not complete on all hosts."""
    shares_limits: bool = False
    """Whether its limits are those of several hosts."""
    store: str = ""
    """Why nothing is lent by the store; empty while it answers, and where there is none."""
    differs: tuple[str, ...] = ()
    """Things in which it is not as most hosts are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetLook:
    """A fleet as one look shows it."""

    now: float
    """Unix time at which hosts were asked."""
    version: str
    page: str
    """Digest of the page's files, as in ``Look``."""
    listed: bool
    """Whether there is a list of hosts; else the only row is this host's."""
    problem: str = ""
    """Why the list cannot be used, and no host was asked."""
    hosts: tuple[FleetHostRow, ...] = ()
    differences: tuple[Difference, ...] = ()
    unknown: tuple[str, ...] = ()
    """Models that no host pins."""


def fleet_look(states: Sequence[HostState], *, now: float, version: str, listed: bool) -> FleetLook:
    """Return what the page shows of hosts that were asked. The page's digest is left empty."""
    found = compare(states)
    odd = {state.name: tuple(_odd(state.name, found.differences)) for state in states}
    return FleetLook(
        now=now,
        version=version,
        page="",
        listed=listed,
        hosts=tuple(_row(state, odd[state.name]) for state in states),
        differences=tuple(_cut(one) for one in found.differences[:MAX_MODELS]),
        unknown=tuple(name[:MAX_PROBLEM_CHARS] for name in found.unknown[:MAX_MODELS]) if listed else (),
    )


def _odd(host: str, differences: Sequence[Difference]) -> Iterator[str]:
    """Yield what a host has otherwise than most: where no value is that of most, every host has it otherwise."""
    for one in differences[:MAX_MODELS]:
        sizes = sorted((len(hosts) for hosts in one.values.values()), reverse=True)
        most = sizes[0] if len(sizes) == 1 or sizes[0] > sizes[1] else 0
        if any(host in hosts and len(hosts) != most for hosts in one.values.values()):
            yield one.what[:MAX_PROBLEM_CHARS]


def _cut(one: Difference) -> Difference:
    values: dict[str, tuple[str, ...]] = {}
    for value, hosts in one.values.items():
        values[value[:MAX_PROBLEM_CHARS]] = (*values.get(value[:MAX_PROBLEM_CHARS], ()), *hosts)
    return Difference(what=one.what[:MAX_PROBLEM_CHARS], values=values)


def _row(state: HostState, differs: tuple[str, ...]) -> FleetHostRow:
    status = state.status
    if status is None:
        return FleetHostRow(name=state.name, state=state.state, problem=state.problem[:MAX_PROBLEM_CHARS])
    told: FleetStatus = status.fleet
    return FleetHostRow(
        name=state.name,
        state=state.state,
        role=told.role[:MAX_PROBLEM_CHARS],
        version=status.version[:MAX_PROBLEM_CHARS],
        policy=status.policy.digest[:MAX_PROBLEM_CHARS],
        running=status.load.running,
        waiting=status.load.waiting,
        kv_free=_free(status),
        kv_keys=told.kv_keys if told.kv_keys in MEMBER_STATES else "",
        shreds=told.shreds,
        shares_limits=bool(told.hosts),
        store=told.store[:MAX_PROBLEM_CHARS],
        differs=differs,
    )


def _free(status: ApplianceStatus) -> float | None:
    return status.load.kv_free / status.load.kv_blocks if status.load.kv_blocks else None
