"""The hosts of a fleet as they answered, and in what they differ. Pure.

A host that was taken over answers anything, so what it says is bounded before it is compared with others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from appliance.common.fleet_file import MAX_HOSTS
from appliance.common.json_codec import SnapshotError, decode
from appliance.common.status import ApplianceStatus

MAX_PINNED = 256
"""Most models that one host may tell of: four times what one serves. Each is compared with all hosts."""

MOST = 1 << 53
"""Bound of numbers: what a browser counts exactly, and no division overflows."""

NOT_PINNED = "not pinned"
ABSENT = "absent"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostState:
    """One host, as it answered."""

    name: str
    admin: str
    status: ApplianceStatus | None = None
    """None: it did not answer."""
    problem: str = ""
    """Why not."""

    @property
    def state(self) -> str:
        """``serving``, ``draining``, ``not ready`` or ``silent``."""
        if self.status is None:
            return "silent"
        if self.status.fleet.draining:
            return "draining"
        up = all(model.state in ("ready", "asleep") for model in self.status.models)
        return "serving" if up else "not ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One thing that hosts have differently."""

    what: str
    """``version``, ``policy``, ``fleet key`` or ``model NAME``."""
    values: dict[str, tuple[str, ...]]
    """Value -> names of the hosts that have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetDifference:
    """The hosts beside each other."""

    differences: tuple[Difference, ...]
    unknown: tuple[str, ...]
    """Models that no host pins by a digest: whether their files are equal cannot be told."""
    silent: tuple[str, ...]
    """Hosts that did not answer."""


def read_status(body: object) -> ApplianceStatus:
    """Return the status that another host told, from parsed JSON.

    Raises:
        SnapshotError: it is none, or tells of more than a host has.
    """
    status = decode(ApplianceStatus, body)
    told, load = status.fleet, status.load
    if len(told.models) > MAX_PINNED or len(told.hosts) > MAX_HOSTS:
        raise SnapshotError(f"it tells of more than {MAX_PINNED} models, or of more than {MAX_HOSTS} hosts")
    if not all(0 <= one < MOST for one in (load.running, load.waiting, load.kv_free, load.kv_blocks, told.shreds)):
        raise SnapshotError("it counts what cannot be counted")
    return status


def compare(states: Sequence[HostState]) -> FleetDifference:
    """Compare versions, policies, fleet keys and models of the hosts that answered. Pure."""
    told = {state.name: state.status for state in states if state.status is not None}
    names = sorted({name for status in told.values() for name in status.fleet.models})
    rows = {
        "version": {host: status.version for host, status in told.items()},
        "policy": {host: status.policy.digest for host, status in told.items()},
        "fleet key": {host: status.fleet.key or ABSENT for host, status in told.items()},
        "list of hosts": {host: ", ".join(sorted(status.fleet.hosts)) or ABSENT for host, status in told.items()},
        **{f"model {name}": {host: _pinned(status, name) for host, status in told.items()} for name in names},
    }
    return FleetDifference(
        differences=tuple(_differing(rows)),
        unknown=tuple(name for name in names if set(rows[f"model {name}"].values()) == {NOT_PINNED}),
        silent=tuple(state.name for state in states if state.status is None),
    )


def _pinned(status: ApplianceStatus, model: str) -> str:
    digest = status.fleet.models.get(model)
    return ABSENT if digest is None else digest or NOT_PINNED


def _differing(rows: dict[str, dict[str, str]]) -> Iterator[Difference]:
    for what, values in rows.items():
        if len(set(values.values())) > 1:
            found = {value: tuple(host for host in values if values[host] == value) for value in values.values()}
            yield Difference(what=what, values=found)
