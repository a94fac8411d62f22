"""The operator's API over TLS: every method by each role, by certificate and by token, and proofs that do not hold."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from google.rpc import error_details_pb2

from appliance.common import held_sockets
from appliance.common.config_loader import load_config
from appliance.common.operator_calls import OperatorCall
from appliance.common.operator_roles import NEEDED, OperatorRole
from appliance.gateway.front import issuer_keys, operator_door
from appliance.gateway.front.allowance import Rate
from appliance.gateway.front.operator_rate import OperatorRates
from appliance.operator.api import front as front_module
from appliance.operator.api import remote, shares
from appliance.operator.api.front import METHODS, REFLECTION, OperatorFront
from appliance.operator.api.records import Records
from tests.appliance.admin_server import FakeAppliance, serve_admin
from tests.appliance.gateway.front.operators import SPIFFE, Elsewhere, elsewhere
from tests.appliance.gateway.front.pki import Authority
from tests.appliance.gateway.grpc.grpc_client import detail_of
from tests.appliance.operator.api.place import Place, a_place

ADMIN, POLICY = "/athanor.admin.v1.AdminService/", "/athanor.policy.v1.PolicyService/"
Shown = tuple[bytes, bytes] | None


@pytest.fixture(scope="module")
def appliance() -> Iterator[FakeAppliance]:
    """An admin listener on loopback."""
    fake = FakeAppliance()
    with serve_admin(fake):
        yield fake


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are looked at often, and an unknown key is fetched at once."""
    monkeypatch.setattr(operator_door, "TICK_S", 0.05)
    monkeypatch.setattr(remote, "LOOK_S", 0.05)
    monkeypatch.setattr(issuer_keys, "UNKNOWN_S", 0.1)


@dataclass
class Listening:
    """The API over TLS."""

    address: str
    known: Elsewhere
    place: Place
    calls: list[OperatorCall]
    """What was told of calls that have ended."""

    @contextlib.asynccontextmanager
    async def channel(self, shown: Shown = None) -> AsyncIterator[grpc.aio.Channel]:
        """A connection of its own."""
        key, chain = shown or (None, None)
        credentials = grpc.ssl_channel_credentials(self.known.pki.authority.pem, key, chain)
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
        async with grpc.aio.secure_channel(self.address, credentials, options) as found:
            yield found

    async def code(self, method: str, shown: Shown = None, token: str = "") -> grpc.StatusCode:
        """How a call ends whose message is no protobuf, over a connection of its own."""
        async with self.channel(shown) as channel:
            return await code_of(channel, method, token)


async def code_of(channel: grpc.aio.Channel, method: str, token: str = "") -> grpc.StatusCode:
    """How a call ends whose message is no protobuf: it gets that far only with its role."""
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    try:
        await channel.unary_unary(method)(b"\xff", metadata=metadata, timeout=20)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def written(place: Place, known: Elsewhere, port: int, **changes: Any) -> None:
    """Write the section into the configuration."""
    values = json.loads(place.config.read_text())
    section = {**known.section.model_dump(mode="json"), "grpc": f"127.0.0.1:{port}", **changes}
    values["remote_operators"] = {name: value for name, value in section.items() if value is not None}
    place.config.write_text(json.dumps(values))


@contextlib.asynccontextmanager
async def listening(
    folder: Path, monkeypatch: pytest.MonkeyPatch, appliance: FakeAppliance
) -> AsyncIterator[Listening]:
    """Serve; the provider's keys are in force."""
    appliance.reset()
    calls: list[OperatorCall] = []
    tell = Records.end

    def told(records: Records, call: OperatorCall) -> None:
        calls.append(call)
        tell(records, call)

    monkeypatch.setattr(Records, "end", told)
    with a_place(appliance.url) as place, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        async with elsewhere(folder, grpc=f"127.0.0.1:{port}") as known:
            written(place, known, port)
            front, config = OperatorFront(place.config), load_config(place.config)
            async with remote.serving_remote(front, config, place.config) as address:
                found = Listening(address, known, place, calls)
                async with asyncio.timeout(10):
                    while await found.code(f"{ADMIN}GetServerInfo", token=known.token("viewer")) is UNAUTHENTICATED:
                        await asyncio.sleep(0.05)
                calls.clear()
                yield found
            await front.end(5)


UNAUTHENTICATED, DENIED = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED


