"""Requests that fail while one of two hosts behind nginx is killed: ``python -m bench.fleet_kills [--rounds N]``.

Two arms behind the real nginx with the recipe of ``deploy/fleet``, in turns: two appliances with the null engine in
their real sandboxes, of which the gateway of one is killed with SIGKILL, and two mocks (``bench/fleet_mock.py``), of
which one is killed and stays away for ``AWAY_S``. The mocks' figure is what nginx makes of a dead server by itself. In
each round 300 requests come from 12 clients, every other one a stream, and the kill comes when a third is answered. A
request has failed where nothing of an answer came, and is cut where it ended behind its first byte.

Run as root, with nginx installed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.system.routers import (
    REQUESTS,
    SESSIONS,
    Certificates,
    by_session,
    counted,
    free_port,
    load,
    names,
    nginx_router,
)
from tests.system.test_fleet import Hosts, two_hosts

ROOT = Path(__file__).resolve().parents[1]

AWAY_S = 3.0
"""Seconds for which a killed mock stays away, about as long as a gateway."""

RETURN_S = 60.0


@dataclass
class Mocks:
    """Two mocks behind a router; the first can be killed."""

    port: int
    folder: Path
    ports: tuple[int, int]
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, port: int) -> subprocess.Popen[bytes]:
        """Start the mock of a port."""
        return subprocess.Popen([sys.executable, "-m", "bench.fleet_mock", str(port), str(self.folder)], cwd=ROOT)

    def kill(self) -> None:
        """Kill the first, and have it back after a while."""
        self.running[0].kill()
        self.running[0].wait()
        threading.Timer(AWAY_S, self._back).start()

    def _back(self) -> None:
        self.running[0] = self.start(self.ports[0])


@contextlib.contextmanager
def mocks(certificates: Certificates) -> Iterator[Mocks]:
    """Two mocks, and nginx in front of them."""
    ports = free_port(), free_port()
    found = Mocks(free_port(), certificates.folder, ports)
    found.running = [found.start(port) for port in ports]
    try:
        with nginx_router(ROOT, certificates, [f"127.0.0.1:{port}" for port in ports], found.port):
            yield found
    finally:
        time.sleep(AWAY_S)  # A mock may be about to come back.
        for process in found.running:
            process.kill()
            process.wait()


def on_both(certificates: Certificates, port: int, key: str) -> None:
    """Wait until the router asks both hosts.

    Raises:
        TimeoutError: it does not.
    """
    until = time.monotonic() + RETURN_S
    while time.monotonic() < until:
        seen = load(certificates, port, key, names(SESSIONS))
        if len(set.union(*by_session(seen).values()) - {""}) == 2 and not counted(seen)["failed"]:
            return
        time.sleep(0.2)
    raise TimeoutError("the router does not ask both hosts: see whether both are up")


def kill_gateway(hosts: Hosts) -> None:
    """Kill the gateway of the first host."""
    os.kill(hosts.gateway(0), signal.SIGKILL)


def main() -> int:
    """Measure and print; 1 where a request of the appliances failed before its first byte."""
    parser = argparse.ArgumentParser(description="Requests that fail while one of two hosts behind nginx is killed.")
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    told: dict[str, Counter[str]] = {"appliances": Counter(), "mocks": Counter()}
    with tempfile.TemporaryDirectory(prefix="athanor-fleet-", dir="/tmp") as folder:
        certificates = Certificates.create(Path(folder))
        with two_hosts(ROOT, certificates) as hosts, mocks(certificates) as fakes:
            key = hosts.served[0].keys[0]
            arms = {"appliances": (hosts.port, lambda: kill_gateway(hosts)), "mocks": (fakes.port, fakes.kill)}
            for number in range(rounds):
                for arm, (port, blow) in arms.items():
                    on_both(certificates, port, key)
                    seen = load(certificates, port, key, names(REQUESTS), blow=blow)
                    told[arm] += counted(seen)
                    shown = ", ".join(f"{one} {counted(seen)[one]}" for one in ("whole", "cut", "failed"))
                    print(f"round {number + 1}, {arm:10s}: {shown}", flush=True)
    for arm, found in told.items():
        print(f"{arm}: {found['failed']} of {found.total()} failed before a first byte, {found['cut']} cut")
    print(f"load {os.getloadavg()[0]:.1f}")
    return 1 if told["appliances"]["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
