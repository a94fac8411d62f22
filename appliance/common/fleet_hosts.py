"""The hosts of a fleet as they answered, and in what they differ. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from appliance.common.status import ApplianceStatus

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
