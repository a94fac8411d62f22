"""What a reload makes of a changed configuration: applied, or told to need a restart."""

from __future__ import annotations

from pathlib import Path

from appliance.common.config import ApplianceConfig, ModelConfig
from appliance.common.config_changes import LIVE, changes
from appliance.common.config_keys import keys
from appliance.common.config_places import AuditConfig
from appliance.common.listen_config import OwnListenConfig

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


def test_every_live_key_is_a_key() -> None:
    """A key that is renamed in the schema is not forgotten here."""
    assert set(LIVE) <= set(keys())
