"""Waiting for a sandbox, and the probation gate."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest

from appliance.common.errors import UnavailableError
from appliance.gateway.sandboxes import model_sandboxes as rooms_module
from appliance.gateway.sandboxes.engine_link import EngineLink
from appliance.gateway.sandboxes.model_sandboxes import ModelSandboxes
from tests.appliance.gateway.pairs import ENGINE_READY, Pair


@pytest.fixture
async def link(engine_pair: Pair) -> AsyncIterator[EngineLink]:
    """A live engine link."""
    made = EngineLink(engine_pair.host, ENGINE_READY, 1, lambda *_: None)
    yield made
    made.close()


def soon(seconds: float = 1.0) -> float:
    """A deadline."""
    return time.monotonic() + seconds


async def test_a_request_waits_for_a_booting_engine(link: EngineLink) -> None:
    """Whoever comes before the engine is served as soon as it is there."""
    rooms = ModelSandboxes("m")

    async def visit() -> EngineLink:
        async with rooms.enter_engine(soon(), suspect=False) as visit:
            return visit.engine

    waiting = asyncio.ensure_future(visit())
    await asyncio.sleep(0)
    rooms.set_engine(link)
    assert await waiting is link
    assert rooms.capacity == ENGINE_READY


async def test_the_wait_is_bounded_and_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an engine the caller hears so, with a time to try again."""
    monkeypatch.setattr(rooms_module, "BOOT_WAIT_S", 0.05)
    with pytest.raises(UnavailableError) as raised:
        async with ModelSandboxes("m").enter_engine(soon(), suspect=False):
            pass
    assert raised.value.retry_after_s is not None


async def test_a_draining_appliance_says_so_at_once() -> None:
    """Nobody waits for a sandbox that will not come."""
    rooms = ModelSandboxes("m")
    rooms.draining = True
    with pytest.raises(UnavailableError, match="shutting down"):
        await rooms.wait_text(soon())


async def test_a_suspect_is_alone_until_it_passed(link: EngineLink) -> None:
    """While a suspect is on probation nobody enters; after its first token others do."""
    rooms = ModelSandboxes("m")
    rooms.set_engine(link)
    order: list[str] = []

    async def other() -> None:
        async with rooms.enter_engine(soon(), suspect=False):
            order.append("other")

    async with rooms.enter_engine(soon(), suspect=True) as visit:
        assert visit.alone
        task = asyncio.ensure_future(other())
        for _ in range(5):
            await asyncio.sleep(0)
        assert order == []
        visit.passed()
        await task
        order.append("suspect ends")
    assert order == ["other", "suspect ends"]


async def test_two_suspects_take_turns(link: EngineLink) -> None:
    """Each suspect has the engine to itself."""
    rooms = ModelSandboxes("m")
    rooms.set_engine(link)
    inside = [0]

    async def suspect() -> None:
        async with rooms.enter_engine(soon(), suspect=True) as visit:
            assert visit.alone
            inside[0] += 1
            assert inside[0] == 1
            await asyncio.sleep(0)
            inside[0] -= 1

    await asyncio.gather(*(suspect() for _ in range(4)))


async def test_a_suspect_does_not_wait_for_ever_on_a_busy_engine(
    link: EngineLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the engine stays busy the suspect enters beside the others, not alone."""
    monkeypatch.setattr(rooms_module, "EMPTY_WAIT_S", 0.05)
    rooms = ModelSandboxes("m")
    rooms.set_engine(link)
    async with rooms.enter_engine(soon(), suspect=False), rooms.enter_engine(soon(), suspect=True) as visit:
        assert not visit.alone


async def test_a_suspect_that_leaves_lets_the_others_in(link: EngineLink) -> None:
    """A cancelled or failed suspect frees the gate."""
    rooms = ModelSandboxes("m")
    rooms.set_engine(link)
    with pytest.raises(ValueError, match="gone"):
        async with rooms.enter_engine(soon(), suspect=True):
            raise ValueError("gone")
    async with rooms.enter_engine(soon(0.2), suspect=False):
        pass


async def test_who_may_only_run_alone_does_not_run_beside_others(
    link: EngineLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy engine such a request is refused for now instead of let in."""
    monkeypatch.setattr(rooms_module, "EMPTY_WAIT_S", 0.02)
    rooms = ModelSandboxes("m")
    rooms.set_engine(link)
    async with rooms.enter_engine(soon(), suspect=False):
        with pytest.raises(UnavailableError):
            async with rooms.enter_engine(soon(0.1), suspect=True, alone_only=True):
                pass
    async with rooms.enter_engine(soon(), suspect=True, alone_only=True) as visit:
        assert visit.alone


async def test_suspects_that_keep_coming_do_not_keep_others_out(
    link: EngineLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One long request and a row of waiting suspects: newcomers still get in after the gate's time."""
    monkeypatch.setattr(rooms_module, "EMPTY_WAIT_S", 0.1)
    rooms = ModelSandboxes("m")
    rooms.set_engine(link)

    async def suspect() -> None:
        with contextlib.suppress(UnavailableError):
            async with rooms.enter_engine(soon(0.4), suspect=True, alone_only=True):
                pass

    async def row() -> None:
        while True:
            waiting = [asyncio.ensure_future(suspect()) for _ in range(2)]
            await asyncio.sleep(0.05)
            waiting[0].cancel()

    async with rooms.enter_engine(soon(), suspect=False):
        attack = asyncio.ensure_future(row())
        await asyncio.sleep(0.01)
        async with rooms.enter_engine(soon(2.0), suspect=False) as visit:
            assert not visit.alone
        attack.cancel()


async def test_a_suspect_with_a_long_prompt_is_alone_for_a_while_only(
    link: EngineLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Probation without a first token ends by the clock."""
    monkeypatch.setattr(rooms_module, "PROBATION_S", 0.05)
    rooms = ModelSandboxes("m")
    rooms.set_engine(link)
    async with rooms.enter_engine(soon(), suspect=True) as visit, rooms.enter_engine(soon(), suspect=False):
        assert not visit.alone


async def test_others_have_the_engine_as_long_as_a_suspect_kept_them_out(
    link: EngineLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a probation newcomers are let in at once, and the next suspect runs beside them or waits, until as much
    time has passed; then it is alone again (control)."""
    monkeypatch.setattr(rooms_module, "EMPTY_WAIT_S", 0.02)
    now = [100.0]
    monkeypatch.setattr(rooms_module, "time", SimpleNamespace(monotonic=lambda: now[0], time=time.time))
    rooms = ModelSandboxes("m")
    rooms.set_engine(link)
    async with rooms.enter_engine(110.0, suspect=True) as visit:
        assert visit.alone
        now[0] += 3.0
    now[0] += 2.9
    async with rooms.enter_engine(110.0, suspect=True) as visit, rooms.enter_engine(110.0, suspect=False):
        assert not visit.alone
    with pytest.raises(UnavailableError):
        async with rooms.enter_engine(now[0] + 0.05, suspect=True, alone_only=True):
            pass
    now[0] += 0.1
    async with rooms.enter_engine(110.0, suspect=True, alone_only=True) as visit:
        assert visit.alone


async def test_a_drain_wakes_who_waits(link: EngineLink) -> None:
    """Who waits for a sandbox when the appliance shuts down hears it at once, not after the boot's time."""
    rooms = ModelSandboxes("m")
    waiting = asyncio.ensure_future(rooms.wait_text(soon(60)))
    await asyncio.sleep(0)
    rooms.begin_drain()
    async with asyncio.timeout(20):
        with pytest.raises(UnavailableError, match="shutting down"):
            await waiting
