"""A split pair in a storm: its processes and its store are killed, and clients leave, all at random moments.

Every answer that a client waits for is whole; afterwards no engine holds a block for a request, nothing is charged
twice, and both hosts' usage books equal their audit logs.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import mmap
import os
import random
import signal
import sqlite3
import statistics
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from appliance.common.catalog import embedded_model
from appliance.common.usage.open_charges import FREE, SIZE, SLOT_BYTES
from tests.appliance.supervisor.fleet_keys.fleets import config, sign
from tests.stores import store
from tests.system.audit_files import written
from tests.system.conftest import PLAIN, as_demos
from tests.system.spilling import BLOCK_BYTES, Spilling, served
from tests.system.test_fleet_kv import POLICY, held, wait_until
from tests.system.test_split import DECODE, PREFILL, gateway_of, sections, text

pytestmark = [pytest.mark.runsc, pytest.mark.full]

CLIENTS, TOKENS, BLOCKS = 12, 12, 600
QUIET_S = 5.0
"""Seconds after the last request by which no block is held."""

OTHERS = ("prefill gateway", "prefill engine", "store")
"""Targets whose death no client may see."""

OWN = ("decode engine", "decode gateway")
"""Targets that end what the client's own host has shown in part: a broken connection, or a stream that ends with an
error. A router gives what had not begun to another host; here the client asks again, until the host is ready."""

READY_S = 120.0
"""Seconds for a host to be ready again: a busy machine boots an engine in 20."""


class Store:
    """The store of both hosts, which can be killed and started anew, empty."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._running = folder, ExitStack()
        self.start()

    def start(self) -> None:
        """Start it, at the address that it always has."""
        self.address = self._running.enter_context(store(self._folder)).address

    def kill(self) -> None:
        """Kill it, with all that it has."""
        self._running.close()


@dataclass
class Pair:
    """Both hosts and their store."""

    prefill: Spilling
    decode: Spilling
    store: Store

    @property
    def hosts(self) -> tuple[Spilling, Spilling]:
        """Both."""
        return self.prefill, self.decode


@contextmanager
def split_pair(folder: Path) -> Iterator[Pair]:
    """Two appliances that split prompts, and a store that the test may kill."""
    sign(folder, (PREFILL, DECODE))
    split = sections(folder)
    model = {
        "name": "athanor-mini",
        "path": str(embedded_model()),
        "dtype": "float32",
        "kv_bytes": BLOCKS * BLOCK_BYTES,
    }
    with tempfile.TemporaryDirectory(prefix="kv-", dir="/tmp") as name, ExitStack() as stack:
        running = Store(Path(name))
        stack.callback(running.kill)
        hosts = list[Spilling]()
        for host in (PREFILL, DECODE):
            (folder / host).mkdir()
            members = config(folder, host).model_dump(mode="json") | {"write": "when_computed"}
            section = {"store": running.address, "size": 256 << 20, "ttl": 600, "members": members}
            sandbox = {**as_demos(), "form_cache": str(folder / "forms"), "spill": {"memory": BLOCKS * BLOCK_BYTES}}
            more = {"kv_store": section, "sandbox": sandbox, "audit": {"directory": "audit"}, "split": split[host]}
            hosts.append(stack.enter_context(served(folder / host, POLICY, {}, models=[model], **more)))
        for one in hosts:
            wait_until(lambda one=one: held(one, "athanor_fleet_keys_held") == 1)
        time.sleep(2)  # Tenants' keys come with the fleet's; engines are told of both.
        yield Pair(*hosts, running)


@dataclass
class Seen:
    """What clients saw."""

    whole: dict[str, int] = field(default_factory=dict)
    """Output tokens of whole answers, by the request's id."""
    left: int = 0
    """Requests that their clients gave up."""
    own: Counter[str] = field(default_factory=Counter)
    """Ends with which the client's own host was killed, and after which the client asked again."""
    wrong: list[str] = field(default_factory=list)
    """All other ends."""
    took_s: list[float] = field(default_factory=list)
    own_dead: bool = False
    """Whether the client's own host was killed and is not ready yet."""

    def end(self, what: str) -> None:
        """Note an end that is no answer."""
        if self.own_dead:
            self.own[what] += 1
        else:
            self.wrong.append(what)


