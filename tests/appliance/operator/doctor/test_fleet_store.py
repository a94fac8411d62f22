"""What the doctor finds of the store of a fleet: a real one, none, and one that refuses."""

from __future__ import annotations

import tempfile
from pathlib import Path

from appliance.common.fleet_config import FleetConfig
from appliance.operator.doctor.finding import Severity
from appliance.operator.doctor.fleet_store import check_store, store_problem
from tests.stores import store


def fleet(address: str, **more: object) -> FleetConfig:
    """A fleet of two."""
    return FleetConfig.model_validate({"host": "a", "hosts": ("a", "b"), "store": address, **more})


def test_a_store_is_asked_as_a_host_asks_it() -> None:
    """A real store with a user that may do nothing but what hosts do is well; a wrong password, none, and a store that
    is gone are told, each with what it means."""
    with tempfile.TemporaryDirectory(prefix="st-", dir="/tmp") as folder:
        password, other = Path(folder) / "password", Path(folder) / "other"
        password.write_text("of the store")
        other.write_text("another")
        user = "athanor on >of\u00a0the\u00a0store".replace("\u00a0", "_")
        password.write_text("of_the_store")
        allowed = [*user.split(), "~athanor:limits:*", "-@all", "+set", "+mget"]
        with store(Path(folder), "--user", *allowed) as running:
            named = {"store_user": "athanor"}
            assert store_problem(fleet(running.address, store_password=password, **named)) == ""
            assert "WRONGPASS" in store_problem(fleet(running.address, store_password=other, **named))
            missing = store_problem(fleet(running.address, store_password=Path(folder) / "missing"))
            assert "No such file" in missing
        assert "cannot be asked" in store_problem(fleet(running.address))
    assert [one.level for one in check_store("")] == [Severity.OK]
    assert [one.level for one in check_store("away")] == [Severity.WARNING]
