"""Client certificates over gRPC, and TLS on both ports."""

from __future__ import annotations

import ssl

import grpc
import httpx
import pytest
from cryptography import x509

from appliance.common.errors import StartError
from appliance.common.listen_config import TlsConfig
from appliance.gateway.grpc.generated import inference_pb2 as pb
from appliance.gateway.grpc.generated.inference_pb2_grpc import InferenceServiceStub
from tests.appliance.gateway.front.pki import Authority, Pki
from tests.appliance.gateway.front.support import SPIFFE_ID, Running, serving


def _uri(text: str) -> x509.GeneralName:
    return x509.UniformResourceIdentifier(text)


async def _list(running: Running, pki: Pki, pair: tuple[bytes, bytes] | None, *metadata: tuple[str, str]) -> int:
    key, chain = pair or (None, None)
    credentials = grpc.ssl_channel_credentials(pki.authority.pem, key, chain)
    async with grpc.aio.secure_channel(running.target, credentials) as channel:
        stub = InferenceServiceStub(channel)
        answer = await stub.ListModels(pb.ListModelsRequest(), metadata=metadata, timeout=5)
        return len(answer.models)


async def _code(running: Running, pki: Pki, pair: tuple[bytes, bytes] | None, *metadata: tuple[str, str]) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await _list(running, pki, pair, *metadata)
    return caught.value.code().name


async def test_a_spiffe_certificate_is_an_identity(pki):
    """The one URI of a certificate of our authority names the tenant; other names beside it do not matter."""
    async with serving(pki.files) as running:
        assert await _list(running, pki, pki.authority.issue(_uri(SPIFFE_ID))) == 2
        assert await _list(running, pki, pki.authority.issue(x509.DNSName("a"), _uri(SPIFFE_ID))) == 2


async def test_certificates_that_are_no_identity_are_refused(pki):
    """Two URIs, an unknown one, one that is no SPIFFE id, or none: UNAUTHENTICATED."""
    async with serving(pki.files) as running:
        for names in (
            [_uri(SPIFFE_ID), _uri("spiffe://athanor.test/tenant/globex")],
            [_uri(SPIFFE_ID), _uri(SPIFFE_ID)],
            [_uri("spiffe://athanor.test/tenant/unknown")],
            [_uri("https://athanor.test/tenant/acme")],
            [x509.DNSName(SPIFFE_ID.removeprefix("spiffe://").replace("/", "."))],
            [],
        ):
            pair = pki.authority.issue(*names)
            assert await _code(running, pki, pair) == "UNAUTHENTICATED", names
        assert await _list(running, pki, pki.authority.issue(_uri(SPIFFE_ID))) == 2


async def test_certificates_of_others_do_not_connect(pki):
    """No certificate, or one of another authority: the handshake fails before any request."""
    other = Authority.create("someone else")
    async with serving(pki.files) as running:
        assert await _code(running, pki, None) == "UNAVAILABLE"
        assert await _code(running, pki, other.issue(_uri(SPIFFE_ID))) == "UNAVAILABLE"
        proof = ("authorization", f"Bearer {running.key}")
        assert await _code(running, pki, None, proof) == "UNAVAILABLE"
        assert await _list(running, pki, pki.authority.issue(_uri(SPIFFE_ID))) == 2


async def test_key_and_certificate_must_name_one_tenant(pki):
    """A key beside a certificate counts when both belong to the same tenant, and is refused otherwise."""
    async with serving(pki.files) as running:
        pair = pki.authority.issue(_uri(SPIFFE_ID))
        assert await _list(running, pki, pair, ("authorization", f"Bearer {running.key}")) == 2
        stolen = ("authorization", f"Bearer {running.other_key}")
        assert await _code(running, pki, pair, stolen) == "UNAUTHENTICATED"
        nameless = pki.authority.issue()
        assert await _list(running, pki, nameless, ("authorization", f"Bearer {running.key}")) == 2


async def test_tls_without_client_certificates(pki):
    """Without a client authority both ports speak TLS and take keys."""
    async with serving(pki.files.model_copy(update={"client_ca": None})) as running:
        proof = ("authorization", f"Bearer {running.key}")
        assert await _list(running, pki, None, proof) == 2
        trust = ssl.create_default_context(cadata=pki.authority.pem.decode())
        base = running.base_url.replace("http:", "https:")
        async with httpx.AsyncClient(base_url=base, verify=trust) as client:
            answer = await client.get("/v1/models", headers=running.authorization)
        assert answer.status_code == 200
        async with httpx.AsyncClient(base_url=running.base_url) as client:
            with pytest.raises(httpx.TransportError):
                await client.get("/health/live")


@pytest.mark.parametrize("broken", ["certificate", "key", "client_ca"])
async def test_unusable_tls_files_stop_the_start(pki, tmp_path, broken):
    """A missing or malformed file is a StartError, not a server without TLS."""
    for content in (None, b"not PEM"):
        path = tmp_path / "broken.pem"
        if content is not None:
            path.write_bytes(content)
        files: TlsConfig = pki.files.model_copy(update={broken: path})
        with pytest.raises(StartError):
            async with serving(files):
                pass
