"""Positive controls: before anything is broken, each invariant is shown a breach of its own and must see it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import mmap
import os
import random
import shutil
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from appliance.common.audit import files
from appliance.common.audit.verify import read_verifier, verify
from bench.soak import census, memory
from bench.soak.answers import WRONG
from bench.soak.clients import Grpc, Manner
from bench.soak.invariants import Inspector
from bench.soak.load import Load, Phases
from bench.soak.log_watch import LogWatch
from bench.soak.questions import Asker
from bench.soak.report import Control
from bench.soak.room import SHARED_MEMORY
from bench.soak.served import Served
from isolation.host.process import MINIMAL_ENVIRONMENT, run, spawn

LISTEN_S = 1.5
"""How long a load with a wrong reference runs."""

SHORT_LOOKS, LONG_LOOKS = 30, 60
LOOK_S = 10.0
"""Turns of a run of three minutes and of ten, and what one lasts."""

HELD = 8
"""Descriptors, connections, threads: above every slack."""


async def run_all(inspector: Inspector, seed: int) -> list[Control]:
    """Plant one breach of each kind, and look."""
    served = inspector.served
    found = [await _counted(inspector, name, plant) for name, plant in _plants(served)]
    found += [own_process(), grown(), taken(), torn_log(served), logged(served)]
    found.append(await _wrong(inspector, seed))
    found.append(await _in_flight(inspector, seed))
    return found


@contextlib.contextmanager
def _temporary(served: Served) -> Iterator[None]:
    path = served.room.temporary / "forgotten"
    path.touch()
    yield
    path.unlink()


@contextlib.contextmanager
def _shared_memory(_served: Served) -> Iterator[None]:
    path = SHARED_MEMORY / "forgotten"
    path.touch()
    yield
    path.unlink()


@contextlib.contextmanager
def _bundle(served: Served) -> Iterator[None]:
    path = served.run_dir / "ipc" / "forgotten"
    path.mkdir()
    yield
    path.rmdir()


@contextlib.contextmanager
def _group(served: Served) -> Iterator[None]:
    parents = census.group_parents(served)
    for parent in parents:
        (parent / "forgotten").mkdir()
    yield
    for parent in parents:
        (parent / "forgotten").rmdir()


@contextlib.contextmanager
def _mount(served: Served) -> Iterator[None]:
    place = served.room.scratch / "forgotten"
    place.mkdir()
    run(("mount", "-t", "tmpfs", "tmpfs", str(place)), timeout_s=20)
    yield
    run(("umount", str(place)), timeout_s=20)
    place.rmdir()


@contextlib.contextmanager
def _stray(served: Served) -> Iterator[None]:
    program = "import sys, time; time.sleep(600)"
    with spawn((sys.executable, "-S", "-c", program, str(served.run_dir)), env=MINIMAL_ENVIRONMENT):
        yield


@contextlib.contextmanager
def _connections(served: Served) -> Iterator[None]:
    with contextlib.ExitStack() as held:
        for _ in range(HELD):
            held.enter_context(contextlib.closing(socket.create_connection(("127.0.0.1", served.http_port))))
        yield


def _plants(served: Served) -> tuple[tuple[str, contextlib.AbstractContextManager[None]], ...]:
    """What each of the counts is shown."""
    return (
        ("entries tmp", _temporary(served)),
        ("shared memory", _shared_memory(served)),
        ("bundles", _bundle(served)),
        ("cgroups", _group(served)),
        ("mounts", _mount(served)),
        ("strays", _stray(served)),
        ("sockets gateway", _connections(served)),
    )


async def _counted(inspector: Inspector, name: str, plant: contextlib.AbstractContextManager[None]) -> Control:
    with plant:
        await asyncio.sleep(0.1)
        found = census.exceeding(inspector.before, census.take(inspector.served))
    return Control(name, any(one.startswith(name) for one in found), "; ".join(found)[:200])


def own_process() -> Control:
    """Threads and descriptors of every kind, planted in this process and counted as an appliance's are."""
    before = census.of_process(os.getpid())
    stop = threading.Event()
    threads = [threading.Thread(target=stop.wait) for _ in range(2 * HELD)]
    with contextlib.ExitStack() as held:
        for thread in threads:
            thread.start()
        held.callback(stop.set)
        for _ in range(HELD):
            for fd in (*os.pipe(), os.memfd_create("forgotten"), os.eventfd(0), os.open("/dev/null", os.O_RDONLY)):
                held.callback(os.close, fd)
        found = census.exceeding(before, census.of_process(os.getpid()))
    for thread in threads:
        thread.join()
    seen = {one.partition(":")[0] for one in found}
    return Control("descriptors and threads", seen >= {"threads", "pipes", "memfds", "anonymous", "files"}, str(found))


