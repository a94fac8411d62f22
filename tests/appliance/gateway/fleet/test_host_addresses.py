"""Names of other hosts are looked up beside the event loop's threads, once for all who wait, and few at once."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator

import pytest

from appliance.gateway.fleet.host_addresses import KNOWN_S, MAX_ADDRESSES, MAX_LOOK_UPS, HostAddresses


class Names:
    """A name server that answers when it may."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.found = {"a": ["10.0.0.1", "10.0.0.1", "fd00::1"]}
        self.open = threading.Event()

    def look_up(self, name: str) -> list[str]:
        """Answer once it may."""
        self.asked[name] += 1
        self.open.wait(30)
        if name not in self.found:
            raise OSError(f"{name}: there is no such name")
        return self.found[name]


@pytest.fixture
def names() -> Iterator[Names]:
    """One that answers at once, until told otherwise."""
    found = Names()
    found.open.set()
    yield found
    found.open.set()


async def quiet(addresses: HostAddresses) -> None:
    """Wait until no look-up runs."""
    async with asyncio.timeout(10):
        while addresses._running:
            await asyncio.sleep(0.01)


async def test_a_name_is_looked_up_once_for_all_who_wait(names: Names) -> None:
    """Ten callers at once have one look-up, and one that gives up ends it for nobody; each address is given once. An
    address is not looked up (control)."""
    names.open.clear()
    addresses = HostAddresses(names.look_up)
    waiting = [asyncio.ensure_future(addresses.find("a")) for _ in range(10)]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await addresses.find("a")
    names.open.set()
    assert await asyncio.gather(*waiting) == [["10.0.0.1", "fd00::1"]] * 10
    assert await addresses.find("a") == ["10.0.0.1", "fd00::1"]
    assert names.asked == {"a": 1}
    assert [await addresses.find(one) for one in ("10.0.0.9", "fd00::9")] == [["10.0.0.9"], ["fd00::9"]]
    assert names.asked == {"a": 1}


async def test_a_known_name_is_used_while_it_is_looked_up_again(names: Names) -> None:
    """After its time a name is looked up beside its use: the next caller has the new address. With the name server away
    the old one stays. Control: within its time nobody is asked."""
    now = [0.0]
    addresses = HostAddresses(names.look_up, lambda: now[0])
    await addresses.find("a")
    names.found["a"] = ["10.0.0.2"]
    now[0] = KNOWN_S - 1
    assert len(await addresses.find("a")) == 2 and names.asked["a"] == 1
    now[0] = KNOWN_S
    assert len(await addresses.find("a")) == 2
    await quiet(addresses)
    assert await addresses.find("a") == ["10.0.0.2"]
    del names.found["a"]
    now[0] = 10 * KNOWN_S
    assert await addresses.find("a") == ["10.0.0.2"]
    await quiet(addresses)
    assert await addresses.find("a") == ["10.0.0.2"]


async def test_look_ups_that_are_not_answered_are_few(names: Names) -> None:
    """With as many look-ups as may run, another name counts as not found, at once; what is known and what waits already
    is served. A name that there is not is an error of its own, and so is one that DNS cannot have; a name with many
    addresses has a few of them."""
    addresses = HostAddresses(names.look_up)
    await addresses.find("a")
    names.open.clear()
    waiting = [asyncio.ensure_future(addresses.find(f"n{number}")) for number in range(MAX_LOOK_UPS)]
    await asyncio.sleep(0)
    with pytest.raises(OSError, match="other names are"):
        await addresses.find("one-more")
    assert await addresses.find("a")
    names.open.set()
    for one in await asyncio.gather(*waiting, return_exceptions=True):
        assert "no such name" in str(one)
    names.found["many"] = [f"10.0.1.{number}" for number in range(20)]
    assert await addresses.find("many") == names.found["many"][:MAX_ADDRESSES]
    assert len(names.asked) == MAX_LOOK_UPS + 2
    with pytest.raises(OSError, match="no name"):
        await HostAddresses().find("x" * 70 + ".example")


async def test_a_machine_without_threads_costs_no_request(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no thread can be started a name counts as not found, and one that is known stays in use; with threads again
    both are looked up (control). A loop that ends meanwhile is an error of nobody."""
    now = [0.0]
    addresses = HostAddresses(names.look_up, lambda: now[0])
    await addresses.find("a")
    now[0] = KNOWN_S
    names.found["b"] = ["10.0.0.7"]

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        assert await addresses.find("a") == ["10.0.0.1", "fd00::1"]
        with pytest.raises(OSError, match="no thread"):
            await addresses.find("b")
    assert addresses._running == {}
    assert await addresses.find("b") == ["10.0.0.7"]
    ended = asyncio.new_event_loop()
    ended.close()
    addresses._look_up("b", ended)
