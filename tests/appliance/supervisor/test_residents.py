"""The supervisor against wishes that are granted, refused, too many, or those of a gateway that was taken over."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from appliance.common.control import Control, Fault, Release, SandboxDown, SandboxUp, Want
from appliance.common.errors import StartError
from appliance.common.residency import ResidentLimits
from appliance.supervisor import keeper as keeper_module
from appliance.supervisor import residents as residents_module
from appliance.supervisor.boot import Booted, BootPlan, sandbox_name
from appliance.supervisor.policy_reader import DeclaredTenants
from appliance.supervisor.residents import Residents
from isolation.ipc.messages import Role

from .test_keeper import Sandbox

POLICY = """
version: 1
tenants:
  s: {credentials: ["key:s"], models: ["m"]}
  t: {credentials: ["key:t"], models: ["m"], class: strict, kv: {reservation: 10%}}
  d: {credentials: ["key:d"], models: ["*"], class: dedicated}
  e: {credentials: ["key:e"], models: ["*"], class: dedicated}
"""
LIMITS = ResidentLimits(engines=1, texts=2, memory_bytes=1 << 40, engine_bytes=1)


class Channel:
    """A channel of which only the hand-over is seen."""

    def fds(self) -> tuple[int, ...]:
        """None are needed."""
        return ()

    def close(self) -> None:
        """Nothing is open."""


class Room:
    """Residents whose boots are quick, what they published, and what is alive."""

    def __init__(self, folder: Path) -> None:
        self.published: list[Control] = []
        self.alive: list[str] = []
        self.most = 0
        (folder / "policy.yaml").write_text(POLICY)
        declared = DeclaredTenants(folder / "policy.yaml")
        self.residents = Residents(LIMITS, self._plan, None, self._publish, declared.read)  # type: ignore[arg-type]

    def _publish(self, message: Control, _fds: tuple[int, ...]) -> bool:
        self.published.append(message)
        return True

    @staticmethod
    def _plan(model: str, tenant: str, role: Role) -> BootPlan:
        if model == "full":
            raise StartError("no GPU has room for an engine of full")
        if model == "moved":
            raise FileNotFoundError(2, "No such file or directory", "model.safetensors")
        if model != "m":
            raise KeyError(model)
        name: Any = f"{role.name.lower()}-{tenant}"
        return BootPlan(name, model, role, None, None, b"{}", tenant=tenant)  # type: ignore[arg-type]

    def boot(self, plan: BootPlan, _runtime: object, _stop: threading.Event, **_: object) -> Booted:
        """Up at once."""
        self.alive.append(plan.name)
        self.most = max(self.most, sum(name.startswith("engine") for name in self.alive))
        booted = Booted(Sandbox(), Channel(), plan.name, "", {}, 0.0)  # type: ignore[arg-type]
        return booted

    def end(self, booted: Booted) -> None:
        """Gone."""
        self.alive.remove(str(booted.socket_dir))

    def of(self, kind: type[Control]) -> list[Any]:
        """What was published of a kind."""
        return [message for message in self.published if isinstance(message, kind)]


@pytest.fixture
async def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Room]:
    """Residents that serve wishes."""
    made = Room(tmp_path)
    monkeypatch.setattr(keeper_module, "boot", made.boot)
    monkeypatch.setattr(keeper_module, "end", made.end)
    task = asyncio.create_task(made.residents.run())
    yield made
    task.cancel()
    await made.residents.close()
    assert made.alive == []


async def until(condition: Any) -> None:
    """Let the loop turn until the condition holds."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


async def test_what_the_policy_grants_is_booted_once(room: Room) -> None:
    """A dedicated tenant gets both, a strict one its text sandbox; asking again changes nothing."""
    for _ in range(3):
        room.residents.want(Want("m", "d"))
        room.residents.want(Want("m", "t"))
    await until(lambda: len(room.of(SandboxUp)) == 3)
    await asyncio.sleep(0.05)
    assert sorted(room.alive) == ["engine-d", "text-d", "text-t"]
    assert {(up.role, up.tenant) for up in room.of(SandboxUp)} == {("engine", "d"), ("text", "d"), ("text", "t")}


async def test_an_engine_without_room_on_a_gpu_is_refused_and_others_are_served(room: Room) -> None:
    """A plan that finds no card, or no weights any more, refuses that wish with the reason, and the next one is
    served."""
    room.residents.want(Want("full", "d"))
    room.residents.want(Want("moved", "d"))
    room.residents.want(Want("m", "d"))
    await until(lambda: room.of(SandboxUp))
    full, moved = (one.cause for one in room.of(SandboxDown))
    assert full == "no GPU has room for an engine of full"
    assert moved.startswith("the sandboxes cannot be planned: ") and "model.safetensors" in moved


@pytest.mark.parametrize("wish", [Want("m", "s"), Want("m", "nobody"), Want("other", "t"), Want("other", "d")])
async def test_what_it_does_not_grant_is_refused(room: Room, wish: Want) -> None:
    """A gateway that was taken over boots nothing that the policy does not declare."""
    room.residents.want(wish)
    await until(lambda: room.of(SandboxDown))
    (down,) = room.of(SandboxDown)
    assert (down.state, down.model, down.tenant) == ("refused", wish.model, wish.tenant)
    assert room.alive == []


