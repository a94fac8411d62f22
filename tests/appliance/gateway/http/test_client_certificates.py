"""Client certificates over HTTP, and TLS files that change while both ports serve."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import openai
import pytest
from cryptography import x509

from appliance.common.listen_config import ClientCertificates
from appliance.gateway import servers
from appliance.gateway.front import listener
from appliance.gateway.grpc.generated import inference_pb2 as pb
from appliance.gateway.grpc.generated.inference_pb2_grpc import InferenceServiceStub
from appliance.gateway.http import protocol
from tests.appliance.gateway.front.pki import Authority, Pki
from tests.appliance.gateway.front.support import MODEL, SPIFFE_ID, Running, serving


@pytest.fixture
def own(tmp_path: Path) -> Pki:
    """An authority and files that a test may change."""
    return Pki.create(tmp_path)


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are looked at often."""
    monkeypatch.setattr(servers, "TICK_S", 0.05)


@contextlib.asynccontextmanager
async def asking(pki: Pki, http: ClientCertificates) -> AsyncIterator[Running]:
    """A served pair whose HTTP port asks for certificates so."""
    async with serving(pki.files.model_copy(update={"http_clients": http})) as running:
        yield running


@dataclass(frozen=True)
class Client:
    """What a client trusts and shows."""

    trust: Authority
    shown: tuple[bytes, bytes] | None = None

    def context(self, folder: Path) -> ssl.SSLContext:
        """For httpx."""
        found = ssl.create_default_context(cadata=self.trust.pem.decode())
        if self.shown is not None:
            key, chain = folder / "shown.key", folder / "shown.pem"
            key.write_bytes(self.shown[0])
            chain.write_bytes(self.shown[1])
            found.load_cert_chain(chain, key)
        return found


def identity(authority: Authority, *names: str) -> tuple[bytes, bytes]:
    """Key and certificate with these URIs."""
    return authority.issue(*(x509.UniformResourceIdentifier(name) for name in names))


def base(running: Running) -> str:
    """The address with TLS."""
    return running.base_url.replace("http:", "https:")


async def get(running: Running, context: ssl.SSLContext, path: str = "/v1/models", **headers: str) -> httpx.Response:
    """Ask once, on a connection of its own."""
    async with httpx.AsyncClient(base_url=base(running), verify=context) as client:
        return await client.get(path, headers=headers)


async def test_a_certificate_is_an_identity_over_http_too(own: Pki, tmp_path: Path) -> None:
    """Where certificates are optional, one with the SPIFFE id names the tenant, and a key does without one. Two that
    disagree, two ids in one and an unknown id are refused; one of another authority does not connect."""
    async with asking(own, "optional") as running:
        mine = Client(own.authority, identity(own.authority, SPIFFE_ID)).context(tmp_path)
        assert (await get(running, mine)).status_code == 200
        assert (await get(running, mine, **running.authorization)).status_code == 200
        stolen = {"authorization": f"Bearer {running.other_key}"}
        assert (await get(running, mine, **stolen)).status_code == 401
        bare = Client(own.authority).context(tmp_path)
        assert (await get(running, bare, **running.authorization)).status_code == 200
        assert (await get(running, bare)).status_code == 401
        for names in ((SPIFFE_ID, SPIFFE_ID), ("spiffe://athanor.test/tenant/unknown",), ("https://a/b",)):
            wrong = Client(own.authority, identity(own.authority, *names)).context(tmp_path)
            assert (await get(running, wrong)).status_code == 401, names
        stranger = Client(own.authority, identity(Authority.create("another"), SPIFFE_ID)).context(tmp_path)
        with pytest.raises((httpx.TransportError, ssl.SSLError)):
            await get(running, stranger)


async def test_a_key_alone_is_told_that_a_certificate_is_wanted(own: Pki, tmp_path: Path) -> None:
    """Where certificates are required, a caller without one is told so, the same with a good key, a bad one and none,
    on every path; health stays open to probes. With a certificate (control) it goes on."""
    async with asking(own, "required") as running:
        bare = Client(own.authority).context(tmp_path)
        answers = [
            await get(running, bare, "/v1/models", **running.authorization),
            await get(running, bare, "/v1/models", authorization="Bearer wrong"),
            await get(running, bare, "/v1/nothing"),
        ]
        assert [one.status_code for one in answers] == [401] * 3
        assert {one.json()["error"]["message"] for one in answers} == {answers[0].json()["error"]["message"]}
        assert "client certificate of the operator's authority" in answers[0].json()["error"]["message"]
        reasons = {getattr(error, "refusal", "") for _, error, _ in running.service.refusals}
        assert reasons == {"certificate_absent"}
        assert (await get(running, bare, "/health/live")).status_code == 200
        mine = Client(own.authority, identity(own.authority, SPIFFE_ID)).context(tmp_path)
        assert (await get(running, mine)).status_code == 200
        nameless = Client(own.authority, own.authority.issue()).context(tmp_path)
        assert (await get(running, nameless)).status_code == 401
        assert (await get(running, nameless, **running.authorization)).status_code == 200


