"""KV that leaves a real engine in a real sandbox: comes back, stays sealed, is shredded by the operator's command."""

from __future__ import annotations

import json
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from appliance.common.catalog import embedded_model
from appliance.common.credentials import new_pepper
from appliance.common.keys import KeyRecord, issue, serialise_records
from appliance.operator.demo import choose_ports, run_directory
from isolation.host.atomic_file import write_whole
from tests.system.conftest import ATHANOR, PLAIN

pytestmark = [pytest.mark.runsc, pytest.mark.timeout(180)]

POLICY = """\
version: 1
tenants:
  alpha: {credentials: ["key:a"], models: ["*"]}
  beta: {credentials: ["key:b"], models: ["*"]}
  shy: {credentials: ["key:s"], models: ["*"], retention: none}
"""

BLOCK_BYTES = 16 * 5 * 2 * 2 * 32 * 4
"""Of the embedded model in float32: tokens, layers, keys and values, heads, width, bytes."""

POOL_BYTES = 72 * BLOCK_BYTES
"""Less than the prompt and the four that crowd it out take."""


@dataclass
class Spilling:
    """A served appliance with both tiers."""

    state: Path
    http: str
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
        argv = [ATHANOR, "tenant", *arguments, "--config", str(self.state / "athanor.yaml"), "-o", "json"]
        return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)


def text(number: int) -> str:
    """A prompt of some hundred tokens, different from its first on."""
    return f"{number} " + " ".join(f"word{number * 37 + place}" for place in range(75))


@pytest.fixture(scope="module")
def spilling(tmp_path_factory: pytest.TempPathFactory, runsc_path: Path) -> Iterator[Spilling]:
    """`athanor serve` with a pool of 85 blocks, ten sealed blocks of memory and a few hundred on a disk, in which no
    key was drawn and nothing written yet when the first test begins."""
    tmp_path = tmp_path_factory.mktemp("spilling")
    state = tmp_path / "state"
    state.mkdir()
    pepper = new_pepper()
    issued = {name: issue(name, pepper) for name in ("a", "b", "s")}
    records = {name: KeyRecord(digest, datetime.now(UTC)) for name, (_, digest) in issued.items()}
    write_whole(state / "pepper", pepper)
    write_whole(state / "credentials.json", serialise_records(records).encode())
    (state / "policy.yaml").write_text(POLICY)
    assert subprocess.run([ATHANOR, "tenant", "root", str(state / "root-key")], check=False).returncode == 0
    http, rpc, admin = choose_ports((0, 0, 0))
    run_dir = run_directory(state)
    config = {
        "listen": {"http": f"127.0.0.1:{http}", "grpc": f"127.0.0.1:{rpc}", "admin": f"127.0.0.1:{admin}"},
        "models": [{"name": "athanor-mini", "path": str(embedded_model()), "dtype": "float32", "kv_bytes": POOL_BYTES}],
        "policy": "policy.yaml",
        "credentials": "credentials.json",
        "pepper": "pepper",
        "run_dir": str(run_dir),
        "sandbox": {"spill": {"memory": 10 * BLOCK_BYTES + 2_000, "disk": 64 << 20, "directory": "spill"}},
        "keys": {"root_key": "root-key", "keyring": "keyring"},
    }
    (state / "athanor.yaml").write_text(json.dumps(config))
    with (tmp_path / "serve.log").open("wb") as log:
        process = subprocess.Popen(
            [ATHANOR, "serve", "--config", str(state / "athanor.yaml")],
            stdout=subprocess.PIPE,
            stderr=log,
            env={"PATH": "/usr/bin:/bin"},
        )
    try:
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], 90)[0]
        line = process.stdout.readline()
        assert line, (tmp_path / "serve.log").read_text()[-4000:]
        ready: dict[str, Any] = json.loads(line)
        yield Spilling(state, ready["http"], {name: plain for name, (plain, _) in issued.items()})
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert not (state / "spill").exists()
    finally:
        process.kill()
        process.wait()


def test_retention_none_never_spills_and_bad_commands_are_refused(spilling: Spilling) -> None:
    """Of a tenant without retention no key is ever drawn and no file written, while another's load writes both
    (control); a command for no tenant's name is refused, and one for an unknown tenant destroys nothing."""
    for number in range(100, 108):
        assert spilling.ask("s", text(number))[1] == 0
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline and not spilling.files():
        select.select([], [], [], 0.1)
    assert spilling.files() == [] and list((spilling.state / "keyring").glob("*.kek")) == []
    for number in range(100, 108):
        spilling.ask("a", text(number))
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and not spilling.files():
        select.select([], [], [], 0.1)
    assert spilling.files()
    assert [path.name for path in (spilling.state / "keyring").glob("*.kek")] == ["alpha.kek"]
    refused = spilling.command("shred", "../alpha")
    assert refused.returncode == 1 and "no tenant" in refused.stderr
    nobody = json.loads(spilling.command("shred", "nobody").stdout)
    assert (nobody["had_key"], nobody["objects"]) == (False, 0)


def test_a_prefix_comes_back_and_a_shredded_tenants_does_not(spilling: Spilling) -> None:
    """A prompt that others crowded out is cached again, with the same answer; files hold no KV in clear, are private,
    and none is of the tenant without retention. Changed files are computed anew. After `tenant shred` the tenant's
    files are gone and it finds nothing, while another tenant's prefix still comes back; the tenant is served on."""
    answer, cached = spilling.ask("a", text(1))
    assert cached == 0
    spilling.crowd_out("a", 10)
    again, cached = spilling.ask("a", text(1))
    assert (again, cached > 100) == (answer, True)
    files = spilling.files()
    assert files and all(path.stat().st_mode & 0o777 == 0o600 for path in files)

    spilling.crowd_out("a", 20)
    for path in spilling.files():
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    again, cached = spilling.ask("a", text(1))
    assert (again, cached < 160) == (answer, True)  # At most what was in memory.

    spilling.crowd_out("a", 30)
    spilling.ask("b", text(2))
    spilling.crowd_out("a", 40)
    done = spilling.command("shred", "alpha")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["had_key"], told["objects"] > 50) == (True, True)
    assert not (spilling.state / "keyring" / "alpha.kek").exists()
    again, cached = spilling.ask("a", text(1))
    assert (again, cached) == (answer, 0)
    _, cached = spilling.ask("b", text(2))
    assert cached > 100
    spilling.crowd_out("a", 50)
    assert spilling.ask("a", text(1))[1] > 100  # Under a new key all is as before.
