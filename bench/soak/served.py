"""The appliance under test: the one that ``athanor serve`` starts, with everything on that may break.

Three tenants: of one everything is kept, of one nothing, and one has a low limit of concurrency. KV spills to memory
and to a small disk, the audit log has a disk of its own, spans go to a collector of the harness's. The model's folder
and the kernels are copies, for some faults change them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from appliance.common.catalog import EMBEDDED_MODEL, embedded_model
from appliance.common.credentials import read_key_table
from appliance.common.keys import issue, serialise_records
from appliance.operator import demo, kernels
from appliance.operator.cli.bench_target import Target, own_appliance
from appliance.selftest.processes import tree
from appliance.selftest.raw_http import request_bytes, status_of, talk
from bench.soak.room import Room
from isolation.keys.root import create_root

MODEL = EMBEDDED_MODEL
EMBED_MODEL = "mini-embed"
"""The same weights as vectors."""

TENANTS = ("alpha", "beta", "gamma")
HOST_ROLES = ("gateway", "supervisor")

POLICY = """\
version: 1
tenants:
  alpha:
    credentials: ["key:alpha-1"]
    models: ["*"]
    limits: {requests_per_minute: 1000000, tokens_per_minute: 1000000000, concurrency: 512}
  beta:
    credentials: ["key:beta-1"]
    models: ["*"]
    retention: none
    limits: {requests_per_minute: 1000000, tokens_per_minute: 1000000000, concurrency: 512}
  gamma:
    credentials: ["key:gamma-1"]
    models: ["athanor-mini"]
    limits: {requests_per_minute: 1000000, tokens_per_minute: 1000000000, concurrency: 2}
"""

KV_BYTES = 2 << 20
"""Little, so that blocks leave the engine: some hundred blocks of the embedded model."""

SPILL_MEMORY_BYTES = 1 << 20
SPILL_DISK_BYTES = 8 << 20
STEP_TIMEOUT_S = 5.0
"""The least that a configuration may have: a hung engine is found soon."""

ADMIN_S = 10.0

QUICK_START_S = 10.0
"""In which it starts on two cores that do little else; a machine that takes longer is given more time for all else."""


@dataclass(frozen=True, slots=True)
class Served:
    """A running appliance, and what is known of it from outside."""

    target: Target
    grpc: str
    keys: dict[str, str]
    models: Path
    """The copied folder of the served model."""
    kernels: Path | None
    """The copied folder of compiled kernels; None where there are none."""
    run_dir: Path
    room: Room

    @property
    def patience(self) -> float:
        """What time limits of the harness's are to be multiplied by on this machine, as busy as it is: 1 and more."""
        return max(1.0, self.target.started_s / QUICK_START_S)

    @property
    def http_port(self) -> int:
        """Of the HTTP API."""
        return urlsplit(self.target.url).port or 80

    @property
    def admin_port(self) -> int:
        """Of the operator's listener."""
        return urlsplit(self.target.admin).port or 80

    @property
    def log(self) -> Path:
        """What the appliance has said."""
        return self.target.state.parent / "log"

    async def ask_admin(self, method: str, path: str) -> tuple[int, Any]:
        """Status and document of the operator's listener; 0 where it says nothing."""
        try:
            answer = await talk(self.admin_port, request_bytes(method, path, b""), ADMIN_S)
        except (OSError, TimeoutError):
            return 0, None
        body = answer.partition(b"\r\n\r\n")[2]
        try:
            return status_of(answer), json.loads(body)
        except ValueError:
            return status_of(answer), body.decode(errors="replace")

    async def status(self) -> dict[str, Any]:
        """What ``athanor status`` shows.

        Raises:
            LookupError: nothing answers now.
        """
        code, found = await self.ask_admin("GET", "/status")
        if code != 200 or not isinstance(found, dict):
            raise LookupError("no status")
        return found

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's series that have these labels (Prometheus text format); 0 where nothing answers."""
        code, text = await self.ask_admin("GET", "/metrics")
        total = 0.0
        for line in str(text).splitlines() if code == 200 else ():
            series, _, value = line.rpartition(" ")
            if series.partition("{")[0] in (name, f"{name}_total") and all(
                f'{label}="{wanted}"' in series for label, wanted in labels.items()
            ):
                total += float(value)
        return total

    def log_bytes(self) -> int:
        """How much the appliance has said."""
        return self.log.stat().st_size

    def said_since(self, offset: int) -> bytes:
        """What it has said after so many bytes."""
        with self.log.open("rb") as file:
            file.seek(offset)
            return file.read()

    async def sandboxes(self) -> dict[str, dict[str, Any]]:
        """``role-of-MODEL`` to what status says of it.

        Raises:
            LookupError: nothing answers now.
        """
        found = await self.status()
        return {f"{role} {model['name']}": model[role] for model in found["models"] for role in ("engine", "text")}

    async def sandbox_pid(self, role: str) -> int:
        """The sandbox process of a role of the generating model.

        Raises:
            LookupError: there is none now.
        """
        entry = (await self.sandboxes())[f"{role} {MODEL}"]
        if not entry["pid"] or entry["state"] != "ready":
            raise LookupError(role)
        return int(entry["pid"])

    def host_pid(self, role: str) -> int:
        """The process of gateway or supervisor.

        Raises:
            LookupError: there is none now.
        """
        for pid in tree(self.target.pid):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if b"appliance.operator.child" in words and role.encode() in words:
                    return pid
        raise LookupError(role)

    async def pid(self, role: str) -> int:
        """The process of any role.

        Raises:
            LookupError: there is none now.
        """
        return self.host_pid(role) if role in HOST_ROLES else await self.sandbox_pid(role)


