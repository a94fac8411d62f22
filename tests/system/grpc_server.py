"""`athanor serve` with one tenant, for clients of the gRPC API."""

from __future__ import annotations

import contextlib
import json
import select
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from appliance.common.catalog import embedded_model
from appliance.common.credentials import new_pepper
from appliance.common.keys import KeyRecord, issue, serialise_records
from appliance.operator.demo import choose_ports, run_directory
from isolation.host.atomic_file import write_whole
from tests.system.conftest import ATHANOR, as_demos

SPIFFE_ID = "spiffe://example.org/alpha"

POLICY = f"""\
version: 1
tenants:
  alpha:
    credentials: ["key:a", "{SPIFFE_ID}"]
    models: ["athanor-*"]
    limits: {{requests_per_minute: 6000, tokens_per_minute: 10000000, concurrency: 8, max_output_tokens: 4000}}
"""

START_S = 90.0
STOP_S = 60.0


@dataclass(frozen=True)
class GrpcServer:
    """Where a served appliance is, and the key of its tenant ``alpha``."""

    address: str
    """HOST:PORT of gRPC."""
    admin: str
    """Base URL of the admin listener."""
    key: str


@contextlib.contextmanager
def serve_grpc(state: Path, tls: dict[str, str] | None) -> Iterator[GrpcServer]:
    """Serve the embedded model for the time of a block, from the moment on at which it is ready.

    Args:
        state: folder for everything of it.
        tls: ``listen.tls`` of its configuration, with paths relative to ``state``; None for plain text.
    """
    pepper = new_pepper()
    key, digest = issue("a", pepper)
    write_whole(state / "pepper", pepper)
    write_whole(state / "credentials.json", serialise_records({"a": KeyRecord(digest, datetime.now(UTC))}).encode())
    (state / "policy.yaml").write_text(POLICY)
    http, rpc, admin = (f"127.0.0.1:{port}" for port in choose_ports((0, 0, 0)))
    listen = {"http": http, "grpc": rpc, "admin": admin}
    config = {
        "listen": listen if tls is None else {**listen, "tls": tls},
        "models": [{"name": "athanor-mini", "path": str(embedded_model()), "dtype": "float32", "kv_bytes": 64 << 20}],
        "policy": "policy.yaml",
        "credentials": "credentials.json",
        "pepper": "pepper",
        "run_dir": str(run_directory(state)),
        "sandbox": as_demos(),
    }
    (state / "athanor.yaml").write_text(json.dumps(config))
    process = subprocess.Popen([ATHANOR, "serve", "--config", str(state / "athanor.yaml")], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], START_S)[0] and process.stdout.readline()
        yield GrpcServer(rpc, f"http://{admin}", key)
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_S) == 0
    finally:
        process.kill()
        process.wait()
