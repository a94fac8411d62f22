"""What it costs an engine to send a tenant's prompts when they are computed: ``python -m bench.kv_computed [ROUNDS]``.

Two engines of the embedded model on compiled kernels, each with a supervisor's end in a process of its own that seals
every block for this host and for the fleet and gives it to a carrier and a real store. They differ by one word: the
first is told to send blocks when they are computed, the second when they are evicted, which none is. They take turns,
each with prompts that nobody sent before. A round is one long prompt of the tenant that shares beside rows of another
tenant that decode. Also measured: the rate at which the loop copies blocks, from which the bound of
``engine.core.kv.backlog.BYTES_PER_S`` is known in parts of a core.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from unittest.mock import patch

from appliance.common.catalog import embedded_model
from appliance.operator import kernels
from appliance.supervisor.fleet_kv import EngineLife, FleetKv
from appliance.supervisor.kv_carrier import KvCarrier
from appliance.supervisor.spill_port import SpillPort
from appliance.supervisor.spill_store import SpillStore
from appliance.supervisor.spill_tiers import SpillLimits
from engine.backends.native.manifest import FORMS
from engine.config import EngineConfig
from engine.core.engine import Engine
from engine.core.kv.backlog import BYTES_PER_S
from engine.startup.load import load_engine
from isolation.ipc.engine import Submit
from isolation.ipc.messages import Role
from isolation.ipc.sampling import Sampling
from isolation.keys.fleet_seal import EPOCH_BYTES, Generation
from isolation.keys.keyring import Keyring
from tests.appliance.carrier.carrying import carrier
from tests.isolation.ipc.wire import Wire, connect
from tests.stores import store

PROMPT, OUTPUT, OTHERS = 1_600, 32, 4
GENERATION = Generation("alpha", 1, bytes(range(32)))
SPACE, OTHER = GENERATION.namespace(), b"o" * 32
PRODUCER = b"p" * 32
STORE_BYTES = 1 << 30
LEARN_S = 1.0
"""Seconds for an engine to be told of the namespace and to look."""


class Held:
    """The fleet's keys, as a host holds them that has a lease."""

    fleet_key = b"f" * 32

    def current(self, namespace: bytes) -> Generation | None:
        """Return the one generation."""
        return GENERATION if namespace == SPACE else None


@dataclass
class Side:
    """One engine with its supervisor's end."""

    name: str
    engine: Engine
    wire: Wire
    requests: int = 0


@dataclass(frozen=True, slots=True)
class Round:
    """One prompt of the tenant that shares."""

    first_s: float
    steps_per_s: float
    """While the tenant's answer and those of others are decoded."""
    loop_s: float
    """Processor time of the engine's thread up to the end."""


def supervise(wire: Wire, folder: Path, name: str, *, computed: bool) -> None:
    """Serve one engine until the process is ended."""
    keyring = Keyring(folder / f"keys-{name}", os.urandom(32))
    limits = SpillLimits(STORE_BYTES, store=STORE_BYTES, store_seconds=3_600)
    kept = SpillStore(limits, keyring)
    way = KvCarrier(folder / "c", 3_600)
    fleet = FleetKv(
        Held(),  # type: ignore[arg-type]  # as much of it as is asked
        *(way, PRODUCER, frozenset({PRODUCER}), limits, kept.figures),
        writes_computed=computed,
    )
    life = EngineLife(os.urandom(EPOCH_BYTES), "00" * 32, b"b" * 32)
    port = SpillPort(wire.host, "00" * 32, kept, {SPACE: "alpha"}.get, name, fleet=(fleet, life))
    port.start()
    port.share(SPACE)
    told = 0
    while True:
        time.sleep(0.2)
        if told != kept.figures.fleet_stored:
            told = kept.figures.fleet_stored
            (folder / name).write_text(f"{told} {kept.figures.fleet_left_out} {kept.figures.store_away}")


