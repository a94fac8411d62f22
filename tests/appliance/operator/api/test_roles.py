"""Who may call what: by the kernel's word, over the real socket, for every method that the server lists itself."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.rpc import error_details_pb2
from grpc_reflection.v1alpha import reflection_pb2 as reflection
from grpc_reflection.v1alpha import reflection_pb2_grpc

from appliance.common.account_roles import OVERFLOW, Caller, Roles, caller_of
from appliance.common.errors import ConfigError
from appliance.common.operator_config import OperatorApiConfig
from appliance.common.operator_roles import EVERY, NEEDED, OperatorRole
from appliance.operator.api import server
from appliance.operator.api.front import METHODS
from isolation.host.process import run
from tests.appliance.admin_server import FakeAppliance, serve_admin
from tests.appliance.gateway.grpc.grpc_client import detail_of
from tests.appliance.operator.api.place import Place, a_place, calling

STRANGER = 54_321
"""User id of no account of this machine."""


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    """A configuration, and an admin listener that answers."""
    with serve_admin(FakeAppliance()) as url, a_place(url) as found:
        yield found


def only(*roles: OperatorRole) -> Roles:
    """Roles by which this process has these, and is no owner."""
    return Roles(frozenset(), frozenset((role, os.geteuid()) for role in roles))


async def listed(channel: grpc.aio.Channel) -> list[str]:
    """Every method that the server's reflection lists, in the order of its files."""
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)

    async def asks() -> AsyncIterator[reflection.ServerReflectionRequest]:
        yield reflection.ServerReflectionRequest(list_services="")
        for name in ("athanor.admin.v1.AdminService", "athanor.policy.v1.PolicyService"):
            yield reflection.ServerReflectionRequest(file_containing_symbol=name)

    found: list[str] = []
    services: set[str] = set()
    async for answer in stub.ServerReflectionInfo(asks()):
        services |= {one.name for one in answer.list_services_response.service}
        for text in answer.file_descriptor_response.file_descriptor_proto:
            file = FileDescriptorProto.FromString(text)
            for service in file.service:
                found += [f"/{file.package}.{service.name}/{method.name}" for method in service.method]
    assert {name.split("/")[1] for name in found} == {name for name in services if name.startswith("athanor.")}
    return found


async def code_of(channel: grpc.aio.Channel, method: str, message: bytes = b"\xff") -> grpc.StatusCode:
    """How a call ends whose message is no protobuf: it gets that far only with its role."""
    try:
        await channel.unary_unary(method)(message)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def test_every_listed_method_is_refused_without_its_role(place: Place) -> None:
    """With each role alone, the methods that the server lists are refused but for those of the role and of viewers;
    with the role they get as far as their message (control)."""
    async with calling(place) as client:
        methods = await listed(client.channel)
    assert sorted(methods) == sorted(METHODS)
    for role in OperatorRole:
        async with calling(place, only(role)) as client:
            for method in methods:
                allowed = NEEDED[method] in (role, OperatorRole.VIEWER)
                wanted = grpc.StatusCode.INVALID_ARGUMENT if allowed else grpc.StatusCode.PERMISSION_DENIED
                assert await code_of(client.channel, method) is wanted, (role, method)
            assert await code_of(client.channel, "/athanor.admin.v1.AdminService/None") is grpc.StatusCode.UNIMPLEMENTED


async def test_a_caller_without_a_role_is_told_nothing_but_that(place: Place) -> None:
    """No method, no unknown one and no reflection: PERMISSION_DENIED with the reason, and after some calls the number
    of them is refused too."""
    async with calling(place, only()) as client:
        for method in list(METHODS)[:18]:
            assert await code_of(client.channel, method) is grpc.StatusCode.PERMISSION_DENIED
        assert await code_of(client.channel, "/a.B/C") is grpc.StatusCode.PERMISSION_DENIED
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.channel.unary_unary("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")(b"")
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        info = detail_of(caught.value, error_details_pb2.ErrorInfo)
        assert (info.reason, info.metadata["role"]) == ("ROLE_NEEDED", "viewer")
        codes = [await code_of(client.channel, "/a.B/C") for _ in range(5)]
    assert codes[-1] is grpc.StatusCode.RESOURCE_EXHAUSTED


