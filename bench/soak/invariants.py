"""What must hold after every fault, looked at while nobody asks anything."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field

from appliance.common.audit import files
from appliance.common.audit.checkpoint import CheckpointError
from appliance.common.audit.verify import read_verifier, verify
from bench.soak import census, memory
from bench.soak.answers import RIGHT, compare
from bench.soak.clients import Grpc
from bench.soak.load import References
from bench.soak.log_watch import LogWatch
from bench.soak.questions import GRPC, Asker
from bench.soak.served import TENANTS, Served

READY_S = 60.0
"""From the end of a fault to right answers for everybody, of every kind: a sandbox that has died again and again within
a minute waits up to 30 s before it is booted, and a boot takes 2 to 10 s. A busy machine is given more, by what the
first start took."""

SETTLE_S = 20.0
"""Within which the dead must be gone and counts be as before."""

LOOK_S = 0.2
PROBES = (("alpha", "whole"), ("beta", "structured"), ("gamma", "chat"), ("alpha", "vectors"), ("beta", GRPC))


@dataclass(slots=True)
class Inspector:
    """Holds what things were like at rest before anything was done to them."""

    served: Served
    references: References
    seed: int
    log: LogWatch
    before: Counter[str] = field(default_factory=Counter)
    samples: list[memory.Sample] = field(default_factory=list)
    _probes: int = 0

    async def recovered(self) -> float | None:
        """Seconds until every probe was answered right; None when that took too long."""
        began = time.monotonic()
        waiting = list(PROBES)
        while waiting:
            self._probes += 1
            tenant, name = waiting[0]
            if await self._probe(tenant, name):
                waiting.pop(0)
            elif time.monotonic() - began > READY_S * self.served.patience:
                return None
            else:
                await asyncio.sleep(LOOK_S)
        return time.monotonic() - began

    async def _probe(self, tenant: str, name: str) -> bool:
        channel = Grpc(self.served.grpc, self.served.keys, tenant)
        try:
            draw = random.Random(f"{self.seed}/probe/{self._probes}")
            answer = await Asker(self.served, tenant, channel, draw).ask(name)
        finally:
            await channel.close()
        return compare(answer, self.references[name]).kind == RIGHT

    async def note_rest(self) -> None:
        """Take counts as what is normal, once they have stayed the same for a while."""
        last = census.take(self.served)
        for _ in range(50):
            await asyncio.sleep(LOOK_S)
            now = census.take(self.served)
            if now == last:
                break
            last = now
        self.before = last

    async def inspect(self) -> list[str]:
        """Breaches, with nobody asking anything."""
        found = await self._quiet()
        found += await self._as_many()
        found += self._audit()
        found += self.log.look()
        await self._sample()
        return found

    async def _quiet(self) -> list[str]:
        """Nothing is counted as running, here or in an engine."""
        deadline = time.monotonic() + SETTLE_S * self.served.patience
        while True:
            busy = await self.busy()
            if not busy or time.monotonic() > deadline:
                return busy
            await asyncio.sleep(LOOK_S)

    async def busy(self) -> list[str]:
        """What runs, or is not as it should be at rest, at this moment."""
        try:
            status = await self.served.status()
        except LookupError:
            return ["the operator's listener does not answer"]
        found = [f"in flight of {one['id']}: {one['in_flight']}" for one in status["tenants"] if one["in_flight"]]
        if {one["id"] for one in status["tenants"]} != set(TENANTS):
            found.append(f"tenants are {[one['id'] for one in status['tenants']]}")
        for model in status["models"]:
            if model["state"] != "ready":
                found.append(f"{model['name']} is {model['state']}")
            found += [
                f"{model['name']} {what}: {model['engine'][what]}"
                for what in ("running", "waiting")
                if model["engine"][what]
            ]
        return found

    async def _as_many(self) -> list[str]:
        deadline = time.monotonic() + SETTLE_S * self.served.patience
        while True:
            found = census.exceeding(self.before, census.take(self.served))
            if not found or time.monotonic() > deadline:
                return found + [f"stray {one}" for one in census.strays(self.served)]
            await asyncio.sleep(LOOK_S)

    def _audit(self) -> list[str]:
        return audit_problems(self.served)

    async def _sample(self) -> None:
        # Kept grammars come and go with what was asked last, 15 MiB of their sandbox each: at every look it is the same
        # ones that are there.
        for tenant in TENANTS:
            await self._probe(tenant, "structured")
        await self._quiet()
        try:
            sandboxes = await self.served.sandboxes()
        except LookupError:
            return
        pids = {name: int(one["pid"]) for name, one in sandboxes.items() if one["pid"]}
        self.samples += memory.take(self.served, pids, time.monotonic())


def audit_problems(served: Served) -> list[str]:
    """What the log's own verifier finds."""
    folder = served.room.audit
    try:
        report = verify(folder, read_verifier(folder / files.PUBLIC_KEY))
    except (OSError, CheckpointError, files.LogFormatError) as error:
        return [f"the audit log cannot be read: {error}"]
    return [f"audit: {problem}" for problem in report.problems]