def grown() -> Control:
    """Rooms that leak 200 kB a look in a long run and 1 MiB a look in a short one, beside one that does not and one
    whose heap finds its size, all with the noise that rooms have."""
    draw = random.Random(1)
    noise = [draw.randrange(-(2 << 20), 2 << 20) for _ in range(LONG_LOOKS)]
    made = {
        "still": noise,
        "settling": [noise[at] // 2 + round((8 << 20) * (1 - math.exp(-at / 3))) for at in range(SHORT_LOOKS)],
        "leaking": [noise[at] + at * 200_000 for at in range(LONG_LOOKS)],
        "leaking fast": [noise[at] // 2 + (at << 20) for at in range(SHORT_LOOKS)],
    }
    samples = [
        memory.Sample(room, (1, 1), at * LOOK_S, (300 << 20) + more)
        for room, sizes in made.items()
        for at, more in enumerate(sizes)
    ]
    told = {one.room: one.leaks for one in memory.growth(samples)}
    right = told == {room: room.startswith("leaking") for room in made}
    return Control("memory", right, str(told))


def taken() -> Control:
    """This process takes 1 MiB a look and gives nothing back, and is measured as the appliance's are."""
    held, samples = [], []
    for at in range(SHORT_LOOKS):
        page = mmap.mmap(-1, 1 << 20)  # A heap may have room from before, and then nothing grows.
        page.write(os.urandom(1 << 20))
        held.append(page)
        samples.append(memory.Sample("taker", (1, 1), at * LOOK_S, memory.made_bytes(os.getpid())))
    found = memory.growth(samples)
    return Control("memory of a process", any(one.leaks for one in found), str(found))


def torn_log(served: Served) -> Control:
    """One byte of an audit entry that is another."""
    with TemporaryDirectory(dir=served.room.scratch) as folder:
        copy = Path(folder) / "audit"
        shutil.copytree(served.room.audit, copy)
        path = next(copy.glob("*.log"))
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        problems = verify(copy, read_verifier(copy / files.PUBLIC_KEY)).problems
    return Control("audit", bool(problems), "; ".join(problems)[:200])


def logged(served: Served) -> Control:
    """A traceback in a log."""
    with TemporaryDirectory(dir=served.room.scratch) as folder:
        path = Path(folder) / "log"
        path.write_text('{"level": "info", "event": "fine"}\n{"exception": "Traceback (most recent call last): x"}\n')
        found = LogWatch(path).look()
    return Control("log", len(found) == 1, "; ".join(found)[:200])


async def _wrong(inspector: Inspector, seed: int) -> Control:
    """A reference with one character changed: the right answers to it are wrong."""
    references = dict(inspector.references)
    for name, text in references.items():
        references[name] = text[:-1] + ("x" if text[-1:] != "x" else "y")
    load = Load(inspector.served, references, Phases(), seed)
    load.start()
    await asyncio.sleep(LISTEN_S)
    await load.rest()
    return Control("wrong answers", load.heard.kinds[WRONG] > 0, str(dict(load.heard.kinds)))


async def _in_flight(inspector: Inspector, seed: int) -> Control:
    """A request that still runs when nobody should ask."""
    served = inspector.served
    channel = Grpc(served.grpc, served.keys, "alpha")
    asker = Asker(served, "alpha", channel, random.Random(seed))
    tasks = [asyncio.create_task(asker.ask("stream", Manner(pause_s=0.5))) for _ in range(HELD)]
    seen: list[str] = []
    while not seen and not all(task.done() for task in tasks):
        seen = await inspector.busy()
        await asyncio.sleep(0.01)
    await asyncio.gather(*tasks)
    await channel.close()
    return Control("in flight", any(one.startswith("in flight") for one in seen), "; ".join(seen)[:200])
