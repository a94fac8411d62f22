"""Listeners of single tenants, at ports and Unix sockets: whose credentials they take, and who may connect."""

from __future__ import annotations

import asyncio
import ctypes
import grp
import json
import os
import re
import socket
import ssl
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import httpx
import pytest

from appliance.common.errors import StartError
from appliance.common.refused_credentials import CredentialRefusal
from appliance.gateway.front.own_listeners import SOCKET_MODE, OwnAddress, Stalls, bind_own
from appliance.gateway.grpc.connection import STRANGER
from appliance.gateway.grpc.generated import inference_pb2 as pb
from appliance.gateway.grpc.generated.inference_pb2_grpc import InferenceServiceStub
from tests.appliance.gateway.front.pki import Pki
from tests.appliance.gateway.front.support import MODEL, Running, serving

BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
GROUP = str(os.getgid())
CLONE_NEWUSER = 0x10000000
UNKNOWN = "ath_nobody_" + "0" * 64


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short name that its owner alone may write to."""
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


def own(folder: Path, *, local: bool) -> tuple[OwnAddress, ...]:
    """Addresses of acme's own, for both front ends."""
    where = {name: f"unix:{folder / name}.sock" if local else "127.0.0.1:0" for name in ("http", "grpc")}
    return tuple(OwnAddress("acme", name, where[name], GROUP if local else "") for name in ("http", "grpc"))


def client_of(address: str) -> httpx.AsyncClient:
    """A client of an address as the front ends tell it."""
    if address.startswith("unix:"):
        transport = httpx.AsyncHTTPTransport(uds=address.removeprefix("unix:"))
        return httpx.AsyncClient(base_url="http://athanor", transport=transport)
    return httpx.AsyncClient(base_url=address)


def whole(answer: httpx.Response) -> str:
    """Everything that a caller is told, but for what differs between any two answers."""
    rows = sorted((name, value) for name, value in answer.headers.items() if name not in VARYING)
    return re.sub(r"req_\w+", "req_", json.dumps([answer.status_code, rows, answer.text]))


VARYING = {"date", "x-request-id", "openai-processing-ms"}


async def http_answers(address: str, running: Running) -> tuple[httpx.Response, ...]:
    """The answers to acme's key, globex's, and one that nobody has."""
    found = []
    async with client_of(address) as client:
        for key in (running.key, running.other_key, UNKNOWN):
            headers = {"authorization": f"Bearer {key}"}
            found.append(await client.post("/v1/chat/completions", json=BODY, headers=headers))
    return tuple(found)


async def grpc_answers(address: str, running: Running) -> list[tuple[str, str]]:
    """Code and message for acme's key, globex's, and one that nobody has."""
    found = []
    async with grpc.aio.insecure_channel(address) as channel:
        for key in (running.key, running.other_key, UNKNOWN):
            call = InferenceServiceStub(channel).Generate(
                pb.GenerateRequest(model=MODEL, text="x"), metadata=(("authorization", f"Bearer {key}"),)
            )
            try:
                _ = [event async for event in call]
                found.append(("OK", ""))
            except grpc.aio.AioRpcError as error:
                found.append((error.code().name, re.sub(r"req_\w+", "req_", error.details())))
    return found


@pytest.mark.parametrize("local", [False, True])
async def test_a_listener_of_its_own_takes_its_tenant_alone(folder: Path, local: bool) -> None:
    """Over HTTP and gRPC, at a port and at a Unix socket, acme is served, and globex' valid key is answered as one that
    nobody has, byte for byte; the operator alone learns the difference. Control: the listener of all takes both. Each
    call has the name of its listener for the audit log, without the tenant's."""
    async with serving(own=own(folder, local=local)) as running:
        addresses = running.front_ends.own
        served, other, unknown = await http_answers(addresses["http-acme"], running)
        assert (served.status_code, other.status_code) == (200, 401), (served.text, other.text)
        assert whole(other) == whole(unknown)
        assert [one[1].refusal for one in running.service.refusals] == [
            CredentialRefusal.LISTENER,
            CredentialRefusal.KEY_UNKNOWN,
        ]
        assert {one[0].listener for one in running.service.refusals} == {"acme"}
        served, other, unknown = await grpc_answers(addresses["grpc-acme"], running)
        assert (served[0], other[0]) == ("OK", "UNAUTHENTICATED")
        assert other == unknown
        assert [one.status_code for one in await http_answers(running.base_url, running)] == [200, 200, 401]
        assert [code for code, _ in await grpc_answers(running.target, running)] == ["OK", "OK", "UNAUTHENTICATED"]
        end = "-unix" if local else ""
        listeners = [one.listener for one in running.service.principals]
        assert listeners == [f"own-http{end}", f"own-grpc{end}", "http", "http", "grpc", "grpc"]


