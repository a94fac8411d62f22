"""A host with models that sleep, in virtual time: the gateway's own control of sleep and wake, and a stand-in for the
supervisor, whose wakes take seconds and get longer where several run on two cores.

``serve`` has it answer a sequence of requests and returns what became of them; ten minutes take two seconds. With
``follow`` each refusal is followed: when the same request would first have been let in, beside what it was told.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from structlog.testing import capture_logs

from appliance.common.control import Control
from appliance.common.control_models import ModelRest, SleepModel, WakeModel
from appliance.common.errors import ModelAsleepError
from appliance.common.model_uses import ModelUses
from appliance.common.sleep_rules import ASLEEP, AWAKE, WAKING, WHILE_USED, WINDOW_S, Refuse, WakeGuard
from appliance.common.wake_queue import WakeQueue
from appliance.gateway.sandboxes.model_sandboxes import ModelSandboxes
from appliance.gateway.sandboxes.sleep_control import LONGEST_WAIT_S, SleepControl
from appliance.gateway.sandboxes.sleep_decisions import SleepDecisions
from tests.appliance.gateway.request.virtual_time import VirtualLoop, virtual_now

Request = tuple[float, str, str]
"""Time in seconds, model, tenant."""

CORES = 2
CORES_OF_WAKE = 1.5
"""Cores that a wake keeps busy."""
NEED_BYTES = 100
IDLE_MS = 86_400_000
NO_DEADLINE = 1e9
LOOK_S = 2.0
"""Seconds between two looks at what is idle."""
SLICES = 10
"""Parts of some work between which it is looked at how much runs beside it."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds that work takes on an idle machine: what 300 MB take on two cores."""

    wake_s: float = 1.2
    end_s: float = 0.4
    answer_s: float = 0.2


@dataclass(frozen=True, slots=True)
class Served:
    """What became of a sequence."""

    hit_rate: float
    """Share of all requests that waited for no wake."""
    refused: float
    """Share that was refused with an estimate."""
    wakes_a_minute: float
    most_wakes: int
    """Most wakes within any 60 s."""
    waits_s: tuple[float, ...]
    """Seconds that requests waited that were served after a wake, sorted."""
    refused_after_s: tuple[float, ...]
    """Seconds after which each refusal came, sorted."""
    estimates: tuple[tuple[float, float], ...] = ()
    """Of each refusal that was followed to its end: the seconds that it was told, and those after which the request
    would have been answered, had it come again at the best time."""

    @property
    def longest_wait_s(self) -> float:
        """Longest wait that ended with an answer."""
        return max(self.waits_s, default=0.0)


class _Link:
    """A link to nothing."""

    ready = table = None
    generation, hang = 1, ""

    def close(self) -> None:
        """Nothing is open."""

    def set_quotas(self, _quotas: object) -> None:
        """As an engine's."""


