"""The gateway's end of the control socket against a scripted supervisor, over a real socket and real descriptors."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from array import array
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from appliance.common import control
from appliance.common.audit.entry import from_wire
from appliance.common.control import (
    COLD,
    FALLEN_BACK,
    RESTORED,
    Attach,
    Audited,
    Control,
    Fault,
    HandedOver,
    NamespaceQuery,
    Namespaces,
    SandboxDown,
    SandboxUp,
    SandboxUse,
    Welcome,
)
from appliance.common.control_cards import GPU_LOST, EngineEnds
from appliance.common.errors import GpuLostError
from appliance.common.residency import ResidentLimits
from appliance.gateway.request.audit_feed import AuditFeed
from appliance.gateway.sandboxes import attached as sandboxes_module
from appliance.gateway.sandboxes import supervisor_link
from appliance.gateway.sandboxes.attached import Sandboxes
from appliance.gateway.sandboxes.engine_link import EngineLink
from appliance.gateway.sandboxes.model_sandboxes import MAX_UNCOUNTED, ModelSandboxes
from appliance.gateway.sandboxes.namespace_keys import NamespaceKeys
from appliance.gateway.sandboxes.spare_descriptors import NUM_SPARE
from appliance.gateway.sandboxes.supervisor_link import SupervisorLink
from appliance.gateway.sandboxes.tenant_sandboxes import TenantSandboxes
from isolation.ipc import segment
from isolation.ipc.engine import Submit
from isolation.ipc.messages import MAX_TOKENS_PER_REQUEST, Role
from isolation.ipc.sampling import Sampling
from isolation.ipc.text import ReadVocabulary
from tests.appliance.gateway.pairs import ENGINE_READY, TEXT_READY, Pair, make_pair

DIGEST = "ab" * 32
LIMITS = ResidentLimits(engines=1, texts=3, memory_bytes=1 << 40, engine_bytes=1)
"""Room for sandboxes of single tenants."""


class Scripted:
    """A supervisor under the test's control."""

    def __init__(self, path: Path) -> None:
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(str(path))
        self.listener.listen()
        self.listener.setblocking(False)
        self.peer: socket.socket | None = None
        self.pairs: list[Pair] = []
        self.taken: list[HandedOver] = []
        """What the gateway has said of hand-overs."""

    async def attach(self) -> None:
        """Take the gateway in."""
        async with asyncio.timeout(20):
            self.peer, _ = await asyncio.get_running_loop().sock_accept(self.listener)
        self.peer.setblocking(False)
        assert isinstance(await self.hear(), Attach)

    async def hear(self) -> Control:
        """The gateway's next word; what it says of hand-overs is kept for ``answer``."""
        while isinstance(message := await self._next(), HandedOver):
            self.taken.append(message)
        return message

    async def answer(self) -> HandedOver:
        """What the gateway says next of a hand-over."""
        if self.taken:
            return self.taken.pop(0)
        message = await self._next()
        assert isinstance(message, HandedOver), message
        return message

    async def _next(self) -> Control:
        assert self.peer is not None
        async with asyncio.timeout(20):
            while True:
                try:
                    item = control.receive(self.peer)
                except BlockingIOError:
                    await asyncio.sleep(0.005)
                    continue
                assert item is not None
                return item[0]

    def say(self, message: Control, fds: tuple[int, ...] = ()) -> None:
        """A word to the gateway."""
        assert self.peer is not None
        control.send(self.peer, message, fds)

    def up(self, role: Role, model: str = "m", generation: int = 1, ready: object = None, tenant: str = "") -> Pair:
        """Announce a sandbox and hand its channel over."""
        told = ready or (ENGINE_READY if role is Role.ENGINE else TEXT_READY)
        pair = make_pair(role, told)  # type: ignore[arg-type]
        self.pairs.append(pair)
        numbers = {name: int(value) for name, value in asdict(told).items()}  # type: ignore[call-overload]
        layout = segment.standard_layout().encode().hex()
        up = SandboxUp(model, role.name.lower(), generation, 1, 0, layout, numbers, tenant, model_digest=DIGEST)
        self.say(up, pair.host.fds())
        pair.host.close()
        return pair

    def close(self) -> None:
        """Go."""
        for pair in self.pairs:
            pair.guest.close()
        if self.peer is not None:
            self.peer.close()
        self.listener.close()


