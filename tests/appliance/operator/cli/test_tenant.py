"""``athanor tenant``: keys made and destroyed when no appliance runs."""

from __future__ import annotations

import asyncio
import json
import tempfile
import threading
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from appliance.common.paths import OPERATOR_SOCKET
from appliance.common.usage.book import Released
from appliance.operator.cli import tenant as command
from appliance.supervisor.operator_socket import OperatorSocket
from isolation.keys.keyring import Keyring
from isolation.keys.root import read_root
from tests.appliance.common.test_config import GOOD
from tests.appliance.operator.cli.conftest import Run

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
    assert json.loads(done.stdout) == {"ok": True, "tenant": "alpha", "objects": 0, "had_key": True, "unlinked": False}
    assert [path.name for path in (tmp_path / "keyring").glob("*.kek")] == ["beta.kek"]
    plain = run("tenant", "shred", "alpha", "-c", str(config))
    assert "it had no key" in plain.stdout
    config.write_text(GOOD)
    refused = run("tenant", "shred", "alpha", "-c", str(config))
    assert (refused.exit_code, "names no keys" in refused.stderr) == (1, True)


def test_a_key_is_renewed_and_all_are_wrapped_anew_offline(run: Run, tmp_path: Path) -> None:
    """A rotation leaves another key, of whoever had none too; a rewrap leaves keys that the new root key opens, and
    says what is to be done next; a file that is no root key changes nothing."""
    config = tmp_path / "athanor.yaml"
    config.write_text(GOOD + KEYS)
    for name in ("root-key", "root-key.new"):
        assert run("tenant", "root", str(tmp_path / name)).exit_code == 0
    fresh = run("tenant", "rotate", "alpha", "-c", str(config))
    assert fresh.stdout == "alpha: it has a new key\n"
    before = (tmp_path / "keyring" / "alpha.kek").read_bytes()
    done = run("tenant", "rotate", "alpha", "-c", str(config), "--yes", "-o", "json")
    assert json.loads(done.stdout) == {"ok": True, "tenant": "alpha", "objects": 0, "had_key": True, "unlinked": False}
    rotated = (tmp_path / "keyring" / "alpha.kek").read_bytes()
    assert rotated != before
    (tmp_path / "no-key").write_bytes(b"short")
    (tmp_path / "no-key").chmod(0o600)
    for wrong in ("no-key", "absent"):
        refused = run("tenant", "rewrap", str(tmp_path / wrong), "-c", str(config))
        assert (refused.exit_code, "root key" in refused.stderr) == (1, True)
    assert (tmp_path / "keyring" / "alpha.kek").read_bytes() == rotated
    done = run("tenant", "rewrap", str(tmp_path / "root-key.new"), "-c", str(config))
    assert done.exit_code == 0
    assert "1 key wrapped" in done.stdout
    assert "before the next start" in done.stdout
    keyring = Keyring(tmp_path / "keyring", read_root(tmp_path / "root-key.new"))
    keyring.derive("alpha", bytes(32), b"test")
    keyring.close()
    assert run("tenant", "shred", "alpha", "-c", str(config)).exit_code == 0


def test_reserved_spend_is_released_by_the_supervisor_alone(run: Run, tmp_path: Path) -> None:
    """The running supervisor is asked, over its real socket, and the answer is said in words and in JSON; where none
    runs nothing is done, for nobody else may write the usage book."""
    with tempfile.TemporaryDirectory(prefix="rel-", dir="/tmp") as folder, capture_logs():
        config = tmp_path / "athanor.yaml"
        config.write_text(GOOD.replace("run_dir: run", f"run_dir: {folder}"))
        alone = run("tenant", "release", "alpha", "-c", str(config))
        assert (alone.exit_code, "no supervisor runs" in alone.stderr) == (1, True)
        loop, asked = asyncio.new_event_loop(), list[str]()

        def release(tenant: str) -> Released:
            asked.append(tenant)
            return Released(2, 1_500_000_000)

        socket = OperatorSocket(
            Path(folder) / OPERATOR_SOCKET, None, lambda *_: True, lambda _entry: None, release=release
        )
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        asyncio.run_coroutine_threadsafe(socket.open(), loop).result(20)
        try:
            plain = run("tenant", "release", "alpha", "-c", str(config))
            told = run("tenant", "release", "alpha", "-c", str(config), "-o", "json")
        finally:
            asyncio.run_coroutine_threadsafe(socket.close(), loop).result(20)
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()
    assert plain.stdout == "alpha: 2 reservations released, 1.50 in all\n"
    assert json.loads(told.stdout) == {"ok": True, "tenant": "alpha", "requests": 2, "cost": 1_500_000_000}
    assert asked == ["alpha", "alpha"]


def test_a_person_is_asked_first(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a terminal a no leaves the key as it is, and ``--yes`` does not ask."""
    config = tmp_path / "athanor.yaml"
    config.write_text(GOOD + KEYS)
    assert run("tenant", "root", str(tmp_path / "root-key")).exit_code == 0
    assert run("tenant", "rotate", "alpha", "-c", str(config)).exit_code == 0
    before = (tmp_path / "keyring" / "alpha.kek").read_bytes()
    monkeypatch.setattr(command, "_is_person", lambda: True)
    for order in ("shred", "rotate"):
        refused = run("tenant", order, "alpha", "-c", str(config))
        assert (refused.exit_code, "nothing was done" in refused.stderr) == (1, True)
    assert (tmp_path / "keyring" / "alpha.kek").read_bytes() == before
    assert run("tenant", "shred", "alpha", "-c", str(config), "--yes").exit_code == 0
    assert not (tmp_path / "keyring" / "alpha.kek").exists()
