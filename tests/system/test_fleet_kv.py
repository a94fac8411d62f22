"""Two hosts of one fleet and one real store: what one has computed the other finds, and nobody else does."""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from appliance.common.catalog import embedded_model
from tests.appliance.supervisor.fleet_keys.fleets import config, sign
from tests.stores import store
from tests.system.conftest import PLAIN, as_demos
from tests.system.spilling import BLOCK_BYTES, Spilling, served, text
from tests.system.test_kv_store import Desk, counted, flip

pytestmark = [pytest.mark.runsc, pytest.mark.full, pytest.mark.timeout(300)]

POLICY = """\
version: 1
tenants:
  alpha: {credentials: ["key:a"], models: ["*"], kv_export: true, kv_fleet: true}
  beta: {credentials: ["key:b"], models: ["*"], kv_export: true, kv_fleet: true}
  shy: {credentials: ["key:s"], models: ["*"], kv_export: true}
"""

HOSTS = ("host-a", "host-b")

SMALL = 72
"""Blocks of a pool that a few prompts fill; its host has ten sealed ones in memory."""


@dataclass
class Pair:
    """Both hosts, and the store as who owns it sees it."""

    hosts: list[Spilling]
    desk: Desk


def held(host: Spilling, name: str) -> float:
    """A level of a host's metrics; below 0 where it was not told yet."""
    page = httpx.get(f"{host.admin}/metrics", verify=PLAIN, timeout=20).text
    found = re.search(rf"^{name}(?:{{[^}}]*}})? ([0-9.e+]+)$", page, re.MULTILINE)
    return -1.0 if found is None else float(found[1])


def wait_until(holds: Callable[[], bool]) -> None:
    """Wait for what other processes do."""
    until = time.monotonic() + 90
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.1)


@contextmanager
def two_hosts(folder: Path, *, write: str = "when_evicted", blocks: int = SMALL) -> Iterator[Pair]:
    """Two appliances that have the fleet's keys, and engines with so many blocks of KV. The second is told the form in
    which the first one's engine computes, since a fleet shares among engines of one form."""
    model = {"name": "athanor-mini", "path": str(embedded_model()), "dtype": "float32"}
    memory = 10 if blocks == SMALL else 2 * blocks
    sign(folder, HOSTS)
    with tempfile.TemporaryDirectory(prefix="kv-", dir="/tmp") as name, ExitStack() as stack:
        running = stack.enter_context(store(Path(name)))
        hosts = list[Spilling]()
        for host in HOSTS:
            (folder / host).mkdir()
            section = {"store": running.address, "size": 64 << 20, "ttl": 600}
            section["members"] = config(folder, host).model_dump(mode="json") | {"write": write}
            sandbox = {**as_demos(), "form_cache": str(folder / "forms"), "spill": {"memory": memory * BLOCK_BYTES}}
            more = {"kv_store": section, "sandbox": sandbox, "audit": {"directory": "audit"}}
            more["models"] = [{**model, "kv_bytes": blocks * BLOCK_BYTES}]
            hosts.append(stack.enter_context(served(folder / host, POLICY, {}, **more)))
        for one in hosts:
            wait_until(lambda one=one: held(one, "athanor_fleet_keys_held") == 1)
        time.sleep(2)  # Tenants' keys come with the fleet's; engines are told of both.
        yield Pair(hosts, Desk(running.address[5:], len(HOSTS)))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, runsc_path: Path) -> Iterator[Pair]:
    """Two appliances that write what is evicted."""
    with two_hosts(tmp_path_factory.mktemp("fleet-kv")) as found:
        yield found


def test_a_prompt_of_one_host_is_found_on_the_other(pair: Pair) -> None:
    """The second host takes a prompt from the store that the first one computed, and answers the same tokens; another
    tenant that shares, and one that does not, compute it. A store that flips a bit of all that it has changes no
    answer, and what it changed is counted. After a shred on one host the other computes too, though the store has the
    objects. Controls: the second host had nothing before."""
    (one, two), desk = pair.hosts, pair.desk
    answer, cached = one.ask("a", text(1))
    assert cached == 0
    one.crowd_out("a", 20)
    wait_until(lambda: counted(one, "fleet_stored") > 8)
    again, cached = two.ask("a", text(1))
    assert (again, cached > 64) == (answer, True)
    for key in ("b", "s"):
        assert two.ask(key, text(1)) == (answer, 0)

    answer, _ = one.ask("a", text(2))
    one.crowd_out("a", 30)
    time.sleep(2)  # All that was evicted is written.
    flip(desk)
    assert two.ask("a", text(2)) == (answer, 0)
    wait_until(lambda: counted(two, "fleet_rejected") > 0)

    answer, _ = one.ask("a", text(3))
    one.crowd_out("a", 40)
    time.sleep(2)
    done = json.loads(two.command("shred", "alpha").stdout)
    assert done["fleet"] is True
    assert two.ask("a", text(3)) == (answer, 0)
    wait_until(lambda: held(two, "athanor_fleet_shreds") == 1)


def test_a_prompt_is_taken_over_while_nothing_is_evicted(tmp_path: Path, runsc_path: Path) -> None:
    """With `write: when_computed` the first host has room for all: it writes each whole block of a long prompt, and not
    those of other tenants or of its answer, and the second takes the prompt and answers the same. The first finds it in
    its own memory. After a shred the second computes it. Control: the test above, where nothing is written before a
    block loses its place."""
    long = " ".join(text(number) for number in range(60, 63))
    with two_hosts(tmp_path, write="when_computed", blocks=400) as pair:
        one, two = pair.hosts
        one.ask("s", text(9))
        assert counted(one, "fleet_stored") == counted(one, "kept") == 0
        answer, cached = one.ask("a", long)
        again, whole = one.ask("a", long)
        assert (again, cached, whole > 600) == (answer, 0, True)
        wait_until(lambda: counted(one, "fleet_stored") >= whole // 16)
        time.sleep(1)
        written = counted(one, "fleet_stored")
        assert written == counted(one, "kept") and written - whole // 16 in (0, 1)
        assert counted(one, "fleet_left_out") == counted(one, "evicted") == counted(two, "fleet_restored") == 0
        again, cached = two.ask("a", long)
        assert (again, cached > 64) == (answer, True)
        time.sleep(1)
        assert counted(two, "kept") <= written - cached // 16, "what came from the store is not written there again"
        assert two.ask("b", long) == (answer, 0)
        assert json.loads(one.command("shred", "alpha").stdout)["fleet"] is True
        wait_until(lambda: two.ask("a", long + " again")[1] == 0)
