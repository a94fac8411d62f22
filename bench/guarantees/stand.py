"""A whole appliance for a check: its own state directory, two tenants, real sandboxes; gone when the check is over."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from appliance.api.keys import KeyRecord, issue, serialise_records
from appliance.catalog import embedded_model
from appliance.credentials import new_pepper
from appliance.demo import choose_ports, run_directory
from isolation.keys.root import create_root
from isolation.whole_file import write_whole

START_S = 120.0
STOP_S = 60.0

POLICY = """\
version: 1
tenants:
  quiet: {credentials: ["key:quiet"], models: ["*"], retention: none}
  loud: {credentials: ["key:loud"], models: ["*"]}
"""
"""One tenant of whom nothing is kept, and one as usual."""


@dataclass(frozen=True, slots=True)
class Stand:
    """A running appliance."""

    process: subprocess.Popen[bytes]
    state: Path
    http: str
    admin: str
    keys: dict[str, str]

    def complete(self, tenant: str, **body: Any) -> str:
        """The text of a completion."""
        headers = {"authorization": f"Bearer {self.keys[tenant]}", "content-type": "application/json"}
        data = json.dumps({"model": "athanor-mini", **body}).encode()
        with urlopen(Request(self.http + "/v1/completions", data, headers), timeout=120) as answer:
            return str(json.loads(answer.read())["choices"][0]["text"])

    def get_admin(self, path: str) -> bytes:
        """What the admin listener shows."""
        with urlopen(self.admin + path, timeout=20) as answer:
            return bytes(answer.read())


@contextmanager
def stand(*, kv_bytes: int = 16 << 20, spill: bool = True, policy: str = POLICY, **config: Any) -> Iterator[Stand]:
    """Start an appliance for the time of a block."""
    folder = Path(tempfile.mkdtemp(prefix="ath-g-"))
    state = folder / "state"
    process = None
    try:
        state.mkdir(mode=0o700)
        plain = _write(state, kv_bytes, spill, policy, config)
        command = [sys.executable, "-m", "appliance.cli", "serve", "--config", str(state / "athanor.yaml")]
        with (state / "serve.log").open("wb") as log:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, env={"PATH": os.environ.get("PATH", "/usr/bin:/bin")}
            )
        assert process.stdout is not None
        line = process.stdout.readline() if select.select([process.stdout], [], [], START_S)[0] else b""
        if not line:
            raise RuntimeError("the appliance did not start: " + (state / "serve.log").read_text()[-3000:])
        ready = json.loads(line)
        yield Stand(process, state, ready["http"], ready["admin"], plain)
    finally:
        if process is not None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _write(state: Path, kv_bytes: int, spill: bool, policy: str, more: dict[str, Any]) -> dict[str, str]:
    """Write keys, policy and configuration; gives the plain keys."""
    pepper = new_pepper()
    issued = {name: issue(name, pepper) for name in ("quiet", "loud")}
    records = {name: KeyRecord(digest, datetime.now(UTC)) for name, (_, digest) in issued.items()}
    write_whole(state / "pepper", pepper)
    write_whole(state / "credentials.json", serialise_records(records).encode())
    (state / "policy.yaml").write_text(policy)
    create_root(state / "root-key")
    http, rpc, admin = choose_ports((0, 0, 0))
    model = {"name": "athanor-mini", "path": str(embedded_model()), "dtype": "float32", "kv_bytes": kv_bytes}
    config: dict[str, Any] = {
        "listen": {"http": f"127.0.0.1:{http}", "grpc": f"127.0.0.1:{rpc}", "admin": f"127.0.0.1:{admin}"},
        "models": [model],
        "policy": "policy.yaml", "credentials": "credentials.json", "pepper": "pepper",
        "run_dir": str(run_directory(state)),
        **more,
    }
    if spill:
        config["sandbox"] = {"spill": {"memory": 4 << 20, "disk": 64 << 20, "directory": "spill"}}
        config["keys"] = {"root_key": "root-key", "keyring": "keyring"}
    (state / "athanor.yaml").write_text(json.dumps(config))
    return {name: plain for name, (plain, _) in issued.items()}
