"""The operator's API: whether its process takes connections where the configuration has it."""

from __future__ import annotations

import socket

from appliance.common.config import ApplianceConfig
from appliance.common.errors import reason_of
from appliance.operator.doctor.facts import OperatorApi
from appliance.operator.doctor.finding import Area, Finding, Subject

CONNECT_S = 2.0
"""Seconds that a connection may take; nothing is said on it."""


def look_at_operator_api(config: ApplianceConfig) -> OperatorApi | None:
    """Connect to the socket of the operator's API; None where none is configured."""
    from appliance.operator.api.service import api_socket

    if config.operator_api is None:
        return None
    path = api_socket(config)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(CONNECT_S)
        try:
            peer.connect(str(path))
        except PermissionError:
            return OperatorApi(socket=str(path), unseen=True)
        except OSError as error:
            return OperatorApi(socket=str(path), problem=reason_of(error))
    return OperatorApi(socket=str(path))


def check_operator_api(api: OperatorApi) -> Finding:
    """Return what is to be said of the operator's API. Pure."""
    subject = Subject(Area.SERVICE, "operator's API")
    if api.unseen:
        return subject.note(f"{api.socket} is closed to this user", "not looked at", "sudo athanor doctor")
    if api.problem:
        means = "programs that call the API get no answer; the commands work without it"
        mend = "systemctl enable --now athanor-operator    # or athanor serve, which starts it too"
        return subject.warning(f"nothing takes connections at {api.socket}: {api.problem}", means, mend)
    return subject.ok(f"takes connections at {api.socket}")
