"""A served appliance with a small KV pool, whose blocks leave the engine, for the tests of spilled KV."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from appliance.common.catalog import embedded_model
from appliance.common.credentials import new_pepper
from appliance.common.keys import KeyRecord, issue, serialise_records
from appliance.operator.demo import choose_ports, run_directory
from isolation.host.atomic_file import write_whole
from tests.system.commands import athanor
from tests.system.conftest import ATHANOR, PLAIN, as_demos

BLOCK_BYTES = 16 * 5 * 2 * 2 * 32 * 4
"""Of the embedded model in float32: tokens, layers, keys and values, heads, width, bytes."""

POOL_BYTES = 72 * BLOCK_BYTES
"""Less than the prompt and the four that crowd it out take."""


@dataclass
class Spilling:
    """A served appliance."""

    state: Path
    http: str
    admin: str
    keys: dict[str, str]

    def ask(self, key: str, prompt: str) -> tuple[str, int]:
        """The greedy answer to a prompt, and how many of its tokens were cached."""
        answer = (
            httpx.post(
                self.http + "/v1/completions",
                json={
                    "model": "athanor-mini",
                    "prompt": prompt,
                    "max_tokens": 12,
                    "temperature": 0,
                    "ignore_eos": True,
                },
                headers={"authorization": f"Bearer {self.keys[key]}"},
                timeout=60,
                verify=PLAIN,
            )
            .raise_for_status()
            .json()
        )
        return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    def crowd_out(self, key: str, start: int) -> None:
        """Fill the pool with other prompts than any before."""
        for number in range(start, start + 4):
            self.ask(key, text(number))

    def files(self) -> list[Path]:
        """What lies on the disk."""
        return list((self.state / "spill").glob("*.kv"))

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """An operator's command."""
        return athanor("tenant", *arguments, "--config", str(self.state / "athanor.yaml"), "-o", "json")


def text(number: int) -> str:
    """A prompt of some hundred tokens, different from its first on."""
    return f"{number} " + " ".join(f"word{number * 37 + place}" for place in range(75))


@contextlib.contextmanager
def served(tmp_path: Path, policy: str, spill: dict[str, Any], **more: Any) -> Iterator[Spilling]:
    """`athanor serve` with a pool of 72 blocks and ten sealed blocks of memory; ``spill``: further keys of that
    section, ``more``: further sections. No key was drawn and nothing written yet."""
    state = tmp_path / "state"
    state.mkdir()
    pepper = new_pepper()
    issued = {name: issue(name, pepper) for name in ("a", "b", "s")}
    records = {name: KeyRecord(digest, datetime.now(UTC)) for name, (_, digest) in issued.items()}
    write_whole(state / "pepper", pepper)
    write_whole(state / "credentials.json", serialise_records(records).encode())
    (state / "policy.yaml").write_text(policy)
    assert athanor("tenant", "root", str(state / "root-key")).returncode == 0
    http, rpc, admin = choose_ports((0, 0, 0))
    run_dir = run_directory(state)
    config = {
        "listen": {"http": f"127.0.0.1:{http}", "grpc": f"127.0.0.1:{rpc}", "admin": f"127.0.0.1:{admin}"},
        "models": [{"name": "athanor-mini", "path": str(embedded_model()), "dtype": "float32", "kv_bytes": POOL_BYTES}],
        "policy": "policy.yaml",
        "credentials": "credentials.json",
        "pepper": "pepper",
        "run_dir": str(run_dir),
        "sandbox": {**as_demos(), "spill": {"memory": 10 * BLOCK_BYTES + 2_000, **spill}},
        "keys": {"root_key": "root-key", "keyring": "keyring"},
        **more,
    }
    (state / "athanor.yaml").write_text(json.dumps(config))
    with (tmp_path / "serve.log").open("wb") as log:
        process = subprocess.Popen(
            [ATHANOR, "serve", "--config", str(state / "athanor.yaml")],
            stdout=subprocess.PIPE,
            stderr=log,
            env={name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ} | {"PATH": "/usr/bin:/bin"},
        )
    try:
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], 90)[0]
        line = process.stdout.readline()
        assert line, (tmp_path / "serve.log").read_text()[-4000:]
        ready: dict[str, Any] = json.loads(line)
        yield Spilling(state, ready["http"], ready["admin"], {name: plain for name, (plain, _) in issued.items()})
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert not (state / "spill").exists()
    finally:
        process.kill()
        process.wait()