@dataclass
class Storm:
    """Clients and kills."""

    pair: Pair
    draw: random.Random
    disconnects: int
    seen: Seen = field(default_factory=Seen)
    killed: Counter[str] = field(default_factory=Counter)
    _number: int = 100

    async def client(self) -> None:
        """Ask for one long prompt after the other; leave most of them at a random moment."""
        while self.seen.left < self.disconnects:
            self._number += 1
            patience_s = None
            if self.draw.random() < 0.75:
                usual = statistics.median(self.seen.took_s[-20:]) if self.seen.took_s else 1.0
                patience_s = self.draw.random() * 1.2 * usual
            try:
                async with asyncio.timeout(patience_s):
                    await self.ask(self._number, stream=self.draw.random() < 0.5)
            except TimeoutError:
                self.seen.left += 1
                if self.seen.left % 100 == 0:
                    print(f"{self.seen.left} clients left, kills {dict(self.killed)}", flush=True)

    async def ask(self, number: int, *, stream: bool) -> None:
        """Ask for one answer, and note what came."""
        body = {"model": "athanor-mini", "prompt": text(number), "max_tokens": TOKENS, "temperature": 0}
        body |= {"ignore_eos": True, "stream": stream}
        headers = {"authorization": f"Bearer {self.pair.decode.keys['ab'[number % 2]]}"}
        began = time.monotonic()
        try:
            async with (
                httpx.AsyncClient(base_url=self.pair.decode.http, headers=headers, timeout=120, verify=PLAIN) as client,
                client.stream("POST", "/v1/completions", json=body) as answer,
            ):
                name = answer.headers.get("x-request-id", "")
                content = await answer.aread()
        except httpx.HTTPError as error:
            self.seen.end(type(error).__name__)
            await asyncio.sleep(0.5)
            return
        if answer.status_code != 200:
            self.seen.end(f"{answer.status_code} {content[:300]!r}")
            await asyncio.sleep(0.5)
        elif (stream and not content.rstrip().endswith(b"[DONE]")) or b'{"error":' in content:
            self.seen.end(f"a stream that ends with {content[-200:]!r}")
        else:
            self.seen.whole[name] = TOKENS if stream else json.loads(content)["usage"]["completion_tokens"]
            self.seen.took_s.append(time.monotonic() - began)

    async def killing(self, pause_s: tuple[float, float]) -> None:
        """Kill one target after the other, in random order, with random pauses, until cancelled; one of the client's
        own host after each four rounds of the others."""
        for own in itertools.cycle(OWN):
            for target in (*(one for _ in range(4) for one in self.draw.sample(OTHERS, 3)), own):
                await asyncio.sleep(self.draw.uniform(*pause_s))
                before = None if target != own else await asyncio.to_thread(processes_of, self.pair.decode)
                self.seen.own_dead = target == own
                with suppress(OSError, AssertionError, httpx.HTTPError):  # It has not started again yet.
                    await asyncio.to_thread(self.kill, target)
                    self.killed[target] += 1
                if target == own:
                    await asyncio.to_thread(wait_ready, self.pair.decode, before)
                    await asyncio.sleep(1)  # What its death ended has been told.
                    self.seen.own_dead = False

    def kill(self, target: str) -> None:
        """Kill a target; the store is away for a moment."""
        if target == "store":
            self.pair.store.kill()
            time.sleep(self.draw.random())
            self.pair.store.start()
            return
        host, what = target.split()
        of: Spilling = getattr(self.pair, host)
        os.kill(gateway_of(of) if what == "gateway" else engine_of(of), signal.SIGKILL)

    async def run(self, pause_s: tuple[float, float]) -> None:
        """Serve under kills until so many clients have left; then some more whole answers, without kills."""
        killing = asyncio.create_task(self.killing(pause_s))
        try:
            await asyncio.gather(*(self.client() for _ in range(CLIENTS)))
        finally:
            killing.cancel()
            await asyncio.wait((killing,))
        for host in self.pair.hosts:
            await asyncio.to_thread(wait_ready, host)
        self.seen.own_dead = False
        before = len(self.seen.whole)
        until = time.monotonic() + 120
        while len(self.seen.whole) < before + 3:
            assert time.monotonic() < until, self.seen
            self._number += 1
            await self.ask(self._number, stream=False)


def engine_of(host: Spilling) -> int:
    """Process of a host's engine."""
    model = httpx.get(f"{host.admin}/status", timeout=10, verify=PLAIN).raise_for_status().json()["models"][0]
    assert model["engine"]["state"] == model["text"]["state"] == "ready"
    return int(model["engine"]["pid"])


def processes_of(host: Spilling) -> tuple[int, int] | None:
    """A host's gateway and engine; None while one is not ready."""
    with suppress(OSError, AssertionError, httpx.HTTPError):
        return gateway_of(host), engine_of(host)
    return None


def wait_ready(host: Spilling, before: tuple[int, int] | None = None) -> None:
    """Wait until a host's processes are ready, and other ones than before."""
    until = time.monotonic() + READY_S
    while True:
        if processes_of(host) not in (None, before):
            return
        assert time.monotonic() < until, "the host does not come back"
        time.sleep(0.2)


def blocks_held(host: Spilling) -> float:
    """Blocks that requests hold in a host's engine; below 0 where it is not ready."""
    free = held(host, "athanor_engine_kv_free_blocks")
    return held(host, "athanor_engine_kv_blocks") - free if free >= 0 else -1.0