async def test_the_supervisor_counts_for_itself(room: Room) -> None:
    """Nor more than there may be; after a release the next one waits until the first is gone."""
    room.residents.want(Want("m", "d"))
    await until(lambda: len(room.alive) == 2)
    room.residents.want(Want("m", "e"))
    await until(lambda: room.of(SandboxDown))
    room.residents.release(Release("m", "d"))
    room.residents.want(Want("m", "e"))
    await until(lambda: sorted(room.alive) == ["engine-e", "text-e"])
    assert room.most == 1
    generations = [up.generation for up in room.of(SandboxUp)]
    assert len(set(generations)) == len(generations)
    assert {up.restarts for up in room.of(SandboxUp)} == {0}


async def test_a_flood_of_wishes_is_bounded(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than may wait are refused at once."""
    monkeypatch.setattr(residents_module, "MAX_WISHES", 4)
    for _ in range(10):
        room.residents.want(Want("m", "t"))
    assert len(room.of(SandboxDown)) == 6


@pytest.mark.parametrize("leaves", [lambda one: one.release(Release("m", "e")), lambda one: one.gateway_left()])
async def test_a_wish_taken_back_while_it_waits_boots_nothing(room: Room, leaves: Any) -> None:
    """What nobody wants any more by the time its turn comes is not booted: nobody would release it, and it would keep
    others out for ever. Control: the one that is wanted still comes."""
    room.residents.want(Want("m", "d"))
    await until(lambda: len(room.alive) == 2)
    room.residents.release(Release("m", "d"))
    room.residents.want(Want("m", "e"))
    await asyncio.sleep(0)  # The wish is being served.
    leaves(room.residents)
    room.residents.want(Want("m", "d"))
    await until(lambda: sorted(room.alive) == ["engine-d", "text-d"] and len(room.of(SandboxUp)) == 4)
    assert room.of(SandboxDown) == []


async def test_they_go_with_the_gateway(room: Room) -> None:
    """Nothing is kept for a gateway that left; a fault of an earlier life is nobody's."""
    room.residents.want(Want("m", "t"))
    await until(lambda: room.of(SandboxUp))
    generation = room.of(SandboxUp)[0].generation
    room.residents.fault(Fault("m", "text", generation + 1, "x", "t"))
    room.residents.fault(Fault("m", "text", generation, "x"))
    await asyncio.sleep(0.05)
    assert room.alive == ["text-t"]
    room.residents.gateway_left()
    await until(lambda: room.alive == [])


async def test_a_tenant_is_without_its_sandboxes_for_a_while(room: Room) -> None:
    """They are gone before the block begins, a wish in it boots nothing, and behind it what is still needed is there
    again as another generation; what the gateway released meanwhile stays away, and another tenant's stay (control)."""
    for tenant in ("d", "t"):
        room.residents.want(Want("m", tenant))
    await until(lambda: len(room.of(SandboxUp)) == 3)
    async with room.residents.without("d"):
        assert room.alive == ["text-t"]
        room.residents.want(Want("m", "d"))
        await asyncio.sleep(0.05)
        assert room.alive == ["text-t"]
    await until(lambda: sorted(room.alive) == ["engine-d", "text-d", "text-t"])
    await until(lambda: len(room.of(SandboxUp)) == 5)
    generations = [up.generation for up in room.of(SandboxUp) if up.tenant == "d"]
    assert len(set(generations)) == 4
    async with room.residents.without("t"):
        room.residents.release(Release("m", "t"))
    await asyncio.sleep(0.05)
    assert sorted(room.alive) == ["engine-d", "text-d"]


async def test_a_bad_policy_changes_nothing(room: Room, tmp_path: Path) -> None:
    """As in the gateway: the one before stays in force, and a good one is read at the next wish."""
    room.residents.want(Want("m", "t"))
    await until(lambda: room.alive == ["text-t"])
    (tmp_path / "policy.yaml").write_text("tenants: [")
    room.residents.release(Release("m", "t"))
    room.residents.want(Want("m", "t"))
    await until(lambda: len(room.of(SandboxUp)) == 2)
    (tmp_path / "policy.yaml").write_text("version: 1\ntenants: {}\n")
    room.residents.want(Want("m", "t"))
    await until(lambda: room.of(SandboxDown))


def test_names_differ_by_model_and_tenant_and_are_short() -> None:
    """No two sandboxes have one name, none is longer than a socket's path allows, and none tells its tenant."""
    models, tenants = ("m", "M", "a-model-with-a-long-name", "a-model-with-a-long-nam"), ("", "t", "u", "x" * 63)
    names = [sandbox_name(model, role, tenant) for model in models for role in Role for tenant in tenants]
    assert len(set(names)) == len(names)
    assert max(map(len, names)) <= 30
    assert not any("x" * 9 in name for name in names)
