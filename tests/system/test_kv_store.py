"""KV that leaves the machine: a real engine, carrier and store, which does what it likes with what it has."""

from __future__ import annotations

import json
import re
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from appliance.supervisor.fleet_keys.envelopes import ENVELOPE_BYTES
from tests.appliance.supervisor.fleet_keys.fleets import config, sign
from tests.stores import store
from tests.system.conftest import PLAIN
from tests.system.spilling import BLOCK_BYTES, Spilling, served, text

pytestmark = [pytest.mark.runsc, pytest.mark.timeout(300)]

POLICY = """\
version: 1
tenants:
  alpha: {credentials: ["key:a"], models: ["*"], kv_export: true}
  beta: {credentials: ["key:b"], models: ["*"]}
  shy: {credentials: ["key:s"], models: ["*"], retention: none, kv_export: true}
"""

SEALED = BLOCK_BYTES + 16
"""Bytes of a block in the store: ciphertext and tag."""


MARK = 32
"""Bytes of the mark of a host of a fleet."""


class Desk:
    """Speaks to the store as who owns it."""

    def __init__(self, path: str, hosts: int = 1) -> None:
        """``hosts``: how many write to it, each with a mark at most."""
        self._hosts = hosts
        self._peer = socket.socket(socket.AF_UNIX)
        self._peer.settimeout(5)
        self._peer.connect(path)
        self._file = self._peer.makefile("rb")

    def ask(self, *words: bytes) -> bytes | int | list[bytes]:
        """Give a command; returns its reply."""
        self._peer.sendall(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(one), one) for one in words))
        return self._read()

    def all(self) -> list[bytes]:
        """Names of all that the store has but the mark of each host, by which it sees whether the store was begun anew
        (``tests/appliance/supervisor/test_store_lost.py``)."""
        found = self.ask(b"KEYS", b"*")
        assert isinstance(found, list)
        marks = {key for key in found if self.ask(b"STRLEN", key) == MARK}
        assert len(marks) <= self._hosts
        return sorted(set(found) - marks)

    def names(self) -> list[bytes]:
        """Names of all blocks that the store has: beside marks, all but what hosts say to each other about keys."""
        return [key for key in self.all() if self.ask(b"STRLEN", key) not in (0, ENVELOPE_BYTES)]

    def change(self, key: bytes, value: bytes) -> None:
        """Put another value under a name, unless it has been dropped meanwhile: that would be dropped by nobody."""
        self.ask(b"SET", key, value, b"XX", b"KEEPTTL")

    def value(self, key: bytes) -> bytes:
        """What is under a name."""
        found = self.ask(b"GET", key)
        assert isinstance(found, bytes)
        return found

    def _read(self) -> bytes | int | list[bytes]:
        line = self._file.readline().strip()
        kind, rest = line[:1], line[1:]
        if rest == b"-1":
            return b""
        if kind == b"$":
            data = self._file.read(int(rest) + 2)
            return data[:-2]
        if kind == b"*":
            return [bytes(self._read()) for _ in range(int(rest))]  # type: ignore[arg-type]
        assert kind in b"+:", line
        return int(rest) if kind == b":" else rest


def wait_until(holds: Callable[[], bool]) -> None:
    """Wait for what other processes do."""
    until = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.05)


def counted(spilling: Spilling, outcome: str) -> float:
    """Blocks that had an outcome, by the metric."""
    page = httpx.get(f"{spilling.admin}/metrics", verify=PLAIN, timeout=20).text
    found = re.search(rf'athanor_spill_blocks_total{{[^}}]*outcome="{outcome}"[^}}]*}} ([0-9.e+]+)', page)
    return 0.0 if found is None else float(found[1])


def restored_tokens(spilling: Spilling, tier: str) -> float:
    """Tokens of requests that came back from a tier, by the metric."""
    page = httpx.get(f"{spilling.admin}/metrics", verify=PLAIN, timeout=20).text
    found = re.search(rf'athanor_kv_restored_tokens_total{{[^}}]*tier="{tier}"[^}}]*}} ([0-9.e+]+)', page)
    return 0.0 if found is None else float(found[1])


