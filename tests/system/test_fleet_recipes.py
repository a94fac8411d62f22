"""The recipes of ``deploy/fleet``, checked by the routers that they are for; and routers with their recipes in front of
two servers that only answer, the control of ``test_fleet``.
"""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.routers import (
    NGINX,
    REQUESTS,
    ROUTERS,
    Certificates,
    by_session,
    counted,
    free_port,
    load,
    names,
    program,
    recipe,
)


@pytest.fixture(scope="module")
def certificates() -> Iterator[Certificates]:
    """In a short folder."""
    with tempfile.TemporaryDirectory(prefix="athanor-fleet-") as folder:
        yield Certificates.create(Path(folder))


@contextlib.contextmanager
def answering(certificates: Certificates, ports: list[int]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Servers that only answer, one at each port."""
    line, root = [sys.executable, "-m", "bench.fleet_mock"], Path(__file__).resolve().parents[2]
    servers = [subprocess.Popen([*line, str(one), str(certificates.folder)], cwd=root) for one in ports]
    try:
        for one in ports:
            until = time.monotonic() + 20
            while time.monotonic() < until:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", one)):
                    break
                time.sleep(0.02)
        yield servers
    finally:
        for server in servers:
            server.kill()
            server.wait(20)


@pytest.mark.full
@pytest.mark.clock
@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_before_servers_that_only_answer(root: Path, certificates: Certificates, name: str) -> None:
    """The control: of 300 requests none fails when one of two such servers is killed. That is what the router can
    do."""
    program(name)
    ports, port = [free_port(), free_port()], free_port()
    addresses = [f"127.0.0.1:{one}" for one in ports]
    with answering(certificates, ports) as servers, ROUTERS[name](root, certificates, addresses, port):
        seen = load(certificates, port, "x", names(REQUESTS), blow=servers[0].kill, streams=False)
    print(f"fleet: {name} before servers that only answer: {dict(counted(seen))} of {REQUESTS}")
    assert counted(seen) == {"whole": REQUESTS}
    assert len(set.union(*by_session(seen).values())) >= 2


CHECKS = {
    "nginx.conf": ("nginx", ["-t", "-e", "stderr", "-p", "{folder}", "-c", "{file}"]),
    "admin.nginx.conf": ("nginx", ["-t", "-e", "stderr", "-p", "{folder}", "-c", "{file}"]),
    "haproxy.cfg": ("haproxy", ["-c", "-f", "{file}"]),
    "envoy.yaml": ("envoy", ["--mode", "validate", "-c", "{file}"]),
}


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("name", CHECKS)
def test_routers_take_the_recipes(
    root: Path, certificates: Certificates, tmp_path: Path, name: str, *, broken: bool
) -> None:
    """By each router's own check, where it is installed. Control: with a misspelt word it refuses."""
    (found, options), text = CHECKS[name], certificates.adapted(recipe(root, name))
    if name == "haproxy.cfg":
        text = text.replace(f"crt {certificates.folder / 'host.pem'}", f"crt {certificates.folder / 'both.pem'}")
    if broken:
        text = re.sub(r"\b(proxy_set_header Host|hash-type|lb_policy)\b", "hsah", text, count=1)
    if found == "nginx":
        text = NGINX.format(folder=tmp_path, text=text)
    path = tmp_path / name
    path.write_text(text)
    line = [program(found), *(one.format(folder=tmp_path, file=path) for one in options)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert (done.returncode != 0) is broken, done.stderr[-2_000:]
