"""Two appliances behind the real nginx and the real Envoy with the recipes of ``deploy/fleet``: sessions stay on one
host, a host that is killed or drained under load costs no request, and ``athanor fleet`` sees it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from appliance.selftest.processes import rooms
from bench.host import Served, null_appliance
from tests.system.audit_files import written
from tests.system.routers import (
    AT_ONCE,
    REQUESTS,
    ROUTERS,
    SESSIONS,
    TOKENS,
    Certificates,
    by_session,
    counted,
    free_port,
    load,
    names,
    nginx,
    program,
    recipe,
)

pytestmark = [pytest.mark.runsc, pytest.mark.full, pytest.mark.clock, pytest.mark.timeout(400)]

STEP_US = 2_000
"""Microseconds of a step: an answer takes a twentieth of a second."""

NOTICE_S = 2.0
"""``drain_notice_s`` of both hosts."""


@pytest.fixture(scope="module")
def certificates() -> Iterator[Certificates]:
    """In a short folder."""
    with tempfile.TemporaryDirectory(prefix="athanor-fleet-") as folder:
        yield Certificates.create(Path(folder))


@dataclass(frozen=True)
class Hosts:
    """Two appliances, and the router in front of them."""

    served: tuple[Served, Served]
    port: int

    def address(self, number: int) -> str:
        """Where the router asks one of them."""
        return str(self.served[number].ready["http"]).rpartition("//")[2]

    def gateway(self, number: int) -> int:
        """The process of one's gateway."""
        one = self.served[number]
        (found,) = (pid for pid, room in rooms(one.process.pid, one.sandboxes()).items() if room == "gateway")
        return found

    def charged(self) -> tuple[dict[str, int], dict[str, int]]:
        """Output tokens of the requests in either host's audit log that are charged anything, by id: one that a killed
        host had shown nothing of is in its log too, and not charged there. Entries are written together, so the logs
        are read until they stay as they are for a second."""
        before: tuple[dict[str, int], dict[str, int]] | None = None
        while True:
            one, other = (charged_in(served) for served in self.served)
            if (one, other) == before:
                return one, other
            before = one, other
            time.sleep(1.0)

    @staticmethod
    def insecure() -> ssl.SSLContext:
        """For clients that ask a host past the router, by its number, which its certificate does not name."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context

    def wait_ready(self, number: int) -> None:
        """Until one serves."""
        until = time.monotonic() + 60
        while time.monotonic() < until:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(self.served[number].ready["admin"] + "/health/ready", timeout=5).status_code == 200:
                    return
            time.sleep(0.1)
        raise AssertionError("the host did not come back")


def charged_in(served: Served) -> dict[str, int]:
    """Output tokens of the charged requests in one audit log, by id."""
    requests = [entry for entry in written(served.state / "audit") if entry["kind"] == "request"]
    return {entry["request"]: entry["output_tokens"] for entry in requests if entry["input_tokens"]}


@contextlib.contextmanager
def two_hosts(root: Path, certificates: Certificates, name: str = "nginx") -> Iterator[Hosts]:
    """Two hosts with one fleet key and the credentials of the first, and a router in front of them."""
    program(name)
    key = certificates.folder / "fleet.key"
    key.write_text("0123456789abcdef" * 4)
    tls = {"certificate": str(certificates.folder / "host.pem"), "key": str(certificates.folder / "host.key")}
    listen = {"tls": tls, "fleet_key": str(key), "drain_notice_s": NOTICE_S, "trusted_proxies": ["127.0.0.1"]}
    listen["fleet_hosts"] = str(certificates.folder / "fleet.yaml")
    port = free_port()
    first, second = ({**listen, "metrics": f"127.0.0.1:{free_port()}"} for _ in range(2))
    with (
        null_appliance(STEP_US, listen=first, audit=True) as one,
        null_appliance(STEP_US, listen=second, audit=True, like=one) as other,
    ):
        addresses = [str(served.ready["http"]).rpartition("//")[2] for served in (one, other)]
        with ROUTERS[name](root, certificates, addresses, port):
            yield Hosts((one, other), port)


@pytest.fixture(scope="module", params=ROUTERS)
def hosts(request: pytest.FixtureRequest, runsc_path: Path, root: Path, certificates: Certificates) -> Iterator[Hosts]:
    """Two hosts that all tests but that of a stop share: it needs its own. One router after the other."""
    with two_hosts(root, certificates, request.param) as found:
        yield found


def settled(certificates: Certificates, hosts: Hosts) -> dict[str, set[str]]:
    """Hosts of all sessions, asked twice each."""
    seen = load(certificates, hosts.port, hosts.served[0].keys[0], names(2 * SESSIONS))
    assert counted(seen) == {"whole": 2 * SESSIONS}, [one for one in seen if one.outcome != "whole"][:3]
    return by_session(seen)


def returned(certificates: Certificates, hosts: Hosts) -> None:
    """Until the router gives a host its sessions again: nginx tries it with one request once `fail_timeout` is over,
    Envoy looks at its health."""
    key, until = hosts.served[0].keys[0], time.monotonic() + 30
    while time.monotonic() < until:
        seen = load(certificates, hosts.port, key, names(SESSIONS))
        if len(set.union(*by_session(seen).values())) == 2:
            return
        time.sleep(0.2)
    raise AssertionError("the router does not ask the host")


def test_a_session_stays_on_one_host(hosts: Hosts, certificates: Certificates) -> None:
    """By its name, and by the tag that the first answer had, which every host gives alike; sessions are on both
    hosts. Control: without the header requests of one caller are on both."""
    found = settled(certificates, hosts)
    assert {len(where) for where in found.values()} == {1} and len(set.union(*found.values())) == 2
    key = hosts.served[0].keys[0]
    first = load(certificates, hosts.port, key, names(SESSIONS))
    tags = [one.tag for one in first]
    assert len(set(tags)) == SESSIONS
    again = load(certificates, hosts.port, key, tags * 3)
    assert all(one.tag == one.session for one in again) and {len(one) for one in by_session(again).values()} == {1}
    headers = {"authorization": f"Bearer {key}"}
    with httpx.Client(verify=certificates.context(), headers=headers) as client:
        spread = {client.get(f"https://localhost:{hosts.port}/v1/models").headers["x-host"] for _ in range(40)}
    assert len(spread) == 2


def test_killing_a_host_under_load_fails_no_request(hosts: Hosts, certificates: Certificates) -> None:
    """kill -9 of one gateway while 12 requests run: of 300, none fails before its first byte; what was being
    streamed is cut. Both hosts together charge each request once whose answer a client saw, and no others, but for
    answers that the killed host had charged and was about to send when it ended: the router had nothing of these, and
    gave the requests to the other host (docs/fleet.md). They are on the killed host alone, and no more than ran at
    once. Once the host is back, every session is on its host again."""
    before = settled(certificates, hosts)
    pid, known = hosts.gateway(0), hosts.charged()
    seen = load(
        certificates, hosts.port, hosts.served[0].keys[0], names(REQUESTS), blow=lambda: os.kill(pid, signal.SIGKILL)
    )
    hosts.wait_ready(0)
    told, answered = counted(seen), {one.request for one in seen}
    killed, other = (
        {request: tokens for request, tokens in now.items() if request not in earlier}
        for now, earlier in zip(hosts.charged(), known, strict=True)
    )
    unsent, tokens = killed.keys() - answered, [*killed.values(), *other.values()]
    print(
        f"fleet: kill -9 of one of two hosts: {dict(told)} of {REQUESTS}; {len(tokens)} requests, {sum(tokens)} tokens "
        f"charged, {len(unsent)} of them before they were sent"
    )
    assert told["failed"] == 0, [one for one in seen if one.outcome == "failed"][:5]
    assert told["cut"] <= AT_ONCE and sum(told.values()) == REQUESTS
    assert len(answered) == REQUESTS and "" not in answered
    assert not killed.keys() & other.keys() and killed.keys() | other.keys() == answered | unsent
    assert len(unsent) <= AT_ONCE and max(tokens) <= TOKENS
    returned(certificates, hosts)
    assert settled(certificates, hosts) == before


def test_a_drain_loses_nothing(hosts: Hosts, certificates: Certificates, root: Path) -> None:
    """``athanor fleet drain`` over TLS through the recipe of the admin routes, under load: all answers are whole,
    the host is seen to drain, also on the page of the other host's console, and after --resume its sessions come back.
    The two hosts do not differ."""
    before = settled(certificates, hosts)
    ports = [free_port(), free_port()]
    text = "".join(
        certificates.adapted(
            recipe(root, "admin.nginx.conf"),
            **{"listen 8443": f"listen {port}", "http://unix:/run/athanor/admin.sock:": served.ready["admin"]},
        )
        for port, served in zip(ports, hosts.served, strict=True)
    )
    listed = {
        "hosts": [{"name": f"h{one}", "admin": f"https://localhost:{port}"} for one, port in enumerate(ports)],
        "tls": {"ca": "ca.pem", "certificate": "operator.pem", "key": "operator.key"},
    }
    path = certificates.folder / "fleet.yaml"
    path.write_text(json.dumps(listed))

    def command(*words: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "appliance.operator.cli", "fleet", *words, "--hosts", str(path)]
        return subprocess.run(line, cwd=root, capture_output=True, text=True, timeout=120)

    with nginx(text, ports[1]):
        shown = command("status", "-o", "json")
        assert [one["state"] for one in json.loads(shown.stdout)] == ["serving", "serving"]
        assert command("diff").returncode == 5, "the models are pinned nowhere"
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"https://localhost:{ports[0]}/status", verify=certificates.context()).raise_for_status()
        done: list[subprocess.CompletedProcess[str]] = []
        key = hosts.served[0].keys[0]
        seen = load(
            certificates, hosts.port, key, names(3 * REQUESTS), blow=lambda: done.append(command("drain", "h0"))
        )
        print(f"fleet: drain of one of two hosts: {dict(counted(seen))} of {3 * REQUESTS}")
        assert counted(seen) == {"whole": 3 * REQUESTS}, [one for one in seen if one.outcome != "whole"][:5]
        assert done[0].returncode == 0, done[0].stderr
        states = json.loads(command("status", "-o", "json").stdout)
        assert [one["state"] for one in states] == ["draining", "serving"]
        page = httpx.get(hosts.served[1].ready["admin"] + "/console/fleet", timeout=30).json()
        assert [(one["name"], one["state"]) for one in page["hosts"]] == [("h0", "draining"), ("h1", "serving")]
        last = load(certificates, hosts.port, key, names(SESSIONS))
        assert {one.host.rpartition(", ")[2] for one in last} == {hosts.address(1)}
        assert command("drain", "h0", "--resume").returncode == 0
    returned(certificates, hosts)
    assert settled(certificates, hosts) == before


def test_a_picker_reads_each_host(hosts: Hosts) -> None:
    """The metrics listener of each has the gauges, for all models and for the one, and none for another."""
    for served in hosts.served:
        with httpx.Client(base_url=served.ready["metrics"]) as client:
            every, one = client.get("/metrics/picker"), client.get("/metrics/picker/athanor-mini")
            for answer in (every, one):
                assert re.search(r"^vllm:num_requests_waiting 0$", answer.text, re.MULTILINE)
                assert re.search(r"^vllm:cache_config_info\{block_size=\"\d+\"", answer.text, re.MULTILINE)
            assert (client.get("/metrics/picker/none")).status_code == 404


def test_a_stop_loses_nothing(runsc_path: Path, root: Path, certificates: Certificates) -> None:
    """SIGTERM to one of two hosts under load: its readiness is 503 while it still takes requests, for as long as its
    notice; then its listener closes, and it ends. All 600 answers are whole, streams included."""
    with two_hosts(root, certificates) as hosts:
        key, served = hosts.served[0].keys[0], hosts.served[0]
        url, looks = str(served.ready["http"]), list[tuple[float, int, int]]()

        def stop() -> None:
            served.process.send_signal(signal.SIGTERM)
            began, headers = time.monotonic(), {"authorization": f"Bearer {key}"}
            with contextlib.suppress(httpx.ConnectError):
                while True:
                    with httpx.Client(verify=hosts.insecure(), headers=headers, timeout=10) as client:
                        ready, taken = (client.get(url + path).status_code for path in ("/health/ready", "/v1/models"))
                    looks.append((time.monotonic() - began, ready, taken))
                    time.sleep(0.05)

        seen = load(certificates, hosts.port, key, names(2 * REQUESTS), blow=stop)
        print(f"fleet: stop of one of two hosts: {dict(counted(seen))} of {2 * REQUESTS}; last look {looks[-1]}")
        assert counted(seen) == {"whole": 2 * REQUESTS}, [one for one in seen if one.outcome != "whole"][:5]
        told = [one for one in looks if one[1] == 503]
        assert told and all(taken == 200 for _, _, taken in told)
        assert told[0][0] < NOTICE_S / 2 and told[-1][0] > NOTICE_S / 2
        assert served.process.wait(40) == 0