@pytest.fixture
async def supervisor(tmp_path: Path) -> AsyncGenerator[Scripted]:
    """A scripted supervisor that listens."""
    made = Scripted(tmp_path / "control.sock")
    yield made
    made.close()


class GatewayEnd:
    """A gateway's end of the control socket, wired as the gateway wires it; it is its own listener."""

    def __init__(self, path: Path, counter: Callable[[], int], model: ModelSandboxes | None = None) -> None:
        self.model = model or ModelSandboxes("m")
        self.supervisor = SupervisorLink(path)
        self.own = TenantSandboxes(LIMITS, self.supervisor.tell)
        self.namespaces = NamespaceKeys(self.supervisor.tell, lambda _keys: None)
        self.audit = AuditFeed(self.supervisor.report)
        self.next_id = counter
        self.lost: list[tuple[str, str, str]] = []
        self.cuts: list[tuple[str, str]] = []
        takers: dict[type[Control], Callable[[Any], None]] = {
            Welcome: self.namespaces.attached,
            Namespaces: self.namespaces.take,
        }
        self.sandboxes = Sandboxes(self.supervisor, {"m": self.model}, self.own, self, takers)

    def supervisor_attached(self, sandbox: str) -> None:
        """Nothing to note."""

    def engine_ended(self, model: ModelSandboxes, link: EngineLink) -> None:
        """Nothing to note."""

    def sandbox_lost(self, model: str, role: str, reason: str) -> None:
        """Note it."""
        self.lost.append((model, role, reason))

    def hand_over_cut(self, model: str, role: str) -> None:
        """Note it."""
        self.cuts.append((model, role))

    @property
    def attached(self) -> bool:
        """Whether the socket is connected."""
        return self.supervisor.socket is not None


@pytest.fixture
async def gateway(tmp_path: Path, supervisor: Scripted, counter: Callable[[], int]) -> AsyncGenerator[GatewayEnd]:
    """A gateway's end, attached."""
    made = GatewayEnd(tmp_path / "control.sock", counter)
    task = asyncio.create_task(made.sandboxes.run())
    await supervisor.attach()
    yield made
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def open_fds() -> int:
    """Descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


@contextmanager
def descriptors_left(number: int) -> Iterator[None]:
    """This process may open so many more: the limit (getrlimit(2)) is one of numbers, and the lowest free is taken.
    None: not even those that are freed meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(name) for name in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{name}")}
    free = [number for number in range(len(used) + 4) if number not in used]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[number] if number else 0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until the condition holds."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_sandbox_of_an_unknown_model_leaves_no_descriptor(gateway: GatewayEnd, supervisor: Scripted) -> None:
    """What nobody asked for is closed."""
    before = open_fds()
    pair = supervisor.up(Role.ENGINE, model="other")
    supervisor.up(Role.ENGINE)
    await until(lambda: gateway.model.engine is not None)
    pair.guest.close()
    assert open_fds() == before + 2 * (3 + 1)  # Both ends of the other one: three each, and one of the mapping.


async def test_a_model_has_the_digest_of_its_files(gateway: GatewayEnd, supervisor: Scripted) -> None:
    """It comes with a sandbox; before the first one there is none."""
    assert gateway.model.digest == ""
    supervisor.up(Role.ENGINE)
    await until(lambda: gateway.model.engine is not None)
    assert gateway.model.digest == DIGEST


async def test_starts_are_noted_until_they_are_counted(gateway: GatewayEnd, supervisor: Scripted) -> None:
    """How a sandbox began is kept for whoever counts, once; words that nobody knows and floods are not."""
    record = gateway.model.records["engine"]
    pair = make_pair(Role.ENGINE, ENGINE_READY)
    layout = segment.standard_layout().encode().hex()
    up = SandboxUp(
        "m",
        "engine",
        3,
        1,
        0,
        layout,
        {name: int(value) for name, value in asdict(ENGINE_READY).items()},
        start=FALLEN_BACK,
    )
    supervisor.say(up, pair.host.fds())
    await until(lambda: record.take_starts() == [FALLEN_BACK])
    pair.host.close()
    pair.guest.close()
    for start in (COLD, RESTORED, "of the third kind"):
        record.note_start(start)
    assert (record.take_starts(), record.take_starts()) == ([COLD, RESTORED], [])
    for _ in range(1_000):
        record.note_start(FALLEN_BACK)
    assert len(record.take_starts()) == MAX_UNCOUNTED


