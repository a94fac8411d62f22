"""The whole appliance in a state directory of its own, as `athanor demo` starts it, with all its processes known."""

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

from appliance import demo
from appliance.cli.bench_target import wait_ready
from appliance.errors import StartError
from bench.guarantees.intruder import UnavailableError
from bench.guarantees.raw_http import body_of, request_bytes, status_of, talk
from bench.processes import tree
from isolation.checkpoint import ACCOUNT
from isolation.process import MINIMAL_ENVIRONMENT, Child, start

END_S = 60.0
MODEL = "athanor-mini"
ROLES = ("engine", "text", "gateway", "supervisor")
"""Every process that may die: both sandboxes, both of the host."""


@dataclass(frozen=True, slots=True)
class RealAppliance:
    """A running appliance of ours."""

    child: Child
    state: Path
    log: Path
    ready: dict[str, Any]
    saved_in: Path | None = None
    """Where sandboxes are saved for the next start; None where every start is a cold one."""

    @property
    def http_port(self) -> int:
        """Of the HTTP API."""
        return urlsplit(self.ready["http"]).port or 80

    @property
    def grpc_target(self) -> str:
        """Of the gRPC API."""
        return str(self.ready["grpc"])

    def key(self, tenant: str) -> str:
        """A tenant's API key."""
        return str(self.ready["tenants"][tenant]["api_key"])

    async def status(self) -> dict[str, Any]:
        """What the operator's listener says.

        Raises:
            LookupError: it says nothing now.
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
        """How often each sandbox was booted; the first is 1."""
        (model,) = (await self.status())["models"]
        return {role: int(model[role]["generation"]) for role in ("engine", "text")}

    async def pid(self, role: str) -> int:
        """The process of one role.

        Raises:
            LookupError: there is none now.
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
                if b"appliance.child" in words and role.encode() in words:
                    return pid
        raise LookupError(role)

    def checkpoints(self) -> list[Path]:
        """Sandboxes that were saved for the next start."""
        return [] if self.saved_in is None else list(self.saved_in.glob(f"[0-9a-f]*/{ACCOUNT}"))

    def census(self) -> list[str]:
        """Processes, mounts and sandbox directories that name this appliance; at rest always as many."""
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
    """Start it, wait until it serves, end it with the block; ``checkpoints`` as ``athanor demo`` takes it: a directory,
    or ``off``, or empty for one of its own.

    Raises:
        UnavailableError: it does not start here; the end of its log says why.
    """
    folder = Path(tempfile.mkdtemp(prefix="ath-"))
    log = folder / "log"
    saved_in = None if checkpoints == "off" else Path(checkpoints or folder / "saved")
    argv = (
        sys.executable, "-m", "appliance.cli", "demo", "--json", "--http-port", "0", "--grpc-port", "0",
        "--admin-port", "0", "--state-dir", str(folder / "s"), "--checkpoints", checkpoints or str(folder / "saved"),
    )  # fmt: skip
    try:
        with log.open("wb") as file:
            root = str(Path(__file__).resolve().parents[2])
            environment = {**MINIMAL_ENVIRONMENT, "PYTHONPATH": root}
            child = start(argv, env=environment, stdio=file.fileno(), own_group=True)
        try:
            try:
                ready = wait_ready(child, log)
            except StartError as error:
                raise UnavailableError(str(error)) from error
            yield RealAppliance(child, folder / "s", log, ready, saved_in)
        finally:
            child.end(END_S)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def complete(appliance: RealAppliance, prompt: str, tokens: int, timeout_s: float = 10.0) -> tuple[int, str]:
    """A greedy completion of this many tokens: status and text; 0 where nothing answered."""
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