async def test_each_role_reaches_its_methods_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, appliance: FakeAppliance
) -> None:
    """By certificate and by token, every method of the table: with the role, or one that may read, a call gets as far
    as its message; without it the status names the role needed."""
    async with listening(tmp_path, monkeypatch, appliance) as found:
        for role in OperatorRole:
            proofs: tuple[tuple[Shown, str], ...] = ((found.known.of_role(role), ""), (None, found.known.token(role)))
            for shown, token in proofs:
                async with found.channel(shown) as channel:
                    for method in METHODS:
                        wanted = NEEDED[method] in (role, OperatorRole.VIEWER)
                        code = grpc.StatusCode.INVALID_ARGUMENT if wanted else DENIED
                        assert await code_of(channel, method, token) is code, (role, method)
                    assert await code_of(channel, "/a.B/C", token) is grpc.StatusCode.UNIMPLEMENTED
        async with found.channel(found.known.of_role("operator")) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(f"{POLICY}Apply")(b"")
        info = detail_of(caught.value, error_details_pb2.ErrorInfo)
        assert (info.reason, info.metadata["role"]) == ("ROLE_NEEDED", "security")
        assert "remote_operators" in (caught.value.details() or "")


async def test_proofs_that_do_not_hold_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, appliance: FakeAppliance
) -> None:
    """None, a token of another issuer, audience or key, one that has ended, one without an algorithm, a certificate
    with two ids: UNAUTHENTICATED for any method, and the record has the reason. Who is known and has no role is denied,
    and a certificate of another authority opens no connection."""
    uri = x509.UniformResourceIdentifier
    async with listening(tmp_path, monkeypatch, appliance) as found:
        known = found.known
        known.provider.add("next")
        head, body, _ = known.token("viewer").split(".")
        tokens = {
            "absent": "",
            "jwt_issuer": known.token("viewer", iss="https://other.example/"),
            "jwt_audience": known.token("viewer", aud="another"),
            "jwt_expired": known.token("viewer", exp=1_000_000_000),
            "jwt_key": known.token("viewer", kid="next"),
            "jwt_signature": f"{head}.{body}.{known.token('viewer', kid='next').split('.')[2]}",
            "jwt_malformed": f"{head}.{body}.",
        }
        for token in tokens.values():
            assert await found.code(f"{ADMIN}GetServerInfo", token=token) is UNAUTHENTICATED
        two = known.shown(uri(f"{SPIFFE}viewer"), uri(f"{SPIFFE}operator"))
        assert await found.code("/a.B/C", two) is UNAUTHENTICATED
        assert [one.reason for one in found.calls] == [*tokens, "certificate"]
        assert {(one.caller, one.roles, one.outcome) for one in found.calls} == {("", "", "UNAUTHENTICATED")}
        assert await found.code(f"{ADMIN}GetServerInfo", known.shown(uri(f"{SPIFFE}visitor"))) is DENIED
        stranger = known.shown(uri(f"{SPIFFE}viewer"), authority=Authority.create("another"))
        assert await found.code(f"{ADMIN}GetServerInfo", stranger) is grpc.StatusCode.UNAVAILABLE
        known.address.publish(known.provider.published())
        async with asyncio.timeout(10):
            while await found.code(f"{ADMIN}GetServerInfo", token=tokens["jwt_key"]) is UNAUTHENTICATED:
                await asyncio.sleep(0.1)


async def test_one_caller_takes_no_place_from_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, appliance: FakeAppliance
) -> None:
    """A viewer holds calls that send no message, and streams of reflection, as many as it may: its next call is refused
    (control). Another operator is served at once, and so is the viewer when they have ended."""
    async with listening(tmp_path, monkeypatch, appliance) as found:
        viewer, method = found.known.of_role("viewer"), f"{ADMIN}GetServerInfo"
        async with found.channel(viewer) as channel:

            async def silent() -> AsyncIterator[bytes]:
                await asyncio.Event().wait()
                yield b""

            held: list[Any] = [channel.stream_unary(method)(silent()) for _ in range(shares.MAX_READERS)]
            held += [channel.stream_stream(f"/{REFLECTION[0]}/ServerReflectionInfo")(silent()) for _ in range(70)]
            async with asyncio.timeout(10):
                while await code_of(channel, method) is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                    await asyncio.sleep(0.05)
            async with asyncio.timeout(5):
                code = await found.code(f"{POLICY}Apply", found.known.of_role("security"))
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            for one in held:
                one.cancel()
            async with asyncio.timeout(10):
                while await code_of(channel, method) is not grpc.StatusCode.INVALID_ARGUMENT:
                    await asyncio.sleep(0.05)


