"""KV that leaves a real engine in a real sandbox: comes back, stays sealed, is shredded by the operator's command."""

from __future__ import annotations

import json
import select
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.spilling import Spilling, served, text

pytestmark = [pytest.mark.runsc, pytest.mark.timeout(180)]

POLICY = """\
version: 1
tenants:
  alpha: {credentials: ["key:a"], models: ["*"]}
  beta: {credentials: ["key:b"], models: ["*"]}
  shy: {credentials: ["key:s"], models: ["*"], retention: none}
"""


@pytest.fixture(scope="module")
def spilling(tmp_path_factory: pytest.TempPathFactory, runsc_path: Path) -> Iterator[Spilling]:
    """An appliance with ten sealed blocks of memory and a few hundred on a disk."""
    with served(tmp_path_factory.mktemp("spilling"), POLICY, {"disk": 64 << 20, "directory": "spill"}) as found:
        yield found


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