CALL = """
import os, sys
import copy, grpc, grpc._channel  # before the interpreter's own files are out of reach
os.setgroups([{group}]); os.setgid({user}); os.setuid({user})
with grpc.insecure_channel("unix:" + sys.argv[1]) as channel:
    for method in sys.argv[2:]:
        try:
            channel.unary_unary(method)(b"\\xff", timeout=20)
        except grpc.RpcError as error:
            print(error.code().name)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's process can be started by root alone")
async def test_the_kernels_word_decides_for_a_process_of_another_user(place: Place) -> None:
    """A real process of another user, in a group with the role of viewers: it may read, and nothing else; without the
    group it may not read (control)."""
    for folder in (place.folder, place.folder.parent):
        folder.chmod(0o711)
    roles = Roles(frozenset({0}), groups=frozenset({(OperatorRole.VIEWER, 4_242)}))
    paths = ["/athanor.policy.v1.PolicyService/Check", "/athanor.policy.v1.PolicyService/Apply"]
    async with calling(place, roles):
        said = []
        for group in (4_242, 4_243):
            words = [sys.executable, "-c", CALL.format(user=STRANGER, group=group), str(place.socket), *paths]
            said.append((await asyncio.to_thread(run, words, timeout_s=60)).stdout.split())
    assert said == [["INVALID_ARGUMENT", "PERMISSION_DENIED"], ["PERMISSION_DENIED", "PERMISSION_DENIED"]]


async def test_connections_of_callers_without_a_role_are_few(place: Place) -> None:
    """One more than they may have is closed; the owner's own, beside them, is served (control)."""
    async with calling(place, only()):
        held = [socket.socket(socket.AF_UNIX) for _ in range(server.MAX_ROLELESS + 1)]
        try:
            for one in held:
                one.settimeout(5)
                one.connect(str(place.socket))
            first, last = [await asyncio.to_thread(_received, one) for one in (held[0], held[-1])]
        finally:
            for one in held:
                one.close()
    assert first and not last
    async with calling(place) as client:
        assert await code_of(client.channel, "/athanor.admin.v1.AdminService/Drain") is grpc.StatusCode.INVALID_ARGUMENT


def _received(one: socket.socket) -> bytes:
    """What the other end says first; nothing where it has closed."""
    try:
        return one.recv(64)
    except ConnectionResetError:
        return b""


def test_roles_follow_users_and_groups_by_name_and_number() -> None:
    """Names and numbers give what they are listed for, owners everything, others nothing; an id that this namespace
    does not know is nobody's, whatever is listed."""
    config = OperatorApiConfig(viewers=("@users", "7"), operators=("daemon",), security=("@65534", "65534"))
    roles = Roles.of(config)
    assert roles.of_caller(Caller(0, frozenset())) == roles.of_caller(Caller(os.geteuid(), frozenset())) == EVERY
    assert roles.of_caller(Caller(7, frozenset({7}))) == {OperatorRole.VIEWER}
    assert roles.of_caller(Caller(1, frozenset())) == {OperatorRole.VIEWER, OperatorRole.OPERATOR}
    assert roles.of_caller(Caller(9, frozenset({100}))) == {OperatorRole.VIEWER}
    assert roles.of_caller(Caller(OVERFLOW, frozenset({OVERFLOW}))) == roles.of_caller(Caller(9, frozenset())) == set()


@pytest.mark.parametrize("name", ["no-such-user", "@no-such-group"])
def test_an_account_that_is_not_there_is_told_at_the_start(name: str) -> None:
    """By its name, as an error of the configuration."""
    with pytest.raises(ConfigError, match=name.removeprefix("@")):
        Roles.of(OperatorApiConfig(viewers=(name,)))


def test_the_kernel_tells_user_and_groups() -> None:
    """Of a socket pair of this process: its own."""
    here, there = socket.socketpair()
    with here, there:
        assert caller_of(here) == Caller(os.geteuid(), frozenset({os.getegid(), *os.getgroups()}))


def test_the_socket_is_open_to_others_only_where_they_have_roles(tmp_path: Path) -> None:
    """Mode 0600 by default, 0666 where somebody else has a role."""
    for roles, mode in ((Roles(frozenset()), 0o600), (only(OperatorRole.VIEWER), 0o666)):
        path = Path(os.path.relpath(tmp_path / f"{mode}.sock"))
        bound = server.bind(path, roles)
        bound.close()
        assert path.stat().st_mode & 0o777 == mode