async def test_a_viewer_that_calls_without_pause_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, appliance: FakeAppliance
) -> None:
    """Calls beyond the burst end with RESOURCE_EXHAUSTED and are not told to the supervisor. Another operator, and a
    change of this one's rate for changes (controls), are taken meanwhile."""
    monkeypatch.setattr(front_module, "OperatorRates", lambda: OperatorRates(Rate(4, 0.001)))
    async with listening(tmp_path, monkeypatch, appliance) as found:
        method = f"{ADMIN}GetServerInfo"
        async with found.channel(found.known.of_role("operator")) as channel:
            codes = [await code_of(channel, method) for _ in range(7)]
            assert codes == [grpc.StatusCode.INVALID_ARGUMENT] * 4 + [grpc.StatusCode.RESOURCE_EXHAUSTED] * 3
            assert await code_of(channel, f"{ADMIN}Drain") is grpc.StatusCode.INVALID_ARGUMENT
        assert len(found.calls) == 5
        assert await found.code(method, found.known.of_role("security")) is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_record_names_who_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, appliance: FakeAppliance
) -> None:
    """The certificate's id, or issuer and subject of the token; and what they did was done."""
    async with listening(tmp_path, monkeypatch, appliance) as found:
        async with found.channel(found.known.of_role("operator")) as channel:
            await channel.unary_unary(f"{ADMIN}Drain")(b"")
        assert appliance.draining
        assert await found.code(f"{ADMIN}Resume", token=found.known.token("security", sub="bob")) is DENIED
        told = [(one.user, one.caller, one.roles, one.outcome) for one in found.calls]
    certified = (65_534, f"{SPIFFE}operator", "operator,viewer", "OK")
    assert told == [certified, (65_534, "oidc:corp:bob", "security,viewer", "PERMISSION_DENIED")]


async def test_what_is_taken_back_holds_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, appliance: FakeAppliance
) -> None:
    """Within a look at the files: a role that the configuration lists no more, while a file with a mistake changes
    nothing; the roles of an issuer that is another one now, and not those of certificates (control); then an authority,
    also for the connection that was open. The next authority's certificate (control) is served."""
    async with listening(tmp_path, monkeypatch, appliance) as found:
        known, shown, method = found.known, found.known.of_role("security"), f"{POLICY}Apply"
        port = int(found.address.rpartition(":")[2])
        async with found.channel(shown) as channel:
            assert await code_of(channel, method) is grpc.StatusCode.INVALID_ARGUMENT
            text = found.place.config.read_text()
            found.place.config.write_text("{")
            await asyncio.sleep(0.3)
            assert await code_of(channel, method) is grpc.StatusCode.INVALID_ARGUMENT
            found.place.config.write_text(text)
            written(found.place, known, port, security=["oidc:corp:ops-security"])
            async with asyncio.timeout(10):
                while await code_of(channel, method) is not DENIED:
                    await asyncio.sleep(0.05)
            written(found.place, known, port)
            async with asyncio.timeout(10):
                while await code_of(channel, method) is DENIED:
                    await asyncio.sleep(0.05)
            token = known.token("security")
            assert await found.code(method, token=token) is grpc.StatusCode.INVALID_ARGUMENT
            issuer = {**known.section.tokens[0].model_dump(mode="json"), "issuer": "https://next.example/"}
            written(found.place, known, port, tokens=[issuer])
            async with asyncio.timeout(10):
                while await found.code(method, token=token) is not DENIED:
                    await asyncio.sleep(0.05)
            assert await code_of(channel, method) is grpc.StatusCode.INVALID_ARGUMENT
            other = Authority.create("the next authority")
            known.trust(other)
            await asyncio.sleep(0.4)
            assert await code_of(channel, method) is grpc.StatusCode.UNAVAILABLE
        theirs = known.shown(x509.UniformResourceIdentifier(f"{SPIFFE}security"), authority=other)
        assert await found.code(method, theirs) is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_socket_of_the_service_manager_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, appliance: FakeAppliance
) -> None:
    """One with the right name and address is listened on, and none is made: the process needs no network of its own.
    One of another address (control) is not, and the process makes its own."""
    appliance.reset()
    made: list[str] = []

    def bind_port(address: str, name: str) -> socket.socket:
        made.append(address)
        return operator_door.bind_port(address, name)

    monkeypatch.setattr(remote, "bind_port", bind_port)
    with a_place(appliance.url) as place:
        async with elsewhere(tmp_path, grpc="127.0.0.1:0") as known:
            given = socket.create_server(("127.0.0.1", 0))
            port = given.getsockname()[1]
            monkeypatch.setattr(held_sockets.notify, "held", lambda: {remote.HELD: given.detach()})
            written(place, known, port)
            front, config = OperatorFront(place.config), load_config(place.config)
            async with remote.serving_remote(front, config, place.config) as at:
                assert at == f"127.0.0.1:{port}" and not made
                found = Listening(at, known, place, [])
                assert await found.code(f"{POLICY}Check", known.of_role("viewer")) is grpc.StatusCode.INVALID_ARGUMENT
            other = socket.create_server(("127.0.0.1", 0))
            monkeypatch.setattr(held_sockets.notify, "held", lambda: {remote.HELD: other.detach()})
            async with remote.serving_remote(front, config, place.config):
                assert made == [f"127.0.0.1:{port}"]