@dataclass(slots=True)
class Host:
    """A host with room for so many models."""

    places: int
    speed: Speed = field(default_factory=Speed)
    guard: WakeGuard = field(default_factory=WakeGuard)
    queue: WakeQueue = field(default_factory=WakeQueue)
    uses: ModelUses = field(default_factory=ModelUses)
    models: dict[str, ModelSandboxes] = field(default_factory=dict)
    _control: SleepControl = field(init=False)
    _using: Counter[str] = field(default_factory=Counter)
    _ending: set[asyncio.Task[None]] = field(default_factory=set)
    _waking: set[asyncio.Task[None]] = field(default_factory=set)
    _busy: float = 0.0
    """Cores that are asked for now."""
    _wakes: list[float] = field(default_factory=list)
    _waits: list[float] = field(default_factory=list)
    _refused: list[float] = field(default_factory=list)
    waits_of: dict[str, list[float]] = field(default_factory=dict)
    """Seconds that requests of each model waited, of those that were answered, in the order of their answers."""
    refused_of: Counter[str] = field(default_factory=Counter)
    """Refused requests of each model, at once or after a wait."""
    needs: dict[str, int] = field(default_factory=dict)
    """Bytes of models that need more or less than ``NEED_BYTES``."""
    follow: bool = False
    _told: list[tuple[ModelSandboxes, str, float, float]] = field(default_factory=list)
    """Refusals that are followed: model, tenant, time, and the seconds that it was told."""
    _estimates: list[tuple[float, float]] = field(default_factory=list)

    def serve(self, requests: Sequence[Request]) -> Served:
        """Serve a sequence; once for each host."""
        with capture_logs(), asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(self._serve(requests))
        total, minutes = len(requests), requests[-1][0] / 60
        most = max((sum(at <= other < at + WINDOW_S for other in self._wakes) for at in self._wakes), default=0)
        hits = sum(not one for one in self._waits)
        waits = tuple(sorted(one for one in self._waits if one))
        counts = hits / total, len(self._refused) / total, len(self._wakes) / minutes
        return Served(*counts, most, waits, tuple(sorted(self._refused)), tuple(self._estimates))

    async def _serve(self, requests: Sequence[Request]) -> None:
        self.models = {name: ModelSandboxes(name) for name in sorted({name for _, name, _ in requests})}
        for model in self.models.values():
            model.clock = virtual_now
        decisions = SleepDecisions(
            self.models,
            lambda: True,
            live=lambda: {self.models[name]: count for name, count in self._using.items() if count},
            budget=self.places * NEED_BYTES,
            available=lambda: (self.places + 1) * NEED_BYTES * len(self.models),
            clock=virtual_now,
            guard=self.guard,
            queue=self.queue,
            uses=self.uses,
        )
        self._control = SleepControl(decisions, self._take, lambda _name: 0)
        for name in self.models:
            self._tell(name, ASLEEP)
        looking = asyncio.create_task(self._look())
        began, tasks = virtual_now(), list[asyncio.Task[None]]()
        for at, name, tenant in requests:
            await asyncio.sleep(max(0.0, began + at - virtual_now()))
            tasks.append(asyncio.create_task(self._answer(name, tenant)))
        await asyncio.gather(*tasks)
        looking.cancel()

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self._control.look()
            self._told = [one for one in self._told if not self._ended(*one)]

    def _ended(self, model: ModelSandboxes, tenant: str, came: float, told_s: float) -> bool:
        """Whether a refused request would be let in now; notes when it would have been answered."""
        left_s = self._lets_in_s(model, tenant)
        if left_s is not None:
            self._estimates.append((told_s, virtual_now() - came + left_s))
        return left_s is not None

    def _lets_in_s(self, model: ModelSandboxes, tenant: str) -> float | None:
        """Seconds until a request that came now would find its model awake; None where it would be refused. Nothing
        changes by it."""
        parts, sleep = self._control.decisions, model.sleep_state
        if not sleep.asleep:
            return sleep.left_s(virtual_now()) if sleep.waking else 0.0
        decision = parts.decision(model, tenant)
        counted = virtual_now() < sleep.counted_until
        if isinstance(decision, Refuse) or (not counted and parts.guarded_s(model, tenant, decision)):
            return None
        queue = parts.queue
        if not self._control.waits.any_for(model):
            queue = queue.with_turn(model.name, parts.turn(model, decision, tenant))
        begins_s = parts.begins_s(model, decision, queue)
        return begins_s + sleep.estimate_s if begins_s <= LONGEST_WAIT_S else None

    async def _answer(self, name: str, tenant: str) -> None:
        model, came = self.models[name], virtual_now()
        self._using[name] += 1
        try:
            waited_s = await self._control.awaken(model, NO_DEADLINE, tenant)
            await self._work(self.speed.answer_s, 1.0)
        except ModelAsleepError as error:
            self._refused.append(virtual_now() - came)
            self.refused_of[name] += 1
            if self.follow:
                self._told.append((model, tenant, virtual_now(), error.retry_after_s or 0.0))
        else:
            self._waits.append(waited_s)
            self.waits_of.setdefault(name, []).append(waited_s)
            self._control.served(model, tenant, came)
        finally:
            self._using[name] -= 1
            model.sleep_state.used_at = virtual_now()
            self._control.waits.changed()

    def _take(self, order: Control) -> None:
        """Carry out an order, as the supervisor does: what sleeps has ended before what wakes starts."""
        if isinstance(order, SleepModel):
            self._begin(self._ending, self._end(order.model))
        elif isinstance(order, WakeModel):
            self._begin(self._waking, self._wake(order.model, tuple(self._ending)))

    def _begin(self, tasks: set[asyncio.Task[None]], work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def _end(self, name: str) -> None:
        await self._work(self.speed.end_s, 0.5)
        self._tell(name, ASLEEP)

    async def _wake(self, name: str, ends: tuple[asyncio.Task[None], ...]) -> None:
        self._wakes.append(virtual_now())
        self._tell(name, WAKING)
        await asyncio.gather(*ends)
        await self._work(self.speed.wake_s, CORES_OF_WAKE)
        model = self.models[name]
        model.set_engine(_Link())  # type: ignore[arg-type]
        model.set_text(_Link())  # type: ignore[arg-type]
        self._tell(name, AWAKE)

    async def _work(self, seconds: float, cores: float) -> None:
        """Take so long, and longer beside other work."""
        self._busy += cores
        for _ in range(SLICES):
            await asyncio.sleep(seconds / SLICES * max(1.0, self._busy / CORES))
        self._busy -= cores

    def _tell(self, name: str, state: str) -> None:
        boot_ms = round(1e3 * self.speed.wake_s)
        need_bytes = self.needs.get(name, NEED_BYTES)
        self._control.take(ModelRest(name, state, "", need_bytes, boot_ms, WHILE_USED, IDLE_MS))
