"""A whole appliance in its own state directory, started like `athanor demo`, with all its processes known."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from appliance.common.errors import StartError
from appliance.operator import demo
from appliance.operator.cli.bench_target import wait_ready
from appliance.selftest.intruder import CannotBeShownError
from appliance.selftest.processes import tree
from appliance.selftest.raw_http import body_of, request_bytes, status_of, talk
from isolation.gvisor.checkpoint import ACCOUNT
from isolation.host.process import MINIMAL_ENVIRONMENT, Child, start

END_S = 60.0
MODEL = "athanor-mini"
ROLES = ("engine", "text", "gateway", "supervisor")
"""Every process that the check kills: both sandboxes, both host processes."""


@dataclass(frozen=True, slots=True)
class RealAppliance:
    """A running appliance started by the check."""

    child: Child
    state: Path
    log: Path
    ready: dict[str, Any]
    saved_in: Path | None = None
    """Folder of sandbox checkpoints; None when every start is cold."""

    @property
    def http_port(self) -> int:
        """Return the port of the HTTP API."""
        return urlsplit(self.ready["http"]).port or 80

    @property
    def grpc_target(self) -> str:
        """Return the address of the gRPC API."""
        return str(self.ready["grpc"])

    def key(self, tenant: str) -> str:
        """Return a tenant's API key."""
        return str(self.ready["tenants"][tenant]["api_key"])

    async def status(self) -> dict[str, Any]:
        """Return the status from the operator's listener.

        Raises:
            LookupError: it does not answer now.
        """
        port = urlsplit(self.ready["admin"]).port or 80
        try:
            answer = await talk(port, request_bytes("GET", "/status", b""))
        except (OSError, TimeoutError) as error:
            raise LookupError("no status") from error
        if status_of(answer) != 200:
            raise LookupError("no status")
        return dict(json.loads(answer.partition(b"\r\n\r\n")[2]))

    async def generations(self) -> dict[str, int]:
        """Return the number of boots of each sandbox; the first is 1."""
        (model,) = (await self.status())["models"]
        return {role: int(model[role]["generation"]) for role in ("engine", "text")}

    async def pid(self, role: str) -> int:
        """Return the process id of one role.

        Raises:
            LookupError: it has no process now.
        """
        if role in ("engine", "text"):
            (model,) = (await self.status())["models"]
            if not model[role]["pid"]:
                raise LookupError(role)
            return int(model[role]["pid"])
        return self._host_pid(role)

    def _host_pid(self, role: str) -> int:
        for pid in tree(self.child.pid):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if b"appliance.operator.child" in words and role.encode() in words:
                    return pid
        raise LookupError(role)

    def checkpoints(self) -> list[Path]:
        """Return the sandboxes saved for the next start."""
        return [] if self.saved_in is None else list(self.saved_in.glob(f"[0-9a-f]*/{ACCOUNT}"))

    def census(self) -> list[str]:
        """Count processes, mounts and sandbox directories that name this appliance; constant at rest."""
        needles = [str(self.state), str(demo.run_directory(self.state))]
        found = []
        for entry in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{entry}/cmdline").read_bytes().decode(errors="replace")
                if any(needle in command for needle in needles):
                    found.append(f"process {command.replace(chr(0), ' ')[:80]}")
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
        found += [f"mount {line}" for line in mounts if any(needle in line for needle in needles)]
        run_dir = demo.run_directory(self.state)
        return found + [f"directory {path}" for path in run_dir.glob("*/*") if path.is_dir()]


@contextlib.contextmanager
def real_appliance(checkpoints: str = "") -> Iterator[RealAppliance]:
    """Start an appliance, wait until it serves, and end it with the block. ``checkpoints`` is as in ``athanor demo``: a
    directory, ``off``, or empty for a directory of its own.

    Raises:
        CannotBeShownError: it does not start here; the end of its log says why.
    """
    folder = Path(tempfile.mkdtemp(prefix=""))  # a short name: sockets lie below it
    log = folder / "log"
    saved_in = None if checkpoints == "off" else Path(checkpoints or folder / "saved")
    argv = (
        sys.executable,
        "-m",
        "appliance.operator.cli",
        "demo",
        "--json",
        "--http-port",
        "0",
        "--grpc-port",
        "0",
        "--admin-port",
        "0",
        "--state-dir",
        str(folder / "s"),
        "--checkpoints",
        checkpoints or str(folder / "saved"),
    )
    try:
        with log.open("wb") as file:
            root = str(Path(__file__).resolve().parents[2])
            environment = {**MINIMAL_ENVIRONMENT, "PYTHONPATH": root, "TMPDIR": tempfile.gettempdir()}
            child = start(argv, env=environment, stdio=file.fileno(), own_group=True)
        try:
            try:
                ready = wait_ready(child, log)
            except StartError as error:
                raise CannotBeShownError(str(error)) from error
            yield RealAppliance(child, folder / "s", log, ready, saved_in)
        finally:
            child.end(END_S)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def complete(appliance: RealAppliance, prompt: str, tokens: int, timeout_s: float = 10.0) -> tuple[int, str]:
    """Request a greedy completion of this many tokens; return status and text, 0 when there was no response."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    proof = ("authorization", f"Bearer {appliance.key('alpha')}")
    request = request_bytes("POST", "/v1/completions", json.dumps(body).encode(), proof)
    try:
        answer = await talk(appliance.http_port, request, timeout_s)
    except (OSError, TimeoutError):
        return 0, ""
    if status_of(answer) != 200:
        return status_of(answer), ""
    told = body_of(answer)  # A process that dies between an answer's head and its body closes the connection.
    return (0, "") if told is None else (200, str(json.loads(told)["choices"][0]["text"]))