def charges_open(host: Spilling) -> int:
    """Requests that a host's gateway would be charged for if it ended now, read where the supervisor would."""
    folder = Path(f"/proc/{gateway_of(host)}/fd")
    (memory,) = {os.stat(one).st_ino: one for one in folder.iterdir() if "athanor-charges" in os.readlink(one)}.values()
    with memory.open("rb") as file, mmap.mmap(file.fileno(), SIZE, access=mmap.ACCESS_READ) as pages:
        states = [struct.unpack_from("=q", pages, at)[0] for at in range(0, SIZE, SLOT_BYTES)]
    return sum(state != FREE for state in states)


def entries(host: Spilling, kind: str) -> list[dict[str, Any]]:
    """Entries of a kind in a host's audit log."""
    return [one for one in written(host.state / "audit") if one["kind"] == kind]


def used(host: Spilling) -> tuple[int, int, int]:
    """Requests, input and output tokens of a host's usage book."""
    path = host.state / "audit" / "usage" / "usage.db"
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as book:
        sums = "COALESCE(SUM(requests), 0), COALESCE(SUM(input), 0), COALESCE(SUM(output), 0)"
        requests, tokens, output = book.execute(f"SELECT {sums} FROM used").fetchone()
        return int(requests), int(tokens), int(output)


def logged(host: Spilling) -> tuple[int, int, int]:
    """What a host's audit log says of the same."""
    found = entries(host, "request")
    return len(found), sum(one["input_tokens"] for one in found), sum(one["output_tokens"] for one in found)


def check_quiet(storm: Storm) -> None:
    """Nothing is held, nothing is open, and what was charged is what was served."""
    pair, seen = storm.pair, storm.seen
    for host in pair.hosts:
        wait_within(QUIET_S, lambda host=host: blocks_held(host) == 0, lambda host=host: blocks_held(host))

    def told() -> set[str]:
        return {one["request"] for one in entries(pair.decode, "request")}

    # Book and log are equal also before either has the last requests, which come some seconds behind their answers.
    wait_within(30, lambda: seen.whole.keys() <= told(), lambda: seen.whole.keys() - told())
    for host in pair.hosts:
        wait_within(30, lambda host=host: charges_open(host) == 0, lambda host=host: charges_open(host))
        wait_within(30, lambda host=host: used(host) == logged(host), lambda host=host: (used(host), logged(host)))
    assert logged(pair.prefill) == (0, 0, 0), "one host alone charges a request"
    found = entries(pair.decode, "request")
    assert max(Counter(one["request"] for one in found).values()) == 1
    charged = {one["request"]: one["output_tokens"] for one in found}
    assert {name: charged.get(name) for name in seen.whole} == seen.whole
    asked = {one["request"] for one in entries(pair.decode, "prefill")}
    assert {one["request"] for one in entries(pair.prefill, "prefill")} - {""} <= asked | charged.keys()


def wait_within(seconds: float, holds: Any, what: Any) -> None:
    """Wait so long for what other processes do."""
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, what()
        time.sleep(0.2)


@pytest.mark.parametrize(
    ("disconnects", "pause_s"),
    [
        pytest.param(30, (0.5, 1.5), marks=pytest.mark.timeout(400)),
        pytest.param(1_000, (3.0, 8.0), marks=pytest.mark.timeout(3_000)),
    ],
    ids=["few", "thousand"],
)
def test_a_storm_costs_no_answer_and_leaves_nothing(
    tmp_path: Path, runsc_path: Path, disconnects: int, pause_s: tuple[float, float]
) -> None:
    """Clients that stay have whole answers, whatever is killed of the prefill host, its engine and the store; where
    their own host is killed, they have one when they ask again. Five seconds later no engine holds a block. Controls:
    prompts were computed elsewhere, requests were in flight when each target was killed, and the count of held blocks
    is above 0 while one request runs."""
    with split_pair(tmp_path) as pair:
        storm = Storm(pair, random.Random(24), disconnects)
        asyncio.run(control(storm))
        began = time.monotonic()
        asyncio.run(storm.run(pause_s))
        took_s = time.monotonic() - began
        seen = storm.seen
        outcomes = Counter(one["outcome"] for one in entries(pair.decode, "prefill"))
        print(
            f"{took_s:.0f} s: {len(seen.whole)} whole answers, {seen.left} clients left, kills {dict(storm.killed)}, "
            f"asked {dict(outcomes)}, asked again {dict(seen.own)}, wrong {Counter(seen.wrong)}"
        )
        assert seen.wrong == []
        check_quiet(storm)
        assert outcomes["computed"] > 0 and seen.left >= disconnects


async def control(storm: Storm) -> None:
    """See that held blocks and open charges are counted while a request runs."""
    task = asyncio.create_task(storm.ask(99, stream=True))
    found = (0.0, 0)
    while not task.done() and not (found[0] > 0 and found[1] > 0):
        blocks = await asyncio.to_thread(blocks_held, storm.pair.decode)
        charges = await asyncio.to_thread(charges_open, storm.pair.decode)
        found = max(found[0], blocks), max(found[1], charges)
    await task
    assert found[1] > 0, found
