"""Where ``bench/door.py`` measures: a network of its own, an appliance on a core of its own, and what it holds."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cryptography import x509

from appliance.operator.cli.bench_target import own_appliance
from appliance.selftest.processes import CpuClock, rooms
from bench.door_tenants import Work
from bench.process_times import seconds
from tests.appliance.gateway.front.pki import Authority

CORES = sorted(os.sched_getaffinity(0))
"""Those that this process had before it pinned itself."""

KV_BYTES = 64 << 20
SAMPLE_S = 0.1
"""Between two looks at the gateway."""

ATTACKERS_NETWORK = "fd00::/48"
"""Addresses of loopback in a network namespace of our own: 65,536 networks of /64."""

IN_NAMESPACE = "--in-namespace"
"""Option that the harness gives itself when it runs in its own network namespace."""


@dataclass(frozen=True, slots=True)
class Ground:
    """What an appliance listens on, and how."""

    name: str
    host: str
    tls: bool

    @property
    def family(self) -> int:
        """4 or 6."""
        return 6 if ":" in self.host else 4


GROUNDS = {
    ground.name: ground
    for ground in (
        Ground("plain4", "127.0.0.1", tls=False),
        Ground("tls4", "127.0.0.1", tls=True),
        Ground("plain6", "[::1]", tls=False),
        Ground("tls6", "[::1]", tls=True),
    )
}


@dataclass(frozen=True, slots=True)
class Door:
    """A running appliance."""

    http: str
    """HOST:PORT."""
    grpc: str
    launcher: int
    """Process that all others of the appliance descend from."""
    keys: tuple[str, ...]
    authority: str
    """File of the certificate that signs the listeners'; empty without TLS."""

    @property
    def work(self) -> Work:
        """What its tenants have to know."""
        place = urlsplit(f"//{self.http}")
        return Work((str(place.hostname), int(place.port or 0)), self.grpc, self.keys, self.authority)

    def gateway(self) -> int:
        """The gateway's process; 0 while there is none."""
        return next((pid for pid, room in rooms(self.launcher, {}).items() if room == "gateway"), 0)


def split_cores() -> tuple[set[int], set[int]]:
    """The appliance's core, and that of the attackers and the tenants' clients; the same where there is one only."""
    return {CORES[0]}, {CORES[1] if len(CORES) > 1 else CORES[0]}


@contextlib.contextmanager
def serving(ground: Ground) -> Iterator[Door]:
    """Serve the embedded model to two tenants for the time of the block, on the first core; this thread, and what it
    starts in the block, is pinned to the second one.

    Raises:
        ApplianceError: it cannot start.
        IsolationError: its process cannot be started.
    """
    ours, others = split_cores()
    with tempfile.TemporaryDirectory(prefix="athanor-door-") as folder:
        listen = {}
        files = _certificates(Path(folder)) if ground.tls else None

        def adjust(state: Path, config: dict[str, Any]) -> None:
            for role in ("http", "grpc"):
                listen[role] = config["listen"][role].replace("127.0.0.1", ground.host)
            config["listen"] |= listen
            if files is not None:
                config["listen"]["tls"] = {"certificate": str(files / "door.pem"), "key": str(files / "door.key")}

        authority = "" if files is None else str(files / "authority.pem")
        with _pinned(ours), own_appliance(None, KV_BYTES, "float32", adjust=adjust) as target, _pinned(others):
            yield Door(listen["http"], listen["grpc"], target.pid, target.api_keys, authority)


@contextlib.contextmanager
def _pinned(cores: set[int]) -> Iterator[None]:
    """Pin this thread, and what it starts, for the time of the block."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _certificates(folder: Path) -> Path:
    """A certificate for loopback and its authority, in files of this folder."""
    authority = Authority.create("door")
    names = [x509.IPAddress(ipaddress.ip_address(address)) for address in ("127.0.0.1", "::1")]
    key, certificate = authority.issue(*names, x509.DNSName("localhost"))
    for name, text in (("door.key", key), ("door.pem", certificate), ("authority.pem", authority.pem)):
        (folder / name).write_bytes(text)
    return folder


@dataclass(frozen=True, slots=True)
class Sample:
    """The gateway at one moment."""

    at: float
    pid: int
    memory: int
    """Resident bytes."""
    descriptors: int


class Others:
    """Processor time that other work took from the two cores: what times to first token cannot be told from."""

    def __init__(self, door: Door, client: int) -> None:
        """``client``: the process of the tenants' clients."""
        self._appliance = CpuClock(door.launcher, {})
        self._client = client
        self._cores = {f"cpu{number}" for core in split_cores() for number in core}

    def mark(self) -> tuple[float, float]:
        """The moment and the seconds that others have had until now, from which ``share`` counts."""
        return time.monotonic(), self._busy() - self._ours()

    def share(self, since: tuple[float, float], strangers: int = 0) -> float:
        """Share of the cores that others had since a mark; ``strangers``: a process that was started after it."""
        now, others = self.mark()
        if strangers:
            others -= seconds([strangers])
        return max(0.0, others - since[1]) / max(now - since[0], 1e-3) / len(self._cores)

    def _ours(self) -> float:
        return sum(self._appliance.read().values()) / 1e9 + seconds([self._client]) + time.process_time()

    def _busy(self) -> float:
        """Seconds of user, nice, system and steal (proc_stat(5)); interrupts are the network's, and that is ours."""
        found = 0
        for line in Path("/proc/stat").read_text().splitlines():
            name, *ticks = line.split()
            if name in self._cores:
                found += sum(int(ticks[at]) for at in (0, 1, 2, 7))
        return found / os.sysconf("SC_CLK_TCK")


class Watch:
    """Samples of the gateway, taken by a thread for the time of a block."""

    def __init__(self, door: Door) -> None:
        self.samples: list[Sample] = []
        self._door = door
        self._pid = door.gateway()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def between(self, begin: float, end: float) -> list[Sample]:
        """The samples of a time."""
        return [sample for sample in list(self.samples) if begin <= sample.at <= end]

    def _run(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            found = sample_of(self._pid)
            if found is None:
                self._pid = self._door.gateway()
            else:
                self.samples.append(found)


def sample_of(pid: int) -> Sample | None:
    """What a process holds now; None where there is no such process."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return None
    return Sample(time.monotonic(), pid, pages * os.sysconf("SC_PAGE_SIZE"), descriptors)


def enter_namespace(arguments: Sequence[str]) -> None:
    """Begin this program anew in a network namespace of its own, in which attackers have IPv6 addresses; return only
    where that is not allowed, or done already."""
    if IN_NAMESPACE in arguments or not can_have_namespace():
        return
    os.execvp("unshare", ["unshare", "--net", sys.executable, *sys.orig_argv[1:], IN_NAMESPACE])


def can_have_namespace() -> bool:
    """Whether this user may make a network namespace and give it addresses."""
    add = f"ip link set lo up && ip -6 route add local {ATTACKERS_NETWORK} dev lo"
    try:
        done = subprocess.run(["unshare", "--net", "sh", "-c", add], capture_output=True, check=False)
    except FileNotFoundError:
        return False
    return done.returncode == 0


def give_addresses() -> None:
    """Give the present network namespace its loopback and the attackers' addresses.

    Raises:
        CalledProcessError: that is not allowed.
    """
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    subprocess.run(["ip", "-6", "route", "add", "local", ATTACKERS_NETWORK, "dev", "lo"], check=True)
