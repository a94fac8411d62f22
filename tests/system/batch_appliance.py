"""A whole appliance that keeps files and batches, which tests kill and start again."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai

from appliance.common.catalog import embedded_model
from appliance.operator.demo import choose_ports, prepare_keys, run_directory
from isolation.host.reaper import command_line, descendants
from isolation.keys.root import create_root
from tests.system.audit_files import written
from tests.system.conftest import PLAIN, START_TIMEOUT_S, STOP_TIMEOUT_S, PlainClient, begun_section

LIMITS = "{requests_per_minute: 600000, tokens_per_minute: 100000000, concurrency: 256}"
KEEPS = "features: {batches: true, stored_responses: true}"
POLICY = f"""\
version: 1
tenants:
  alpha: {{credentials: ["key:alpha-1"], models: ["*"], {KEEPS}, limits: {LIMITS}}}
  beta: {{credentials: ["key:beta-1"], models: ["*"], {KEEPS}, limits: {LIMITS}}}
prices:
  currency: EUR
  rules:
    - {{models: ["*"], input: 1, output: 2, batch: {{input: 0.5, output: 1}}}}
"""


@dataclass
class Kept:
    """A state directory and the appliance that runs in it."""

    state: Path
    runsc: Path
    models: list[dict[str, Any]]
    policy: str = POLICY
    sandbox: dict[str, Any] = field(default_factory=begun_section)
    """Further keys of that section; where nothing has made a base before, every start is cold."""
    keys: dict[str, str] = field(default_factory=dict)
    ready: dict[str, Any] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    def prepare(self) -> None:
        """Write keys, policy and configuration."""
        os.chmod(self.state, 0o755)
        self.keys = prepare_keys(self.state)
        create_root(self.state / "root")
        (self.state / "policy.yaml").write_text(self.policy)
        http, rpc, admin = (f"127.0.0.1:{port}" for port in choose_ports((0, 0, 0)))
        config = {
            "listen": {"http": http, "grpc": rpc, "admin": admin},
            "models": self.models,
            "policy": "policy.yaml",
            "credentials": "credentials.json",
            "pepper": "pepper",
            "run_dir": str(run_directory(self.state)),
            "audit": {"directory": "audit"},
            "keys": {"root_key": "root", "keyring": "keyring"},
            "batches": {"directory": "batches"},
            "sandbox": {"runsc": str(self.runsc), **self.sandbox},
        }
        (self.state / "athanor.yaml").write_text(json.dumps(config))

    @property
    def config(self) -> Path:
        """Path of the configuration."""
        return self.state / "athanor.yaml"

    def start(self) -> None:
        """Start it, and wait until it serves."""
        command = [sys.executable, "-m", "appliance.operator.cli", "serve", "--config", str(self.config)]
        with (self.state / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
        assert self.process.stdout is not None
        line = (
            self.process.stdout.readline() if select.select([self.process.stdout], [], [], START_TIMEOUT_S)[0] else b""
        )
        assert line, self.tail()
        self.ready = json.loads(line)

    def stop(self) -> None:
        """End it as an operator does."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(STOP_TIMEOUT_S)

    def tail(self) -> str:
        """The end of the log."""
        return (self.state / "log").read_text(errors="replace")[-4_000:]

    def pid(self, role: str) -> int | None:
        """The host process of one role; None while there is none."""
        assert self.process is not None
        for pid in descendants(self.process.pid):
            words = command_line(pid)
            if "appliance.operator.child" in words and role in words:
                return pid
        return None

    def openai(self, tenant: str = "alpha", **options: Any) -> openai.OpenAI:
        """The official client as this tenant."""
        settings = {"max_retries": 0, "timeout": 60.0, "http_client": PlainClient(), **options}
        return openai.OpenAI(base_url=self.ready["http"] + "/v1", api_key=self.keys[tenant], **settings)

    def get(self, path: str) -> httpx.Response:
        """Ask the admin listener."""
        return httpx.get(self.ready["admin"] + path, timeout=10, verify=PLAIN)

    def entries(self) -> list[dict[str, Any]]:
        """All entries of the audit log."""
        return written(self.state / "audit")


def requests_file(count: int, url: str = "/v1/chat/completions", **body: Any) -> bytes:
    """Lines of a batch."""
    lines = []
    for number in range(count):
        given = {"model": "athanor-mini", "max_tokens": 4, **body}
        if url == "/v1/chat/completions":
            given.setdefault("messages", [{"role": "user", "content": f"number {number}"}])
        elif url == "/v1/responses":
            given = {"model": "athanor-mini", "input": f"number {number}", "max_output_tokens": 4}
        elif url == "/v1/embeddings":
            given = {"model": "vectors", "input": f"number {number}"}
        elif url == "/v1/rerank":
            given = {"model": "vectors", "query": f"number {number}", "documents": ["one", "number two"]}
        elif url == "/v1/score":
            given = {"model": "vectors", "text_1": f"number {number}", "text_2": ["one", "number two"]}
        else:
            given.setdefault("prompt", f"number {number}")
        lines.append(json.dumps({"custom_id": f"line-{number}", "method": "POST", "url": url, "body": given}))
    return "\n".join(lines).encode() + b"\n"


def wait(holds: Callable[[], Any], most_s: float = 60.0, why: Callable[[], str] = str) -> Any:
    """Until something holds; gives it."""
    until = time.monotonic() + most_s
    while not (found := holds()):
        assert time.monotonic() < until, why()
        time.sleep(0.05)
    return found


MINI: dict[str, Any] = {
    "name": "athanor-mini",
    "path": str(embedded_model()),
    "kv_bytes": 32 << 20,
    "max_num_seqs": 16,
    "dtype": "float32",
}
