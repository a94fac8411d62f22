"""The configurations of docs/proxies.md, run by the programs that they are for, where these are installed.

A client at 127.0.0.9 that forges every header talks to the program on 127.0.0.1, which talks to both front ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from appliance.gateway.front.client_address import PROXY_PROTOCOL, X_FORWARDED_FOR, TrustedProxies
from tests.appliance.gateway.front.pki import Pki
from tests.appliance.gateway.front.support import Running, serving
from tests.appliance.gateway.front.test_proxies import answered, clients_context, grpc_call, http_request, opened, told
from tests.observers import envoy, proxy

CLIENT, FORGED = "127.0.0.9", "203.0.113.9"
NGINX = """
daemon off;
user root;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    {text}
}}
"""


def examples(root: Path, language: str) -> list[str]:
    """The document's configurations for a program, by the words behind the fence."""
    return re.findall(rf"```{language}\n(.*?)```", (root / "docs/proxies.md").read_text(), re.DOTALL)


def free_port() -> int:
    """A port on which nothing listens now."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def adapted(text: str, running: Running, pki: Pki, folder: Path, ports: dict[str, int]) -> str:
    """The example with this test's ports and certificates in place of its own."""
    assert pki.files.certificate.exists() and pki.files.key.exists()
    together = folder / "site.pem"
    together.write_bytes(pki.files.certificate.read_bytes() + pki.files.key.read_bytes())
    own = {
        "127.0.0.1:8080": f"127.0.0.1:{running.front_ends.http_port}",
        "127.0.0.1:8081": f"127.0.0.1:{running.front_ends.grpc_port}",
        "127.0.0.1, port_value: 8080": f"127.0.0.1, port_value: {running.front_ends.http_port}",
        "127.0.0.1, port_value: 8081": f"127.0.0.1, port_value: {running.front_ends.grpc_port}",
        **{f"/etc/{name}/site.pem": str(pki.files.certificate) for name in ("nginx", "envoy")},
        **{f"/etc/{name}/site.key": str(pki.files.key) for name in ("nginx", "envoy")},
        "/etc/haproxy/site.pem": str(together),
        **{name: re.sub(r"\d+", str(port), name) for name, port in ports.items()},
    }
    for old, new in own.items():
        text = re.sub(rf"{re.escape(old)}\b", new, text)
    return text


@contextlib.asynccontextmanager
async def program(port: int, *command: str) -> AsyncIterator[None]:
    """Run a proxy inside the block; it has begun to listen on the port."""
    process = await asyncio.create_subprocess_exec(*command)
    try:
        async with asyncio.timeout(20):
            while True:
                assert process.returncode is None, "the program does not take its configuration"
                with contextlib.suppress(OSError):
                    (await asyncio.open_connection("127.0.0.1", port))[1].close()
                    break
                await asyncio.sleep(0.02)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def version_by_curl(pki: Pki, port: int) -> str:
    """The version of HTTP that curl and what listens there agree on, and the status: it offers HTTP/2."""
    told = ("--silent", "--show-error", "--output", "/dev/null", "--write-out", "%{http_version} %{http_code}")
    proofs = ("--http2", "--interface", CLIENT, "--cacert", str(pki.files.client_ca))
    curl = await asyncio.create_subprocess_exec(
        "curl", *told, *proofs, f"https://127.0.0.1:{port}/v1/models", stdout=asyncio.subprocess.PIPE
    )
    said, _ = await curl.communicate()
    return said.decode()


async def check(running: Running, pki: Pki, http: int, grpc: int, version: str = "2") -> None:
    """Both APIs through the program, over TLS: the traces name the client. A client that offers HTTP/2 for the OpenAI
    API gets this version: the program's, or HTTP/1.1 where TLS ends in the appliance, which is the control."""
    seen = len(running.service.refusals)
    assert await version_by_curl(pki, http) == f"{version} 401"
    assert (await told(running, seen + 1))[seen:] == [CLIENT]
    for port, start, protocol in (
        (http, http_request(running, f"x-forwarded-for: {FORGED}", f"forwarded: for={FORGED}"), "http/1.1"),
        (grpc, grpc_call(("x-forwarded-for", FORGED), ("forwarded", f"for={FORGED}")), "h2"),
    ):
        seen = len(running.service.refusals)
        reader, writer = await opened(port, address=CLIENT, tls=clients_context(pki, protocol))
        writer.write(start)
        assert await answered(reader)
        assert (await told(running, seen + 1))[seen:] == [CLIENT]
        writer.transport.abort()


async def test_nginx(root: Path, pki: Pki, tmp_path: Path) -> None:
    """Requests of both APIs on one port."""
    found = proxy("nginx")
    (text,), port = examples(root, "nginx"), free_port()
    async with serving(proxies=TrustedProxies.of(["127.0.0.1"], X_FORWARDED_FOR)) as running:
        path = tmp_path / "nginx.conf"
        text = adapted(text, running, pki, tmp_path, {"listen 443": port})
        path.write_text(NGINX.format(folder=tmp_path, text=text))
        async with program(port, found, "-p", str(tmp_path), "-e", str(tmp_path / "error.log"), "-c", str(path)):
            await check(running, pki, port, port)


@pytest.mark.parametrize("source", [X_FORWARDED_FOR, PROXY_PROTOCOL])
async def test_haproxy(root: Path, pki: Pki, tmp_path: Path, source: str) -> None:
    """Requests of both APIs on one port; connections, whose TLS ends in the appliance, on a port for each."""
    found = proxy("haproxy")
    requests, connections = examples(root, "haproxy")
    text, http, grpc = requests, free_port(), free_port()
    files = None
    if source == PROXY_PROTOCOL:
        text, files = connections, pki.files.model_copy(update={"client_ca": None})
    async with serving(files, proxies=TrustedProxies.of(["127.0.0.1"], source)) as running:
        path = tmp_path / "haproxy.cfg"
        path.write_text(adapted(text, running, pki, tmp_path, {"bind :443": http, "bind :8443": grpc}))
        async with program(http, found, "-db", "-f", str(path)):
            await check(running, pki, http, *((http, "2") if source == X_FORWARDED_FOR else (grpc, "1.1")))


@pytest.mark.parametrize("source", [X_FORWARDED_FOR, PROXY_PROTOCOL])
async def test_envoy(root: Path, pki: Pki, tmp_path: Path, source: str) -> None:
    """Requests of both APIs on one port; connections, whose TLS ends in the appliance, on a port for each."""
    found = envoy()
    requests, connections = examples(root, "yaml envoy")
    text, http, grpc = requests, free_port(), free_port()
    files = None
    if source == PROXY_PROTOCOL:
        text, files = connections, pki.files.model_copy(update={"client_ca": None})
    async with serving(files, proxies=TrustedProxies.of(["127.0.0.1"], source)) as running:
        path = tmp_path / "envoy.yaml"
        path.write_text(adapted(text, running, pki, tmp_path, {"port_value: 443": http, "port_value: 8443": grpc}))
        options = ("--concurrency", "1", "--disable-hot-restart", "--log-level", "error")
        async with program(http, found, *options, "-c", str(path)):
            await check(running, pki, http, *((http, "2") if source == X_FORWARDED_FOR else (grpc, "1.1")))
