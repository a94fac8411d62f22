"""Two hosts of one fleet and one real store: what one has computed the other finds, and nobody else does."""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

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


@dataclass
class Pair:
    """Both hosts, and the store as who owns it sees it."""

    hosts: list[Spilling]
    desk: Desk


def held(host: Spilling, name: str) -> float:
    """A level of a host's metrics."""
    page = httpx.get(f"{host.admin}/metrics", verify=PLAIN, timeout=20).text
    found = re.search(rf"^{name}(?:{{[^}}]*}})? ([0-9.e+]+)$", page, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


def wait_until(holds: Callable[[], bool]) -> None:
    """Wait for what other processes do."""
    until = time.monotonic() + 90
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.1)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, runsc_path: Path) -> Iterator[Pair]:
    """Two appliances that have the fleet's keys. The second is told the form in which the first one's engine computes,
    since a fleet shares among engines of one form."""
    folder = tmp_path_factory.mktemp("fleet-kv")
    sign(folder, HOSTS)
    with tempfile.TemporaryDirectory(prefix="kv-", dir="/tmp") as name, ExitStack() as stack:
        running = stack.enter_context(store(Path(name)))
        hosts = list[Spilling]()
        for host in HOSTS:
            (folder / host).mkdir()
            section = {"store": running.address, "size": 64 << 20, "ttl": 600}
            section["members"] = config(folder, host).model_dump(mode="json")
            sandbox = {**as_demos(), "form_cache": str(folder / "forms"), "spill": {"memory": 10 * BLOCK_BYTES}}
            more = {"kv_store": section, "sandbox": sandbox, "audit": {"directory": "audit"}}
            hosts.append(stack.enter_context(served(folder / host, POLICY, {}, **more)))
        for one in hosts:
            wait_until(lambda one=one: held(one, "athanor_fleet_keys_held") == 1)
        time.sleep(2)  # Tenants' keys come with the fleet's; engines are told of both.
        yield Pair(hosts, Desk(running.address[5:]))


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