async def test_a_segment_that_was_scribbled_on_is_reported_and_closed(
    gateway: GatewayEnd, supervisor: Scripted
) -> None:
    """A guest that forges its cursors before the gateway looks: the supervisor is told to end it, nothing leaks."""
    before = open_fds()
    pair = make_pair(Role.ENGINE, ENGINE_READY)
    pair.guest._writer._words[0] = 12_345
    layout = segment.standard_layout().encode().hex()
    supervisor.say(
        SandboxUp("m", "engine", 3, 1, 0, layout, {name: int(value) for name, value in asdict(ENGINE_READY).items()}),
        pair.host.fds(),
    )
    pair.host.close()
    fault = await supervisor.hear()
    assert isinstance(fault, Fault) and (fault.role, fault.generation) == ("engine", 3)
    pair.guest.close()
    assert open_fds() == before
    assert gateway.model.engine is None and gateway.attached


@pytest.mark.parametrize("left", [0, 1, 2, 3])
async def test_a_hand_over_that_is_cut_off_is_repeated(left: int, gateway: GatewayEnd, supervisor: Scripted) -> None:
    """None, one or two of its three descriptors find room, or all three and its memory's does not: the supervisor is
    told that they have to be sent again, with the limit. Nothing leaks, the supervisor stays attached, status says why,
    and the repeat is taken: the same sandbox, which has noticed nothing."""
    before = open_fds()
    pair = make_pair(Role.ENGINE, ENGINE_READY)
    numbers = {name: int(value) for name, value in asdict(ENGINE_READY).items()}
    up = SandboxUp("m", "engine", 3, 1, 0, segment.standard_layout().encode().hex(), numbers)
    supervisor.say(up, pair.host.fds())
    with descriptors_left(left):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        assert await supervisor.answer() == HandedOver("m", "engine", 3, 0, "", limit)
    held = before - NUM_SPARE
    assert open_fds() == held + 2 * (3 + 1), "both ends of the pair: three each, and one of the mapping"
    record = gateway.model.records["engine"]
    assert (record.state, gateway.attached, gateway.model.engine) == ("failed", True, None)
    assert record.cause == f"the gateway cannot take it: all {limit} descriptors that it may open are in use"
    supervisor.say(up, pair.host.fds())
    assert await supervisor.answer() == HandedOver("m", "engine", 3, 1)
    pair.host.close()
    assert gateway.model.engine is not None and (record.state, record.cause) == ("ready", "")
    assert gateway.cuts == [("m", "engine")]
    pair.guest.close()


async def test_a_hand_over_finds_room_where_nothing_else_does(gateway: GatewayEnd, supervisor: Scripted) -> None:
    """Everything that may be opened is open, by what no limit counts, and stays so: the first hand-over is cut off, and
    its repeat finds the numbers that the gateway held for it. Control: without them it is cut off again."""
    pair = make_pair(Role.ENGINE, ENGINE_READY)
    numbers = {name: int(value) for name, value in asdict(ENGINE_READY).items()}
    up = SandboxUp("m", "engine", 3, 1, 0, segment.standard_layout().encode().hex(), numbers)
    with descriptors_left(1):
        hog = os.open(os.devnull, os.O_RDONLY)
        supervisor.say(up, pair.host.fds())
        assert not (await supervisor.answer()).whole
        supervisor.say(up, pair.host.fds())
        assert (await supervisor.answer()).whole
        hogs = fill_up()
        gateway.sandboxes._spare.free()
        hogs += fill_up()
        supervisor.say(up, pair.host.fds())
        assert not (await supervisor.answer()).whole
        for fd in (hog, *hogs):
            os.close(fd)
    assert gateway.model.engine is not None
    pair.host.close()
    pair.guest.close()


