"""The policy in force and its replacement."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

from appliance.gateway.policy_file import PolicyFile
from appliance.gateway.request.ledger import Ledger
from policy.model import PolicySet

POLICY = 'version: 1\ntenants:\n  alpha: {credentials: ["key:alpha"], models: ["*"]}\n'


async def test_a_reload_stands_in_nobodys_way(tmp_path: Path) -> None:
    """While the policy is read, which takes as long as the operator's file system likes, the event loop goes on; what
    is read then is in force."""
    for name, content in (("policy.yaml", POLICY), ("credentials.json", '{"keys": {}}'), ("pepper", "x" * 32)):
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(0o600)
    files = PolicyFile(tmp_path / "policy.yaml", tmp_path / "credentials.json", tmp_path / "pepper")
    ledger, keys = Ledger(files.load(), {}), files.keys
    (tmp_path / "policy.yaml").unlink()
    os.mkfifo(tmp_path / "policy.yaml")
    turned = threading.Event()

    async def fetch(_names: list[str]) -> dict[str, bytes]:
        return {}

    async def prepare(_policy: PolicySet) -> list[str]:
        return []

    def feed() -> None:
        # A reload that kept the loop from turning would wait for this, and this for the loop.
        turned.wait(5.0)
        (tmp_path / "policy.yaml").write_text(POLICY.replace("alpha", "beta") if turned.is_set() else POLICY)

    writer = threading.Thread(target=feed)
    writer.start()
    reloading = asyncio.ensure_future(files.reload(ledger, fetch, prepare))
    asyncio.get_running_loop().call_soon(turned.set)
    outcome = await reloading
    writer.join()
    assert outcome.ok
    assert list(ledger.policy.tenants) == ["beta"]
    assert files.keys is not keys
