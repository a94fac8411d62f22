"""``athanor tenant``: keys made and destroyed when no appliance runs."""

from __future__ import annotations

import json
from pathlib import Path

from isolation.keys.keyring import Keyring
from isolation.keys.root import read_root
from tests.appliance.cli.conftest import Run
from tests.appliance.test_config import GOOD

KEYS = "keys: {root_key: root-key, keyring: keyring}\n"


def test_a_key_is_destroyed_offline(run: Run, tmp_path: Path) -> None:
    """The tenant's wrapped key goes, others stay; whoever had none is told so; without keys there is nothing to do."""
    config = tmp_path / "athanor.yaml"
    config.write_text(GOOD + KEYS)
    assert run("tenant", "shred", "alpha", "-c", str(config)).exit_code == 1
    assert run("tenant", "root", str(tmp_path / "root-key")).exit_code == 0
    again = run("tenant", "root", str(tmp_path / "root-key"))
    assert (again.exit_code, "already" in again.stderr) == (1, True)
    keyring = Keyring(tmp_path / "keyring", read_root(tmp_path / "root-key"))
    for tenant in ("alpha", "beta"):
        keyring.derive(tenant, bytes(32), b"test")
    busy = run("tenant", "shred", "alpha", "-c", str(config))
    assert (busy.exit_code, "running appliance" in busy.stderr) == (1, True)
    keyring.close()
    done = run("tenant", "shred", "alpha", "-c", str(config), "-o", "json")
    assert json.loads(done.stdout) == {"ok": True, "tenant": "alpha", "objects": 0, "had_key": True}
    assert [path.name for path in (tmp_path / "keyring").glob("*.kek")] == ["beta.kek"]
    plain = run("tenant", "shred", "alpha", "-c", str(config))
    assert "it had no key" in plain.stdout
    config.write_text(GOOD)
    refused = run("tenant", "shred", "alpha", "-c", str(config))
    assert (refused.exit_code, "names no keys" in refused.stderr) == (1, True)
