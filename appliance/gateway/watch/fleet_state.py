"""What one host tells of itself as a member of a fleet, for ``athanor fleet``."""

from __future__ import annotations

from collections.abc import Callable

from appliance.common.fleet_status import FleetStatus
from appliance.gateway.config_file import ConfigFile
from appliance.gateway.front.affinity import SessionAffinity
from appliance.gateway.request.operator_drain import OperatorDrain


def fleet_status(
    config: ConfigFile,
    affinity: SessionAffinity | None,
    drain: OperatorDrain,
    store_problem: Callable[[], str | None] = lambda: None,
) -> Callable[[], FleetStatus]:
    """Return what tells a host's part in a fleet as of now."""

    def status() -> FleetStatus:
        return FleetStatus(
            key="" if affinity is None else affinity.fingerprint,
            models={model.name: model.digest for model in config.running.models},
            hosts=() if config.running.fleet is None else config.running.fleet.hosts,
            store=store_problem() or "",
            draining=drain.begun,
        )

    return status