async def test_calls_by_a_unix_socket_come_from_this_machine(folder: Path) -> None:
    """Policy and traces have an address for them, and the name of the listener; health answers without a key."""
    async with serving(own=own(folder, local=True)) as running:
        async with client_of(running.front_ends.own["http-acme"]) as client:
            assert (await client.get("/health")).status_code == 200
            await client.post("/v1/chat/completions", json=BODY, headers=running.authorization)
        context = running.service.contexts[-1]
        assert (context.listener, context.attributes["client.address"]) == ("acme", "127.0.0.1")


async def test_a_port_demands_certificates_and_a_socket_does_not(folder: Path, pki: Pki) -> None:
    """Where HTTP demands client certificates, the listener of a port refuses a key without one, and speaks TLS; a Unix
    socket has the permissions of its file in place of both."""
    tls = pki.files.model_copy(update={"http_clients": "required"})
    both = (own(folder, local=True)[0], OwnAddress("globex", "http", "127.0.0.1:0"))
    async with serving(tls, own=both) as running:
        async with client_of(running.front_ends.own["http-acme"]) as client:
            found = await client.post("/v1/chat/completions", json=BODY, headers=running.authorization)
        assert found.status_code == 200
        address = running.front_ends.own["http-globex"]
        assert address.startswith("https://")
        async with httpx.AsyncClient(
            base_url=address, verify=ssl.create_default_context(cadata=pki.authority.pem.decode())
        ) as client:
            headers = {"authorization": f"Bearer {running.other_key}"}
            found = await client.post("/v1/chat/completions", json=BODY, headers=headers)
        assert found.status_code == 401


async def test_strangers_at_one_listener_take_no_places_of_another(folder: Path) -> None:
    """A listener that is full of silent connections leaves the places of the others as they are."""
    async with serving(own=own(folder, local=True)) as running:
        places, address = running.front_ends.places, running.front_ends.own["http-acme"]
        held = []
        for _ in range(80):
            reader, writer = await asyncio.open_unix_connection(address.removeprefix("unix:"))
            held.append((reader, writer))
        while places["http", "acme"].evicted < 16:
            await asyncio.sleep(0.005)
        assert places["http", "acme"].strangers == 64
        assert (places["http", ""].held, places["grpc", "acme"].held) == (0, 0)
        for _, writer in held:
            writer.close()


def bind(address: OwnAddress) -> socket.socket:
    """Bind an address that nothing was kept for."""
    return bind_own(address, 8, lambda _name, _address, make: make())


def at(path: Path, group: str = GROUP) -> OwnAddress:
    """A Unix socket of acme's."""
    return OwnAddress("acme", "http", f"unix:{path}", group)


def test_the_file_belongs_to_the_group_and_nobody_else_connects(folder: Path) -> None:
    """The socket has mode 0660 and the configured group, by number and by name, whatever the umask is; a socket that an
    earlier start left is replaced."""
    path = folder / "a.sock"
    others = os.umask(0)
    try:
        for group in (GROUP, grp.getgrgid(os.getgid()).gr_name):
            with bind(at(path, group)) as bound:
                found = path.stat()
                assert (stat.S_IMODE(found.st_mode), found.st_gid) == (SOCKET_MODE, os.getgid())
                assert bound.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
    finally:
        os.umask(others)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be a user of another group")
@pytest.mark.parametrize("inside", [True, False])
def test_the_kernel_keeps_users_of_other_groups_out(folder: Path, inside: bool) -> None:
    """A process of another user connects with the socket's group, and not without it."""
    folder.chmod(0o755)
    with bind(at(folder / "a.sock", "4711")):
        child = os.fork()
        if not child:
            code = 1
            try:
                os.setgroups([4711] if inside else [])
                os.setgid(65533)
                os.setuid(65533)
                with socket.socket(socket.AF_UNIX) as asked:
                    asked.connect(str(folder / "a.sock"))
                code = 0
            except PermissionError:
                code = 13
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (0 if inside else 13)