async def test_the_official_client_with_a_certificate(own: Pki, tmp_path: Path) -> None:
    """openai-python needs an HTTP client that shows the certificate, and its authorization header left out."""
    async with asking(own, "required") as running:
        mine = Client(own.authority, identity(own.authority, SPIFFE_ID)).context(tmp_path)
        async with httpx.AsyncClient(verify=mine) as http:
            client = openai.AsyncOpenAI(base_url=base(running) + "/v1", api_key="unused", http_client=http)
            answer = await client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "hi"}],
                extra_headers={"Authorization": openai.Omit()},
            )
        assert answer.choices[0].message.content == "Hello"
        assert running.service.principals[-1].credential == SPIFFE_ID


async def listed(running: Running, trust: Authority, shown: tuple[bytes, bytes]) -> int:
    """Models over gRPC, by a client that trusts this authority."""
    credentials = grpc.ssl_channel_credentials(trust.pem, *shown)
    async with grpc.aio.secure_channel(running.target, credentials) as channel:
        answer = await InferenceServiceStub(channel).ListModels(pb.ListModelsRequest(), timeout=5)
        return len(answer.models)


async def until(check, what: str) -> None:
    """Wait until an awaitable check gives no error."""
    error: Exception | None = None
    for _ in range(100):
        try:
            await check()
            return
        except (httpx.TransportError, ssl.SSLError, grpc.aio.AioRpcError) as raised:
            error = raised
        await asyncio.sleep(0.05)
    raise AssertionError(f"{what}: {error!r}")


async def test_files_that_change_are_used_without_a_restart(own: Pki, tmp_path: Path) -> None:
    """Server certificate, key and authority of another house come into use on both ports; in between, a certificate
    without its key leaves the old pair in use."""
    async with asking(own, "required") as running:
        old = Client(own.authority, identity(own.authority, SPIFFE_ID))
        assert (await get(running, old.context(tmp_path))).status_code == 200
        assert await listed(running, own.authority, old.shown) == 2
        house = Authority.create("the next one")
        key, chain = house.issue(x509.IPAddress(ipaddress.ip_address("127.0.0.1")))
        own.files.certificate.write_bytes(chain)
        ends = running.front_ends._tls_files
        assert ends is not None
        while not ends.problem:
            await asyncio.sleep(0.02)
        assert "do not belong together" in ends.problem
        assert (await get(running, old.context(tmp_path))).status_code == 200
        own.files.key.write_bytes(key)
        mixed = Client(house, old.shown)
        await until(lambda: get(running, mixed.context(tmp_path)), "the new certificate over HTTP")
        await until(lambda: listed(running, house, old.shown), "the new certificate over gRPC")
        assert ends.problem == ""
        assert own.files.client_ca is not None
        own.files.client_ca.write_bytes(house.pem)
        new = Client(house, identity(house, SPIFFE_ID))
        await until(lambda: get(running, new.context(tmp_path)), "the new authority over HTTP")
        await until(lambda: listed(running, house, new.shown), "the new authority over gRPC")
        with pytest.raises((httpx.TransportError, ssl.SSLError)):
            await get(running, mixed.context(tmp_path))
        with pytest.raises(grpc.aio.AioRpcError):
            await listed(running, house, old.shown)


async def test_connections_of_an_authority_that_is_gone_end(own: Pki, tmp_path: Path) -> None:
    """One that is open when the authorities change takes no more requests, though its handshake was good; nor does the
    ticket of its session open another. One whose authorities stay (control) goes on."""
    async with asking(own, "required") as running:
        mine = Client(own.authority, identity(own.authority, SPIFFE_ID)).context(tmp_path)
        async with httpx.AsyncClient(base_url=base(running), verify=mine) as client:
            assert (await client.get("/v1/models")).status_code == 200
            own.files.certificate.write_bytes(own.files.certificate.read_bytes())
            await asyncio.sleep(0.3)
            connections = set(running.front_ends._opened["http", ""].connections)
            assert len(connections) == 1
            assert own.files.client_ca is not None
            own.files.client_ca.write_bytes(Authority.create("the next one").pem)
            while running.front_ends._opened["http", ""].connections:
                await asyncio.sleep(0.02)
            with pytest.raises((httpx.TransportError, ssl.SSLError)):
                await client.get("/v1/models")


async def test_a_connection_with_a_certificate_ends_after_an_hour(
    own: Pki, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A certificate is looked at in the handshake alone, so its connection has an age; one without a certificate
    (control) does not."""
    async with asking(own, "optional") as running:
        mine = Client(own.authority, identity(own.authority, SPIFFE_ID)).context(tmp_path)
        bare = Client(own.authority).context(tmp_path)
        async with (
            httpx.AsyncClient(base_url=base(running), verify=mine) as certified,
            httpx.AsyncClient(base_url=base(running), verify=bare, headers=running.authorization) as keyed,
        ):
            for client in (certified, keyed):
                assert (await client.get("/v1/models")).status_code == 200
            opened = running.front_ends._opened["http", ""].connections
            assert len(opened) == 2
            monkeypatch.setattr(protocol, "CERTIFIED_S", 0.0)
            monkeypatch.setattr(listener, "FAREWELL_S", 0.2)
            while len(opened) > 1:
                await asyncio.sleep(0.02)
            (left,) = opened
            assert not left.certified
            assert (await keyed.get("/v1/models")).status_code == 200
