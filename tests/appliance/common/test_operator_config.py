"""The section about operators on other machines: what it takes, what it refuses, and what a reload changes of it."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from appliance.common.config import ApplianceConfig
from appliance.common.config_changes import changes
from appliance.common.operator_config import RemoteOperatorsConfig
from appliance.common.operator_roles import OperatorRole

TLS = {"certificate": "server.pem", "key": "server.key", "client_ca": "operators.pem"}
ISSUER = {"name": "corp", "issuer": "https://login.example.com/", "audiences": ["ops"], "keys_file": "keys.json"}
GOOD: dict[str, Any] = {
    "admin": "10.0.0.5:9443",
    "tls": TLS,
    "tokens": [ISSUER],
    "viewers": ["spiffe://corp.example/ops/a", "dns:grafana.corp.example", "email:ann@corp.example"],
    "security": ["oidc:corp:admins", "spiffe://corp.example/ops/a"],
}
MACHINE = {"models": [{"name": "m", "path": "p"}], "policy": "p", "credentials": "c", "pepper": "p", "run_dir": "r"}


def test_every_credential_is_listed_with_its_role() -> None:
    """In the order of the file; one may stand for several roles."""
    found = list(RemoteOperatorsConfig.model_validate(GOOD).listed())
    assert len(found) == 5 and found[0] == (OperatorRole.VIEWER, "spiffe://corp.example/ops/a")
    assert (OperatorRole.SECURITY, "spiffe://corp.example/ops/a") in found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"admin": None}, "need an address", id="no address"),
        pytest.param({"admin": "9443"}, "HOST:PORT", id="address"),
        pytest.param({"grpc": "10.0.0.5:9443"}, "one address", id="twice"),
        pytest.param({"tls": {**TLS, "client_ca": None}, "tokens": []}, "prove who they are", id="no proof"),
        pytest.param({"tls": {**TLS, "client_ca": None}}, "no authority who signs", id="no authority"),
        pytest.param({"tokens": [ISSUER, ISSUER]}, "one name", id="issuers"),
        pytest.param({"viewers": ["oidc:other:x"]}, "not in tokens", id="issuer"),
        pytest.param({"viewers": ["key:alpha-1"]}, "an operator elsewhere is", id="key"),
        pytest.param({"viewers": ["spiffe://corp.example/*"]}, "letters, digits", id="wildcard"),
        pytest.param({"viewers": ["dns:*.corp.example"]}, "no wildcard", id="wildcard name"),
        pytest.param({"viewers": ["email:"]}, "1 to 253", id="no name"),
        pytest.param({"viewers": ["@wheel"]}, "an operator elsewhere is", id="group"),
    ],
)
def test_what_opens_nothing_or_too_much_is_refused(change: dict[str, Any], message: str) -> None:
    """With a message that says what it must be. Control: without the change it is taken."""
    RemoteOperatorsConfig.model_validate(GOOD)
    with pytest.raises(ValidationError, match=message):
        RemoteOperatorsConfig.model_validate({**GOOD, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"remote_operators": {**GOOD, "grpc": "10.0.0.5:9444"}}, "needs operator_api", id="no api"),
        pytest.param({"remote_operators": {**GOOD, "admin": "127.0.0.1:8080"}}, "one address", id="a tenant's port"),
    ],
)
def test_it_fits_the_rest_of_the_configuration(change: dict[str, Any], message: str) -> None:
    """The operator's API is there for its port, and no port is taken twice."""
    ApplianceConfig.model_validate({**MACHINE, "remote_operators": GOOD})
    with pytest.raises(ValidationError, match=message):
        ApplianceConfig.model_validate({**MACHINE, **change})


def test_a_reload_changes_roles_and_nothing_else_of_it() -> None:
    """Roles are in force at once; addresses and issuers wait for a restart. So does the end of the section, but that of
    its roles."""
    first = ApplianceConfig.model_validate({**MACHINE, "remote_operators": GOOD})
    moved = {**GOOD, "admin": "10.0.0.6:9443", "operators": ["dns:ci.corp.example"], "security": []}
    found = changes(first, ApplianceConfig.model_validate({**MACHINE, "remote_operators": moved}))
    running = found.config.remote_operators
    assert running is not None and running.admin == "10.0.0.5:9443"
    assert (running.operators, running.security) == (("dns:ci.corp.example",), ())
    names = [[line.partition(" ")[0] for line in lines] for lines in (found.applied, found.restart)]
    assert set(names[0]) == {"remote_operators.operators", "remote_operators.security"}
    assert names[1] == ["remote_operators.admin"]
    gone = changes(first, ApplianceConfig.model_validate(MACHINE))
    left = gone.config.remote_operators
    assert left is not None and left.admin == "10.0.0.5:9443" and gone.restart
    assert not (left.viewers or left.operators or left.security) and gone.applied