async def until_pid(served: Served, role: str, timeout_s: float = 60.0) -> int:
    """The process of a role, as soon as there is one.

    Raises:
        LookupError: none came.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s * served.patience
    while True:
        try:
            return await served.pid(role)
        except LookupError:
            if loop.time() > deadline:
                raise
            await asyncio.sleep(0.1)


async def until_gone(pid: int, timeout_s: float) -> None:
    """Until a process is no more; a zombie still is.

    Raises:
        TimeoutError: it stays.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while _is_there(pid):
        if loop.time() > deadline:
            raise TimeoutError(f"process {pid} is still there after {timeout_s:g} s")
        await asyncio.sleep(0.1)


def _is_there(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


@contextlib.contextmanager
def served(room: Room, collector: str) -> Iterator[Served]:
    """Start it for the time of a block; ``collector`` is where its spans go.

    Raises:
        ApplianceError: it does not start.
        IsolationError: likewise.
    """
    models = room.scratch / MODEL
    shutil.copytree(embedded_model(), models)
    compiled = kernels.installed()
    copied = None
    if compiled is not None:
        copied = room.scratch / "kernels"
        shutil.copytree(compiled, copied)
    keys: dict[str, str] = {}
    found: dict[str, Any] = {}

    def adjust(state: Path, config: dict[str, Any]) -> None:
        keys.update(_all_keys(state))
        (state / "policy.yaml").write_text(POLICY)
        create_root(state / "root-key")
        (first,) = config["models"]
        first |= {"path": str(models), "max_num_seqs": 16, "max_context": 4096}
        config["models"] = [
            first,
            {**first, "name": EMBED_MODEL, "runner": "embed", "pooling": "mean", "kv_bytes": 4 << 20},
        ]
        config["sandbox"] = {
            "spill": {"memory": SPILL_MEMORY_BYTES, "disk": SPILL_DISK_BYTES, "directory": str(room.spill)},
            "kernels": None if copied is None else str(copied),
            "step_timeout_s": STEP_TIMEOUT_S,
            "memory_bytes": 1 << 30,
        }
        config["keys"] = {"root_key": "root-key", "keyring": "keyring"}
        config["audit"] = {"directory": str(room.audit)}
        found.update(config)

    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector}
    with own_appliance(None, KV_BYTES, "float32", adjust=adjust, environment=environment) as target:
        yield Served(target, found["listen"]["grpc"], keys, models, copied, Path(found["run_dir"]), room)


def _all_keys(state: Path) -> dict[str, str]:
    """The demo's two tenants' keys, and one more."""
    plain = demo.prepare_keys(state)
    table = read_key_table(state / "credentials.json", state / "pepper")
    records = dict(table.records)
    for tenant in TENANTS:
        if tenant not in plain:
            plain[tenant], digest = issue(f"{tenant}-1", table.pepper)
            records[f"{tenant}-1"] = type(next(iter(records.values())))(digest, datetime.now(UTC))
    (state / "credentials.json").write_text(serialise_records(records))
    return plain
