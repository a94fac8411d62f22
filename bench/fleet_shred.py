"""A shred while a host is cut off from the store: ``python -m bench.fleet_shred``. It takes about seven minutes.

Two real appliances that share sealed KV through one real store (``docs/fleet.md``). The second reaches the store
through a relay. Both have a tenant's prompt in their engines' memory; then the relay is cut, so the second host can
learn of nothing, and the tenant is shredded on the first. Until its lease ends the second host still finds the prompt;
printed is when it was found last and when it was not found first, in seconds after the shred, and what the order said
about the other host. A lease is 300 s from its last renewal, each of which is 30 s apart.

Controls: both hosts find the prompt before the shred, and the first does not find it right after.

Run as root, with a store (``tests/stores.py``).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from appliance.common.catalog import embedded_model
from appliance.supervisor.fleet_keys.leases import DRIFT_S, LEASE_S
from tests.appliance.supervisor.fleet_keys.fleets import config, sign
from tests.stores import store
from tests.system.conftest import as_demos
from tests.system.spilling import BLOCK_BYTES, Spilling, served, text
from tests.system.test_fleet_kv import HOSTS, POLICY, held, wait_until

BLOCKS = 400
ASK_S = 2.0
"""Seconds between two questions to the host that is cut off."""

SETTLE_S = 5.0
"""Seconds for keys to reach engines, and for blocks to reach the store."""


class Relay:
    """A Unix socket in front of the store; cut, it ends all connections and takes no more."""

    def __init__(self, path: Path, store_path: str) -> None:
        self._store, self._open = store_path, list[socket.socket]()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        path.chmod(0o666)
        self._listener.listen(16)
        threading.Thread(target=self._take, daemon=True).start()

    def _take(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.socket(socket.AF_UNIX)
                far.connect(self._store)
                self._open += [near, far]
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=(one, other), daemon=True).start()

    @staticmethod
    def _carry(one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := one.recv(1 << 16):
                other.sendall(piece)
        with contextlib.suppress(OSError):
            other.shutdown(socket.SHUT_WR)

    def cut(self) -> None:
        """Cut it."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for one in self._open:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[Spilling, Spilling, Relay]]:
    """Both hosts with the fleet's keys, the second behind the relay."""
    model = {
        "name": "athanor-mini",
        "path": str(embedded_model()),
        "dtype": "float32",
        "kv_bytes": BLOCKS * BLOCK_BYTES,
    }
    sign(folder, HOSTS)
    with tempfile.TemporaryDirectory(prefix="kv-", dir="/tmp") as short, ExitStack() as stack:
        running = stack.enter_context(store(Path(short)))
        relay = Relay(Path(short) / "relay.sock", running.address.removeprefix("unix:"))
        hosts = list[Spilling]()
        for host, address in zip(HOSTS, (running.address, f"unix:{short}/relay.sock"), strict=True):
            (folder / host).mkdir()
            members = config(folder, host).model_dump(mode="json") | {"write": "when_computed"}
            section = {"store": address, "size": 64 << 20, "ttl": 3600, "members": members}
            spill = {"memory": 2 * BLOCKS * BLOCK_BYTES}
            sandbox = {**as_demos(), "form_cache": str(folder / "forms"), "spill": spill}
            more = {"kv_store": section, "sandbox": sandbox, "audit": {"directory": "audit"}, "models": [model]}
            hosts.append(stack.enter_context(served(folder / host, POLICY, {}, **more)))
        for one in hosts:
            wait_until(lambda one=one: held(one, "athanor_fleet_keys_held") == 1)
        time.sleep(SETTLE_S)
        yield hosts[0], hosts[1], relay


def main() -> int:
    """Measure and print; 1 where the prompt was found after the lease."""
    prompt = " ".join(text(number) for number in range(60, 63))
    with tempfile.TemporaryDirectory(prefix="fs-", dir="/tmp") as name, two_hosts(Path(name)) as (one, two, relay):
        one.ask("a", prompt)
        time.sleep(SETTLE_S)
        before = [host.ask("a", prompt)[1] for host in (one, two)]
        relay.cut()
        time.sleep(SETTLE_S)
        began = time.monotonic()
        done = json.loads(one.command("shred", "alpha").stdout)
        after = one.ask("a", prompt)[1]
        last = first = 0.0
        while not first and time.monotonic() - began < LEASE_S + 60:
            asked = time.monotonic() - began
            if two.ask("a", prompt)[1]:
                last = asked
            else:
                first = time.monotonic() - began
            time.sleep(ASK_S)
        ended = began + LEASE_S + DRIFT_S + 40
        while held(one, "athanor_fleet_shreds") != 0 and time.monotonic() < ended:
            time.sleep(1.0)
        complete = time.monotonic() - began
        shreds = held(one, "athanor_fleet_shreds")
    print(
        f"cached tokens of the prompt before: {before[0]} and {before[1]}; on the first host after the shred: {after}"
    )
    print(
        f"the host that is cut off: found last at {last:.1f} s, not found at {first:.1f} s; a lease is {LEASE_S:.0f} s"
    )
    print(f"the order says {json.dumps(done)}; shreds under way on the first host {shreds:.0f} at {complete:.1f} s")
    print(f"load {os.getloadavg()[0]:.1f}")
    met = min(before) > 0 and not after and first > 0 and last <= LEASE_S
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
