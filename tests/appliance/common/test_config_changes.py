"""What a reload makes of a changed configuration: applied, or told to need a restart."""

from __future__ import annotations

from pathlib import Path

from appliance.common.config import ApplianceConfig, ModelConfig
from appliance.common.config_changes import LIVE, changes
from appliance.common.config_keys import keys
from appliance.common.config_places import AuditConfig
from appliance.common.listen_config import OwnListenConfig
from appliance.common.operator_config import RemoteOperatorsConfig
from appliance.common.token_config import TokenIssuerConfig

HERE = Path("/etc/athanor")
RUNNING = ApplianceConfig(
    models=(ModelConfig(name="m", path=HERE / "m"),),
    policy=HERE / "policy.yaml",
    credentials=HERE / "credentials.json",
    pepper=HERE / "pepper",
    run_dir=HERE / "run",
)


def test_nothing_has_changed() -> None:
    """Control: the same configuration has nothing to apply and nothing to restart for."""
    found = changes(RUNNING, RUNNING.model_copy())
    assert (found.config, found.applied, found.restart, found.command) == (RUNNING, (), (), "")


def test_live_keys_are_applied_and_the_others_are_told() -> None:
    """A live key has its new value, another keeps the old one; a second look tells what is still open."""
    sandbox = RUNNING.sandbox.model_copy(update={"step_timeout_s": 60.0, "cores": 2.0})
    wanted = RUNNING.model_copy(update={"sandbox": sandbox, "audit": AuditConfig(directory=HERE / "audit")})
    found = changes(RUNNING, wanted)
    assert found.applied == ("sandbox.step_timeout_s (300 -> 60)",)
    assert set(found.restart) >= {"sandbox.cores (0 -> 2)", "audit.directory (none -> /etc/athanor/audit)"}
    assert (found.config.sandbox.step_timeout_s, found.config.sandbox.cores) == (60.0, 0.0)
    assert found.command == "systemctl restart athanor.target"
    again = changes(found.config, wanted)
    assert (again.applied, again.restart) == ((), found.restart)


def test_models_need_no_restart_and_an_address_needs_one_of_the_gateway() -> None:
    """A model that is added is no key that waits; for an address the supervisor and its sandboxes stay."""
    more = (*RUNNING.models, ModelConfig(name="n", path=HERE / "n"))
    found = changes(RUNNING, RUNNING.model_copy(update={"models": more}))
    assert (found.applied, found.restart, found.models) == ((), (), more)
    assert found.config.models == more
    listen = RUNNING.listen.model_copy(update={"http": "0.0.0.0:80"})
    found = changes(RUNNING, RUNNING.model_copy(update={"listen": listen}))
    assert found.restart == ("listen.http (127.0.0.1:8080 -> 0.0.0.0:80)",)
    assert found.command == "systemctl restart athanor-gateway"
    own = RUNNING.listen.model_copy(update={"tenants": (OwnListenConfig(tenant="acme", http="127.0.0.1:9001"),)})
    found = changes(RUNNING, RUNNING.model_copy(update={"listen": own}))
    assert "listen.tenants[0].http (none -> 127.0.0.1:9001)" in found.restart
    assert found.command == "systemctl restart athanor-gateway"


REMOTE = RemoteOperatorsConfig.model_validate(
    {
        "admin": "10.0.0.5:9443",
        "tls": {"certificate": "/s.pem", "key": "/s.key", "client_ca": "/ca.pem"},
        "tokens": [
            {"name": name, "issuer": f"https://{name}.example/", "audiences": ["ops"], "keys_file": "/keys"}
            for name in ("corp", "old")
        ],
        "viewers": ["oidc:corp:read", "spiffe://corp/read"],
        "security": ["oidc:old:all", "spiffe://corp/all"],
    }
)


def remote(section: RemoteOperatorsConfig | None) -> ApplianceConfig:
    """The configuration with this section."""
    return RUNNING.model_copy(update={"remote_operators": section})


def in_force(section: RemoteOperatorsConfig | None) -> set[str]:
    """Credentials that have a role."""
    return set() if section is None else {name for _, name in section.listed()}


def test_a_removed_section_takes_all_roles_and_one_that_comes_waits() -> None:
    """Without the section nobody has a role from the reload on, although its listener is there until the restart; the
    section written again (control) gives them back. One that is new has no listener yet, and nobody has a role."""
    gone = changes(remote(REMOTE), remote(None))
    assert gone.config.remote_operators is not None and not in_force(gone.config.remote_operators)
    assert any(line.startswith("remote_operators.security") for line in gone.applied)
    assert any(line.startswith("remote_operators.admin") for line in gone.restart)
    back = changes(gone.config, remote(REMOTE))
    assert in_force(back.config.remote_operators) == in_force(REMOTE)
    new = changes(remote(None), remote(REMOTE))
    assert new.config.remote_operators is None and not new.applied


def test_a_changed_issuer_or_authority_proves_no_role_until_the_restart() -> None:
    """Each of these takes the roles that it proved, and only those, and the reload names them: an issuer of the old
    name that is another one, and another file of authorities. Nothing changed (control) takes none."""
    assert changes(remote(REMOTE), remote(REMOTE)).applied == ()
    issuers = (REMOTE.tokens[0], REMOTE.tokens[1].model_copy(update={"issuer": "https://new.example/"}))
    found = changes(remote(REMOTE), remote(REMOTE.model_copy(update={"tokens": issuers})))
    assert in_force(REMOTE) - in_force(found.config.remote_operators) == {"oidc:old:all"}
    assert any("oidc:old:all" in line for line in found.applied)
    assert changes(found.config, remote(REMOTE)).config.remote_operators == REMOTE
    tls = REMOTE.tls.model_copy(update={"client_ca": HERE / "other.pem"})
    found = changes(remote(REMOTE), remote(REMOTE.model_copy(update={"tls": tls})))
    assert in_force(found.config.remote_operators) == {"oidc:corp:read", "oidc:old:all"}


def test_a_removed_issuer_of_tenants_is_told() -> None:
    """The reload says whose tokens are refused from now on; an issuer that is added waits for a restart."""
    one, two = (
        TokenIssuerConfig(name=name, issuer=f"https://{name}/", audiences=("a",), keys_file=HERE / "k")
        for name in ("one", "two")
    )
    found = changes(RUNNING.model_copy(update={"tokens": (one,)}), RUNNING.model_copy(update={"tokens": (two,)}))
    assert found.tokens == (two,)
    assert [line for line in found.applied if line.startswith("tokens")] == [
        "tokens (those of the issuer one are refused: its entry has changed or is gone)"
    ]
    assert any(line.startswith("tokens[0].name") for line in found.restart)


def test_every_live_key_is_a_key() -> None:
    """A key that is renamed in the schema is not forgotten here."""
    assert set(LIVE) <= set(keys())
