"""The recipes of ``deploy/fleet`` with this machine's ports and certificates, and clients that count what they get."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import ssl
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
from cryptography import x509

from appliance.gateway.front.affinity import HEADER
from tests.appliance.gateway.front.pki import Authority
from tests.observers import envoy, proxy

REQUESTS = 300
AT_ONCE = 12
TOKENS = 24
SESSIONS = 60
NAME = "athanor.internal"
"""Name of every host in its certificate, as the recipes have it."""

NGINX = """
daemon off;
user root;
worker_processes 1;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{}}
http {{
    access_log off;
    add_header x-host $upstream_addr always;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    {text}
}}
"""


def program(name: str) -> str:
    """The router's program; the test is skipped without it."""
    return envoy() if name == "envoy" else proxy(name)


def free_port() -> int:
    """A port on which nothing listens now."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


@dataclass(frozen=True)
class Certificates:
    """One authority's: of the hosts, which are also the router's, and of the operator."""

    folder: Path

    @classmethod
    def create(cls, folder: Path) -> Certificates:
        """Write them into the folder."""
        authority = Authority.create("fleet test")
        (folder / "ca.pem").write_bytes(authority.pem)
        for name in ("host", "operator"):
            key, certificate = authority.issue(x509.DNSName(NAME), x509.DNSName("localhost"))
            (folder / f"{name}.key").write_bytes(key)
            (folder / f"{name}.pem").write_bytes(certificate)
        (folder / "both.pem").write_bytes((folder / "host.pem").read_bytes() + (folder / "host.key").read_bytes())
        return cls(folder)

    def adapted(self, text: str, **others: str) -> str:
        """A recipe with these files in place of its own, and other texts in place of others."""
        for old, new in (
            (r"/etc/\w+/(site|host)\.pem", "host.pem"),
            (r"/etc/\w+/(site|host)\.key", "host.key"),
            (r"/etc/\w+/(athanor|operators)-ca\.pem", "ca.pem"),
        ):
            text = re.sub(old, str(self.folder / new), text)
        for old, new in others.items():
            assert old in text, old
            text = text.replace(old, new)
        return text

    def context(self) -> ssl.SSLContext:
        """For clients of the router."""
        return ssl.create_default_context(cafile=str(self.folder / "ca.pem"))


def recipe(root: Path, name: str) -> str:
    """A file of ``deploy/fleet``."""
    return (root / "deploy/fleet" / name).read_text()


@contextlib.contextmanager
def listening(line: list[str], port: int, log: Path) -> Iterator[None]:
    """Run a router; it has begun to listen on the port. ``log`` has what it says."""
    with log.open("ab") as out:
        process = subprocess.Popen(line, stdout=out, stderr=out)
    try:
        until = time.monotonic() + 20
        while time.monotonic() < until:
            assert process.poll() is None, log.read_text()
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.02)
        yield
    finally:
        process.terminate()
        process.wait(20)


@contextlib.contextmanager
def nginx(text: str, port: int) -> Iterator[None]:
    """Run nginx with these blocks inside its http block; it has begun to listen on the port."""
    with tempfile.TemporaryDirectory(prefix="athanor-nginx-") as name:
        folder = Path(name)
        (folder / "nginx.conf").write_text(NGINX.format(folder=folder, text=text))
        line = [program("nginx"), "-p", name, "-e", str(folder / "error.log"), "-c", str(folder / "nginx.conf")]
        with listening(line, port, folder / "error.log"):
            yield


@contextlib.contextmanager
def nginx_router(root: Path, certificates: Certificates, backends: list[str], port: int) -> Iterator[None]:
    """Run nginx with its recipe for these two HTTP backends; gRPC is left to names that nobody asks."""
    first, second = backends
    text = certificates.adapted(
        recipe(root, "nginx.conf"),
        **{"10.20.0.11:8080": first, "10.20.0.12:8080": second, "listen 443": f"listen {port}"},
    )
    with nginx(text, port):
        yield


ROUTE = "                  virtual_hosts:\n"
TELL_HOST = "response_headers_to_add: [{header: {key: x-host, value: '%UPSTREAM_REMOTE_ADDRESS%'}}]"
"""What has Envoy name the host of each answer, as ``add_header`` of ``NGINX`` does."""


@contextlib.contextmanager
def envoy_router(root: Path, certificates: Certificates, backends: list[str], port: int) -> Iterator[None]:
    """Run Envoy with its recipe for these two backends; it has begun to listen on the port."""
    own = {
        f"address: 10.20.0.1{number}, port_value: 8080": "address: {}, port_value: {}".format(*backend.split(":"))
        for number, backend in enumerate(backends, start=1)
    }
    indented = ROUTE.partition("virtual")[0] + TELL_HOST + "\n" + ROUTE
    text = certificates.adapted(
        recipe(root, "envoy.yaml"), **own, **{"port_value: 443": f"port_value: {port}", ROUTE: indented}
    )
    with tempfile.TemporaryDirectory(prefix="athanor-envoy-") as name:
        folder = Path(name)
        (folder / "envoy.yaml").write_text(text)
        options = ["--concurrency", "1", "--disable-hot-restart", "--log-level", "warning"]
        line = [program("envoy"), *options, "-c", str(folder / "envoy.yaml")]
        with listening(line, port, folder / "log"):
            yield


ROUTERS = {"nginx": nginx_router, "envoy": envoy_router}
"""Routers with their recipes, by the name of their program."""


@dataclass(frozen=True)
class Seen:
    """One answer."""

    session: str
    outcome: str
    """``whole``, ``cut`` behind its first byte, or ``failed`` before it."""
    host: str
    tag: str = ""
    why: str = ""
    request: str = ""
    """Id of the request on the host that answered; empty where nothing came."""


async def ask(client: httpx.AsyncClient, session: str, *, stream: bool) -> Seen:
    """One request of a session, by a name or a tag."""
    body = {"model": "athanor-mini", "prompt": "Count", "max_tokens": TOKENS, "ignore_eos": True, "stream": stream}
    got, host, tag, request = 0, "", "", ""
    try:
        async with client.stream("POST", "/v1/completions", json=body, headers={HEADER: session}) as answer:
            host, tag = answer.headers.get("x-host", ""), answer.headers.get(HEADER, "")
            request = answer.headers.get("x-request-id", "")
            if answer.status_code != 200:
                return Seen(session, "failed", host, tag, f"{answer.status_code} {await answer.aread()!r}")
            text = b""
            async for piece in answer.aiter_raw():
                got, text = got + len(piece), text + piece
        whole = not stream or text.endswith(b"data: [DONE]\n\n")
        return Seen(session, "whole" if whole else "cut", host, tag, request=request)
    except httpx.HTTPError as error:
        return Seen(session, "cut" if got else "failed", host, tag, repr(error), request)


def load(
    certificates: Certificates,
    port: int,
    key: str,
    sessions: list[str],
    *,
    blow: Callable[[], object] | None = None,
    streams: bool = True,
) -> list[Seen]:
    """Ask once for each session, some at a time and every other one for a stream; when a third is answered ``blow`` is
    called in a thread."""
    headers = {"authorization": f"Bearer {key}"}
    client = httpx.AsyncClient(
        base_url=f"https://localhost:{port}", verify=certificates.context(), timeout=60, headers=headers
    )
    return asyncio.run(_load(client, list(enumerate(sessions)), blow, streams=streams))


async def _load(
    client: httpx.AsyncClient, waiting: list[tuple[int, str]], blow: Callable[[], object] | None, *, streams: bool
) -> list[Seen]:
    seen, struck, third = list[Seen](), asyncio.Event(), len(waiting) // 3

    async def work() -> None:
        while waiting:
            number, session = waiting.pop(0)
            seen.append(await ask(client, session, stream=streams and number % 2 == 1))
            if blow is not None and len(seen) >= third and not struck.is_set():
                struck.set()
                await asyncio.to_thread(blow)

    async with client:
        await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    return seen


def counted(seen: list[Seen]) -> Counter[str]:
    """Answers by outcome."""
    return Counter(one.outcome for one in seen)


def names(number: int) -> list[str]:
    """Names of sessions for so many requests."""
    return [f"session-{one % SESSIONS}" for one in range(number)]


def by_session(seen: list[Seen]) -> dict[str, set[str]]:
    """Hosts that answered each session."""
    found: dict[str, set[str]] = {}
    for one in seen:
        found.setdefault(one.session, set()).add(one.host)
    return found
