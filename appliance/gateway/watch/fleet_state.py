"""What one host tells of itself as a member of a fleet, for ``athanor fleet``."""

from __future__ import annotations

from collections.abc import Callable

from appliance.common.fleet_status import FleetStatus
from appliance.common.kv_store_state import FleetKeyState
from appliance.gateway.config_file import ConfigFile
from appliance.gateway.front.affinity import SessionAffinity
from appliance.gateway.request.operator_drain import OperatorDrain
from appliance.gateway.watch.gauges import SpillGauges

_KEYS = {FleetKeyState.NO_MEMBER: "", FleetKeyState.HELD: "held", FleetKeyState.NONE_HELD: "none"}


def fleet_status(
    config: ConfigFile,
    affinity: SessionAffinity | None,
    drain: OperatorDrain,
    store_problem: Callable[[], str | None] = lambda: None,
    spill: SpillGauges | None = None,
) -> Callable[[], FleetStatus]:
    """Return what tells a host's part in a fleet as of now."""

    def status() -> FleetStatus:
        return FleetStatus(
            key="" if affinity is None else affinity.fingerprint,
            models={model.name: model.digest for model in config.running.models},
            hosts=() if config.running.fleet is None else config.running.fleet.hosts,
            store=store_problem() or "",
            role="mixed" if config.running.split is None else config.running.split.role,
            kv_keys="" if spill is None else _KEYS[spill.fleet_state],
            shreds=0 if spill is None else spill.fleet_shreds,
            draining=drain.begun,
        )

    return status