@contextlib.contextmanager
def side(folder: Path, name: str, form: str, *, computed: bool) -> Iterator[Side]:
    """Start one engine, which computes in this form, and its supervisor's end."""
    wire = connect(Role.SPILL)
    serving = multiprocessing.get_context("fork").Process(
        target=supervise, args=(wire, folder, name), kwargs={"computed": computed}
    )
    serving.start()
    config = EngineConfig(
        model_dir=str(embedded_model()),
        model_digest="00" * 32,
        kernels=str(kernels.installed() or ""),
        kv_bytes=512 << 20,
        max_context=2 * PROMPT,
        form=form,
        spill=True,
    )
    try:
        yield Side(name, load_engine(config, spill=wire.guest, say=print), wire)
    finally:
        if serving.pid is not None:
            os.kill(serving.pid, signal.SIGKILL)
        serving.join()


def measured(one: Side, seed: int) -> Round:
    """Serve a prompt that nobody sent before, beside rows of another tenant, and wait until all is sent."""
    one.requests += OTHERS + 1
    engine, count = one.engine, one.requests
    greedy, first = Sampling(temperature=0.0), count - OTHERS

    def ask(request: int, namespace: bytes, length: int, output: int) -> None:
        ids = array("I", [(seed * 7919 + request * 131 + place * place) % 500 + 10 for place in range(length)])
        engine.add(Submit(request, namespace, ids, output, sampling=greedy, ignore_eos=True))

    for number in range(OTHERS):
        ask(first + number, OTHER, 32, PROMPT)
    for _ in range(8):
        engine.step()
    used, began = time.thread_time(), time.perf_counter()
    ask(count, SPACE, PROMPT, OUTPUT)
    first_at, steps, live = 0.0, 0, True
    while live:
        output = engine.step()
        if output is None:
            time.sleep(engine.rest_s)
            continue
        mine = count in output.requests
        steps += first_at > 0
        if mine and not first_at:
            first_at = time.perf_counter()
        live = not (mine and output.finishes[list(output.requests).index(count)])
    ended, loop = time.perf_counter(), time.thread_time() - used
    for number in range(OTHERS):
        engine.abort(first + number)
    while engine.has_work:
        engine.step()
    while engine.idle_wait_s(1.0) < 0.1:
        engine.look()
        time.sleep(0.002)
    return Round(first_at - began, steps / (ended - first_at), loop)


def copying(one: Side) -> float:
    """Return the bytes that the loop copies in a second of its time: block to bytes to ring."""
    tier = one.engine.spill
    if tier is None:
        raise SystemExit("blocks of this engine cannot leave it")
    ring, count, began = bytearray(tier.contents.size), 2_000, time.thread_time()
    for number in range(count):
        ring[:] = tier.contents.read(1 + number % 500)
    return count * tier.contents.size / (time.thread_time() - began)


def main(argv: list[str]) -> int:
    """Measure in turns and print medians."""
    rounds = int(argv[0]) if argv else 8
    with tempfile.TemporaryDirectory(prefix="kv-", dir="/tmp") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        # A prompt that nobody has costs either the wait for an answer of the store: not what is measured here.
        stack.enter_context(patch("engine.core.kv.spill.MAX_SOUGHT", 0))
        running = stack.enter_context(store(folder))
        stack.enter_context(carrier(folder / "c", running.address))
        print(running.version)
        sides = [stack.enter_context(side(folder, "computed", "", computed=True))]
        form = FORMS[sides[0].engine.form]
        sides.append(stack.enter_context(side(folder, "evicted", form, computed=False)))
        time.sleep(LEARN_S)
        for one in sides:
            one.engine.look()
        found: dict[str, list[Round]] = {one.name: [] for one in sides}
        for number in range(rounds + 1):
            for one in sides if number % 2 else reversed(sides):
                got = measured(one, number)
                if number:  # The first round warms up.
                    found[one.name].append(got)
                    print(one.name, got, flush=True)
        time.sleep(1.0)
        for one in sides:
            path, tier = folder / one.name, one.engine.spill
            print(f"{one.name}: first token {median(got.first_s for got in found[one.name]) * 1e3:.0f} ms")
            print(f"  {median(got.steps_per_s for got in found[one.name]):.0f} steps/s while decoding")
            print(f"  {median(got.loop_s for got in found[one.name]) * 1e3:.0f} ms of the loop's processor time")
            print(f"  blocks sent {tier.counts.sent if tier else 0}; stored, left out, away:", end=" ")
            print(path.read_text() if path.exists() else "0 0 0")
        rate = copying(sides[0])
        print(f"the loop copies {rate / 1e9:.2f} GB/s: the bound is {BYTES_PER_S / rate:.1%} of a core")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