def in_a_namespace_of_users(user: int, act: Callable[[], None]) -> int:
    """Act as a user and its group in a user namespace that has these and root alone, as the shipped unit's
    ``PrivateUsers=yes`` makes it; gives 0, or 1 where a socket was refused with the command that makes its folder."""
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        code = 2
        try:
            assert ctypes.CDLL(None).unshare(CLONE_NEWUSER) == 0
            os.write(ready[1], b"x")
            os.read(go[0], 1)
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
            os.umask(0o027)
            act()
            code = 0
        except StartError as error:
            code = 1 if "install -d -m 2750" in error.message else 3
        finally:
            os._exit(code)
    os.read(ready[0], 1)
    for name in ("uid_map", "gid_map"):
        Path(f"/proc/{child}/{name}").write_text(f"0 0 1\n{user} {user} 1\n")
    os.write(go[1], b"x")
    for end in (*ready, *go):
        os.close(end)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_a_socket_of_a_unit_with_private_users_belongs_to_its_folders_group(folder: Path) -> None:
    """In the user namespace of the shipped unit the group of a tenant is no group at all. A folder with the setgid bit
    gives the socket to it, and outside it has that group and mode 0660; in one without the bit the start is refused
    with the command that makes it."""
    user, group = 65532, 4711
    folder.chmod(0o755)
    for name, mode in (("set", 0o2750), ("plain", 0o750)):
        place = folder / name
        place.mkdir()
        os.chown(place, user, group)
        place.chmod(mode)
    made = folder / "set" / "a.sock"
    assert in_a_namespace_of_users(user, lambda: bind(at(made, str(group))).detach() and None) == 0
    found = made.stat()
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (user, group, SOCKET_MODE)
    assert in_a_namespace_of_users(user, lambda: bind(at(folder / "plain" / "a.sock", str(group))).close()) == 1


def test_what_is_wrong_is_told_at_the_start(folder: Path) -> None:
    """A folder that others may write to, a file that is no socket, a socket that is listened at, a group that is not
    there, and a port in use are start errors that name the tenant and the way out. Control: the folder as it was."""
    open_folder = folder / "open"
    open_folder.mkdir()
    open_folder.chmod(0o777)
    with pytest.raises(StartError, match="chmod go-w"):
        bind(at(open_folder / "a.sock"))
    (folder / "file").write_text("")
    with pytest.raises(StartError, match="of the tenant acme cannot listen on .*in use"):
        bind(at(folder / "file"))
    with pytest.raises(StartError, match="groupadd --system no-such-group"):
        bind(at(folder / "b.sock", "no-such-group"))
    with bind(at(folder / "a.sock")), pytest.raises(StartError, match="in use"):
        bind(at(folder / "a.sock"))
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(StartError, match="in use"):
        bind(OwnAddress("acme", "grpc", f"127.0.0.1:{taken.getsockname()[1]}"))
    open_folder.chmod(0o755)
    bind(at(open_folder / "a.sock")).close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(folder: Path) -> None:
    """It could put a socket of its own in the place of ours, whatever the folder's mode. Control: one of root's."""
    given = folder / "given"
    given.mkdir(0o755)
    os.chown(given, 65533, -1)
    with pytest.raises(StartError, match="acme cannot listen on .* belongs to another user"):
        bind(at(given / "a.sock"))
    assert not list(given.iterdir())
    os.chown(given, 0, -1)
    bind(at(given / "a.sock")).close()


async def test_strangers_at_one_listener_take_nothing_from_another(folder: Path) -> None:
    """What connections without a credential may send that serves nothing is counted for each listener by itself: what
    is used up at the listener of all is whole at the tenant's own."""
    async with serving(own=own(folder, local=False)) as running:
        shared = {
            key: listener._make.args[0].strangers.of("127.0.0.1")  # type: ignore[attr-defined]
            for key, listener in running.front_ends._listeners.items()
            if key[0] == "grpc"
        }
        now = time.monotonic()
        everyone, acme = shared["grpc", ""], shared["grpc", "acme"]
        assert everyone.spend(STRANGER.burst, now) and not everyone.spend(STRANGER.burst, now)
        assert acme.spend(STRANGER.burst, now)


async def test_a_peer_that_takes_nothing_is_ended_at_a_unix_socket() -> None:
    """A connection whose bytes do not become fewer for too long is closed; one that moves is not, and one that is over
    is forgotten."""
    loop = asyncio.get_running_loop()
    ours, peer = socket.socketpair()
    transport, _ = await loop.connect_accepted_socket(asyncio.Protocol, ours)
    transport.write(bytes(4 << 20))
    stalls = Stalls(30.0)
    stalls.watch(transport)
    stalls.look(100.0)
    stalls.look(129.0)
    assert not transport.is_closing()
    peer.setblocking(False)
    before = transport.get_write_buffer_size()
    while transport.get_write_buffer_size() == before:
        await asyncio.sleep(0)
        peer.recv(1 << 16)
    stalls.look(131.0)
    stalls.look(160.0)
    assert not transport.is_closing()
    stalls.look(162.0)
    assert transport.is_closing()
    stalls.look(163.0)
    assert not stalls._seen
    peer.close()
