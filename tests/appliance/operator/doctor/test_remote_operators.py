"""What the doctor says of operators on other machines."""

from __future__ import annotations

import socket
from pathlib import Path

from appliance.common.config import ApplianceConfig
from appliance.common.listen_config import ListenConfig, TlsConfig
from appliance.common.operator_config import RemoteOperatorsConfig
from appliance.operator.doctor.finding import Severity
from appliance.operator.doctor.remote_facts import RemoteListener, RemoteOperators
from appliance.operator.doctor.remote_operators import UNIT, check_remote_operators, look_at_remote_operators


def test_listeners_and_proofs_are_looked_at() -> None:
    """One that takes connections, one that does not, an authority that tenants have too, an issuer that the operator's
    API cannot reach as installed. Without the section nothing is said."""
    files = {"certificate": Path("s.pem"), "key": Path("s.key"), "client_ca": Path("ca.pem")}
    issuer = {"name": "corp", "issuer": "i", "audiences": ["a"], "keys_url": "https://login.example/keys"}
    with socket.create_server(("127.0.0.1", 0)) as taking, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in (taking, closed)]
        section = RemoteOperatorsConfig.model_validate(
            {"admin": addresses[0], "grpc": addresses[1], "tls": files, "tokens": [issuer], "viewers": ["oidc:corp:v"]}
        )
        listen = ListenConfig(tls=TlsConfig.model_validate(files))
        config = ApplianceConfig.model_construct(remote_operators=section, listen=listen)
        found, bare = (look_at_remote_operators(config, units) for units in ({UNIT}, ()))
    assert found is not None and bare is not None
    assert [bool(one.problem) for one in found.listeners] == [False, True]
    assert (found.listed, found.fetching, found.shared_authority) == (1, ("corp",), "ca.pem")
    assert bare.fetching == ()
    levels = [one.level for one in check_remote_operators(found)]
    assert levels == [Severity.OK, Severity.WARNING, Severity.OK, Severity.WARNING, Severity.NOTE]
    assert look_at_remote_operators(ApplianceConfig.model_construct(remote_operators=None), ()) is None


def test_a_section_that_gives_nobody_a_role_is_told() -> None:
    """A listener at which every request is refused. Control: with a role nothing is wrong."""
    listeners = (RemoteListener(key="admin", address="10.0.0.5:9443"),)
    nobody, somebody = (list(check_remote_operators(RemoteOperators(listeners=listeners, listed=n))) for n in (0, 1))
    assert [one.level for one in nobody] == [Severity.OK, Severity.WARNING] and "nobody has a role" in nobody[1].what
    assert {one.level for one in somebody} == {Severity.OK}