def fill_up() -> list[int]:
    """Open whatever may be opened."""
    found = []
    with suppress(OSError):
        while True:
            found.append(os.open(os.devnull, os.O_RDONLY))
    return found


async def test_who_has_no_descriptor_for_the_supervisor_looks_again(gateway: GatewayEnd, supervisor: Scripted) -> None:
    """The supervisor goes while every descriptor is taken; once one is free the gateway attaches."""
    assert supervisor.peer is not None
    with descriptors_left(0):
        supervisor.peer.close()
        await until(lambda: not gateway.attached)
        await asyncio.sleep(2 * supervisor_link.RETRY_S)
        assert not gateway.attached
    await supervisor.attach()


async def test_a_sandbox_that_lets_go_and_lives_on_is_ended(
    gateway: GatewayEnd, supervisor: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A guest can close its channel without ending: the supervisor hears of it after a moment of grace."""
    monkeypatch.setattr(sandboxes_module, "GONE_GRACE_S", 0.05)
    pair = supervisor.up(Role.ENGINE, generation=4)
    await until(lambda: gateway.model.engine is not None)
    pair.guest.close()
    fault = await supervisor.hear()
    assert isinstance(fault, Fault) and fault.generation == 4


async def test_claims_are_cut_to_what_the_wire_carries(gateway: GatewayEnd, supervisor: Scripted) -> None:
    """An engine may claim a context of four billion tokens; prompts go on being encoded all the same."""
    supervisor.up(Role.ENGINE, ready=replace(ENGINE_READY, max_context=0xFFFF_FFFF))
    await until(lambda: gateway.model.engine is not None)
    capacity = gateway.model.capacity
    assert capacity is not None and capacity.max_context == MAX_TOKENS_PER_REQUEST


async def test_a_text_link_whose_table_is_being_read_ends_with_the_supervisor(
    gateway: GatewayEnd, supervisor: Scripted
) -> None:
    """It is in no room yet, and is let go all the same; status says why nothing is there."""
    supervisor.up(Role.ENGINE)
    pair = supervisor.up(Role.TEXT)
    await until(lambda: gateway.model.engine is not None)
    await until(lambda: any(isinstance(job, ReadVocabulary) for job in pair.guest.receive()))
    assert len(gateway.sandboxes._reading) == 1
    assert supervisor.peer is not None
    supervisor.peer.close()
    await until(lambda: not gateway.sandboxes._reading and gateway.model.engine is None)
    assert gateway.model.text is None
    record = gateway.model.records["engine"]
    assert (record.state, record.cause) == ("failed", "the supervisor is gone")


async def test_many_tenants_are_asked_for_in_parts(gateway: GatewayEnd, supervisor: Scripted) -> None:
    """A policy of thousands of tenants does not overflow a datagram; each part is asked once and kept."""
    tenants = [f"tenant-{number:05}-{'x' * 40}" for number in range(1_200)]
    asking = asyncio.ensure_future(gateway.namespaces.fetch(tenants))
    sizes = []
    while not asking.done():
        query = await supervisor.hear()
        assert isinstance(query, NamespaceQuery)
        sizes.append(len(query.tenants))
        supervisor.say(Namespaces(dict.fromkeys(query.tenants, "00" * 32)))
        await asyncio.sleep(0.05)
    assert sizes == [500, 500, 200]
    assert (await asking).keys() == set(tenants)


async def test_a_lost_supervisor_is_asked_again_when_it_is_back(gateway: GatewayEnd, supervisor: Scripted) -> None:
    """A question that meets a supervisor in the act of going does not end the gateway."""
    assert supervisor.peer is not None
    supervisor.peer.close()
    asking = asyncio.ensure_future(gateway.namespaces.fetch(["a"]))
    await supervisor.attach()
    query = await supervisor.hear()
    assert isinstance(query, NamespaceQuery)
    supervisor.say(Namespaces({"a": "11" * 32}))
    assert await asking == {"a": b"\x11" * 32}


async def test_a_failure_of_the_first_boot_is_known(gateway: GatewayEnd, supervisor: Scripted) -> None:
    """Who waits for the model to settle hears that it failed."""
    waiting = asyncio.ensure_future(gateway.model.wait_settled(1e12))
    supervisor.say(SandboxDown("m", "engine", 1, 0, "failed", "no weights", 0.5))
    await waiting
    assert gateway.model.records["engine"].cause == "no weights"


async def test_losses_and_memory_are_noted(gateway: GatewayEnd, supervisor: Scripted) -> None:
    """A loss is told with a reason of a closed list, whatever the supervisor called it; memory stands in the record."""
    supervisor.say(SandboxUse("m", "engine", 5, 8))
    supervisor.say(SandboxUse("elsewhere", "engine", 5, 8))
    for reason in ("oom", "a new one"):
        supervisor.say(SandboxDown("m", "engine", 1, 0, "failed", "it ended", 0.5, reason=reason))
    async with asyncio.timeout(20):
        while len(gateway.lost) < 2:
            await asyncio.sleep(0.005)
    assert gateway.lost == [("m", "engine", "oom"), ("m", "engine", "ended")]
    record = gateway.model.records["engine"]
    assert (record.memory_bytes, record.memory_limit_bytes) == (5, 8)
    assert gateway.sandboxes.every == (gateway.model,)


async def test_an_engine_that_ends_because_of_its_gpu_tells_its_requests(
    gateway: GatewayEnd, supervisor: Scripted
) -> None:
    """Words about another generation change nothing; those about this one reach the streams before the engine's end
    does; a reason that no supervisor gives ends the connection."""
    supervisor.up(Role.ENGINE)
    await until(lambda: gateway.model.engine is not None)
    engine = gateway.model.engine
    assert engine is not None
    stream = engine.submit(Submit(1, bytes(32), array("I", [1]), 4, Sampling(temperature=0.0)), b"")
    supervisor.say(EngineEnds("m", 7, GPU_LOST, 0))
    supervisor.say(SandboxUse("m", "engine", 5, 8))
    await until(lambda: gateway.model.records["engine"].memory_bytes == 5)
    assert stream.engine_gone is None
    supervisor.say(EngineEnds("m", 1, GPU_LOST, 3))
    await until(lambda: stream.engine_gone is not None)
    assert stream.loss is not None
    assert isinstance(stream.loss.error(), GpuLostError)
    assert "card 3" in stream.loss.error().message
    assert gateway.model.engine is None
    assert gateway.model.records["engine"].cause == "its GPU, card 3, is lost"
    supervisor.say(EngineEnds("m", 1, "moon", 0))
    await until(lambda: not gateway.sandboxes.attachment.attached)


async def test_a_flood_of_audit_entries_leaves_room_for_words_that_matter(
    gateway: GatewayEnd, supervisor: Scripted
) -> None:
    """While the supervisor reads nothing, entries wait in the gateway, and questions and faults still pass; once it
    reads, everything arrives, in order."""
    for number in range(5_000):
        gateway.audit.add("policy", outcome="ok", policy="ab" * 32, tenants=number, by="")
    for _ in range(50):
        gateway.audit.flush()
    for number in range(20):
        gateway.supervisor.tell(NamespaceQuery([f"tenant-{number}-{place}" for place in range(100)]))
    supervisor.up(Role.ENGINE)
    assert gateway.attached
    assert not gateway.supervisor._unsent
    seen, questions = [], 0
    async with asyncio.timeout(20):
        while len(seen) < 5_000 or questions < 20:
            gateway.audit.flush()
            message = await supervisor.hear()
            if isinstance(message, Audited):
                seen += [from_wire(text).fields["tenants"] for text in message.entries]
            questions += isinstance(message, NamespaceQuery)
    assert seen == list(range(5_000))


async def test_without_that_bound_a_flood_holds_questions_up(
    gateway: GatewayEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control of the last test: entries fill the socket, and the next questions have to wait for the supervisor."""
    monkeypatch.setattr(supervisor_link, "MAX_UNREAD", 1 << 30)
    for number in range(5_000):
        gateway.audit.add("policy", outcome="ok", policy="ab" * 32, tenants=number, by="")
    for _ in range(50):
        gateway.audit.flush()
    for number in range(20):
        gateway.supervisor.tell(NamespaceQuery([f"tenant-{number}-{place}" for place in range(100)]))
    assert gateway.attached
    assert gateway.supervisor._unsent
