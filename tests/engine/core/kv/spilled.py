"""Engines whose blocks leave them, and the supervisor's end of it: for tests of every backend."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

from appliance.supervisor.spill_port import SpillPort
from appliance.supervisor.spill_store import SpillStore
from appliance.supervisor.spill_tiers import SpillLimits
from engine.core.engine import Engine
from isolation.ipc.engine import StepOutput, Submit
from isolation.ipc.messages import FailureCode, Role
from isolation.keys.keyring import Keyring
from tests.engine.support import make_engine, model_config, namespace, random_model, submit
from tests.isolation.ipc.wire import Wire, connect

MODEL = random_model(model_config())
BUSY_NS = 30_000_000_000
"""Patience with a store that shares its processor with other tests."""

TENANTS = {namespace(number): f"tenant-{number}" for number in (1, 2, 3)} | {namespace(8): "group/team"}


@dataclass
class Spilling:
    """An engine, its spill channel, and the supervisor's end of it."""

    engine: Engine
    wire: Wire
    port: SpillPort
    store: SpillStore
    outputs: dict[int, list[int]]
    cached: dict[int, int]
    failures: dict[int, FailureCode]
    restored: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """Tokens that came back for a request from memory, disk and store."""

    def run(self, *submits: Submit) -> None:
        """Serve these to their ends, looking again and again as the serving loop does."""
        for one in submits:
            self.engine.add(one)
        pause = threading.Event()
        while self.engine.has_live_requests or self.engine.has_work:
            output = self.engine.step()
            if output is not None:
                self.take(output)
            elif self.engine.rest_s:
                pause.wait(self.engine.rest_s)

    def take(self, output: StepOutput) -> None:
        """Note what an output says."""
        for start in output.starts:
            self.cached[start.request] = start.cached_tokens
            self.restored[start.request] = start.memory_tokens, start.disk_tokens, start.store_tokens
        for request, token in zip(output.requests, output.token_ids, strict=True):
            self.outputs.setdefault(request, []).append(token)
        for failure in output.failures:
            self.failures[failure.request] = failure.code


@contextmanager
def spilling(
    folder: Path, *, num_blocks: int = 24, limits: SpillLimits | None = None, **fields: object
) -> Iterator[Spilling]:
    """An engine whose blocks go to a store of its own. It waits long for them: this machine may be busy."""
    wire = connect(Role.SPILL)
    keyring = Keyring(folder / "keys", os.urandom(32))
    store = SpillStore(limits or SpillLimits(64 << 20), keyring)
    port = SpillPort(wire.host, "00", store, TENANTS.get, "engine")
    engine = make_engine(MODEL, num_blocks=num_blocks, max_context=80, spill=wire.guest, **fields)
    port.start()
    try:
        with patch.multiple("engine.core.kv.spill", PATIENCE_NS=BUSY_NS, LONGEST_NS=BUSY_NS):
            yield Spilling(engine, wire, port, store, {}, {}, {})
    finally:
        wire.guest.close()
        port.close()
        wire.raw.close()
        store.close()
        keyring.close()


def prompt(seed: int, length: int = 41) -> list[int]:
    """Token ids that differ from the first on for every seed."""
    return [(seed * 31 + place * 7) % 97 for place in range(length)]


def alone(*submits: Submit) -> dict[int, list[int]]:
    """The same requests in an engine of their own without spill and without a cache."""
    engine = make_engine(MODEL, num_blocks=200, max_context=80, prefix_caching=False)
    outputs: dict[int, list[int]] = {}
    for one in submits:
        engine.add(one)
        while engine.has_work:
            output = engine.step()
            for request, token in zip(output.requests, output.token_ids, strict=True) if output else ():
                outputs.setdefault(request, []).append(token)
    return outputs


def kv_of(engine: Engine, token_ids: list[int], tenant: int = 1, **fields: object) -> list[bytes]:
    """The bytes of a cached prefix's blocks, as they lie in the pool."""
    assert engine.spill is not None
    asked = submit(0, token_ids, tenant=tenant, **fields)
    blocks = [engine.spill.pool.find(one) for one in engine.spill.cache.chain(asked)]
    return [engine.spill.contents.read(block) for block in blocks if block is not None]