def away(spilling: Spilling, reason: str) -> float:
    """Whether the store counts as away for this reason, by the gauge."""
    page = httpx.get(f"{spilling.admin}/metrics", verify=PLAIN, timeout=20).text
    found = re.search(rf'athanor_kv_store_away{{[^}}]*reason="{reason}"[^}}]*}} ([0-9.]+)', page)
    assert found is not None, "the gauge is not there"
    return float(found[1])


@pytest.mark.full
def test_blocks_leave_and_come_back_and_a_hostile_store_changes_no_answer(tmp_path: Path, runsc_path: Path) -> None:
    """Blocks that find no place in memory go to the store and come back, with the same answer; those of tenants without
    the policy's word never go. All blocks flipped, then swapped with each other, open nowhere: the answer is the same,
    computed anew. A shred drops them from the store. Without a store the answer is the same too. The supervisor has
    accepted the list of the fleet's members that the section names."""
    with tempfile.TemporaryDirectory(prefix="kv-", dir="/tmp") as name, store(Path(name)) as running:
        print(running.version)
        desk, section = Desk(running.address[5:]), {"store": running.address, "size": 64 << 20, "ttl": 600}
        sign(tmp_path)
        section["members"] = config(tmp_path, "host-b").model_dump(mode="json")
        with served(tmp_path, POLICY, {}, kv_store=section) as spilling:
            run_dir = Path(json.loads((spilling.state / "athanor.yaml").read_text())["run_dir"])
            wait_until((run_dir / "carrier.sock").exists)  # It is started when the others are ready.
            assert b"lives 1" in (tmp_path / "host-b.accepted").read_bytes()
            for key in ("b", "s"):
                spilling.ask(key, text(2))
                spilling.crowd_out(key, 10)
            time.sleep(0.5)
            assert desk.names() == []
            answer, cached = spilling.ask("a", text(1))
            assert cached == 0
            spilling.crowd_out("a", 20)
            wait_until(lambda: len(desk.names()) > 8)
            assert {len(desk.value(key)) for key in desk.names()} == {SEALED}
            again, cached = spilling.ask("a", text(1))
            assert (again, cached > 100) == (answer, True)
            wait_until(lambda: counted(spilling, "store_restored") > 4)
            wait_until(lambda: restored_tokens(spilling, "store") > 64)

            for number, spoil in ((3, flip), (4, swap)):
                answer, _ = spilling.ask("a", text(number))
                spilling.crowd_out("a", 10 * number)
                time.sleep(1)  # All that was evicted is written.
                assert len(desk.names()) > 8
                before = counted(spilling, "rejected_seal")
                spoil(desk)
                again, cached = spilling.ask("a", text(number))
                assert (again, cached < 160) == (answer, True)  # At most what was in memory.
                wait_until(lambda before=before: counted(spilling, "rejected_seal") > before)

            spilling.crowd_out("a", 50)
            wait_until(lambda: len(desk.names()) > 8)
            done = spilling.command("shred", "alpha")
            assert json.loads(done.stdout)["objects"] > 18, done.stderr
            wait_until(lambda: desk.names() == [])
            assert spilling.ask("a", text(4)) == (answer, 0)

            spilling.crowd_out("a", 60)
            running.process.kill()
            running.process.wait()
            wait_until(lambda: away(spilling, "store") == 1)
            assert away(spilling, "carrier") == 0
            assert spilling.ask("a", text(4))[0] == answer


def flip(desk: Desk) -> None:
    """Flip a bit of every value."""
    for key in desk.all():
        value = bytearray(desk.value(key))
        if value:
            value[len(value) // 2] ^= 1
            desk.change(key, bytes(value))


def swap(desk: Desk) -> None:
    """Give every name its neighbour's value."""
    keys = desk.names()
    values = [desk.value(key) for key in keys]
    for key, value in zip(keys, [*values[1:], values[0]], strict=True):
        desk.change(key, value)
