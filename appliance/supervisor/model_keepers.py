"""Keepers of the models' shared sandboxes, two for each model. Models come and go, sleep and wake while the supervisor
runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from appliance.common.catalog import ModelFiles
from appliance.common.config import ApplianceConfig, ModelConfig
from appliance.common.control import Fault, Freeze, HandedOver
from appliance.common.control_models import ModelRest, ModelServed
from appliance.common.model_memory import ModelNeed, model_need
from appliance.common.served_models import LEAVING, SERVED, entry_digest
from appliance.common.sleep_rules import ALWAYS, ASLEEP, AWAKE, WAKING
from appliance.supervisor.boot import BootPlan
from appliance.supervisor.keeper import Keeper
from appliance.supervisor.lifecycle import Life, State
from appliance.supervisor.sandbox_looks import SandboxLooks
from isolation.ipc.messages import Role


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model whose files were found and hashed, and the boots of its two shared sandboxes."""

    appliance: ApplianceConfig
    """Configuration that the plans were made by."""
    entry: ModelConfig
    files: ModelFiles
    plans: tuple[BootPlan, ...]

    @property
    def need(self) -> ModelNeed:
        """Memory of the machine that its shared engine takes; reads the sizes of its files.

        Raises:
            OSError: a file is gone.
        """
        on_card = any(plan.card is not None for plan in self.plans)
        return model_need(self.entry, self.files.engine, on_card=on_card)


@dataclass(slots=True)
class _Served:
    """A model with its keepers, and their tasks once they run."""

    planned: PlannedModel
    keepers: tuple[Keeper, ...]
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    state: str = SERVED
    sleep_state: str = AWAKE
    cause: str = ""
    """Why the last wake failed."""
    boot_s: float = 0.0
    """Seconds that the last boot took, of lives that are over."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the model falls asleep or wakes."""
    again: bool = False
    drained: asyncio.Event = field(default_factory=asyncio.Event)


class ModelKeepers:
    """All of them; every method runs in one event loop."""

    def __init__(self, make: Callable[[BootPlan], Keeper], failed: Callable[[], None]) -> None:
        """``make`` gives the keeper of a plan; ``failed`` is called when one has ended by itself, which is a defect."""
        self._make = make
        self._failed = failed
        self._models: dict[str, _Served] = {}
        self.looks = SandboxLooks()  # at load and memory of all sandboxes
        self._boots = 0
        """Highest generation of a sandbox that is gone."""
        self.digests: dict[str, str] = {}
        """Digest of each served model's files; read by others and changed here alone."""
        self.signers: dict[str, str] = {}
        """Id of the key that has signed each served model, empty where none must have; changed with ``digests``."""
        self.coming: tuple[BootPlan, ...] = ()
        """Boots that were reviewed and are not carried out yet: what they hold of a card is taken; also for other
        threads."""
        self.on_wake: Callable[[], None] = lambda: None
        """Called when a model begins to wake; set by the owner."""
        self._holds = False  # Whether the boots of a model wait at their gates.
        self._falling_asleep: set[asyncio.Task[None]] = set()
        """Tasks of keepers that are ended because their model falls asleep."""
        self.ended: list[asyncio.Task[None]] = []
        """Tasks of keepers that ended by themselves."""

    @property
    def names(self) -> list[str]:
        """Models, those that are leaving among them."""
        return list(self._models)

    @property
    def entries(self) -> dict[str, str]:
        """Digest of each model's entry, of those that stay."""
        return {name: entry_digest(one.planned.entry) for name, one in self._models.items() if one.state == SERVED}

    @property
    def leaving(self) -> frozenset[str]:
        """Models that are being ended."""
        return frozenset(name for name, one in self._models.items() if one.state == LEAVING)

    @property
    def staying(self) -> list[PlannedModel]:
        """Models that are not being ended, each with the boots that its keepers have now; also for other threads."""
        return [
            replace(one.planned, plans=tuple(keeper.plan for keeper in one.keepers))
            for one in tuple(self._models.values())
            if one.state == SERVED
        ]

    @property
    def keepers(self) -> list[Keeper]:
        """Keepers of all models; also for other threads."""
        return [keeper for one in tuple(self._models.values()) for keeper in one.keepers]

    @property
    def starting(self) -> list[Keeper]:
        """Keepers of the models that do not begin asleep."""
        return [keeper for one in self._models.values() if one.sleep_state != ASLEEP for keeper in one.keepers]

    @property
    def awake(self) -> frozenset[str]:
        """Models whose sandboxes are there or boot: the others take no memory."""
        return frozenset(name for name, one in self._models.items() if one.sleep_state != ASLEEP)

    @property
    def booting(self) -> frozenset[str]:
        """Models that are awake or waking, and whose engine boots or is down: not all of their memory is taken."""
        return frozenset(
            name
            for name, one in self._models.items()
            if one.sleep_state != ASLEEP
            and any(keeper.plan.role is Role.ENGINE and keeper.life.state is not State.READY for keeper in one.keepers)
        )

    @property
    def reserved(self) -> int:
        """Memory that wakes may need: of those under way, and of the largest model that sleeps; also for other
        threads."""
        waking, asleep = 0, 0
        for one in tuple(self._models.values()):
            with suppress(OSError):  # Its files are gone.
                need = 0 if one.sleep_state == AWAKE else one.planned.need.about
                waking += need if one.sleep_state == WAKING else 0
                asleep = max(asleep, need if one.sleep_state == ASLEEP else 0)
        return waking + asleep

    def planned(self, name: str) -> PlannedModel:
        """Plan of a model that is served and stays.

        Raises:
            KeyError: there is none.
        """
        one = self._models[name]
        if one.state != SERVED:
            raise KeyError(name)
        return one.planned

    def told(self) -> Iterator[ModelServed | ModelRest]:
        """Every model, as the gateway is told."""
        for name in self._models:
            yield self.word(name)
            yield self.sleep_word(name)

    def sleep_word(self, name: str) -> ModelRest:
        """Whether a model's sandboxes are there, as the gateway is told."""
        one = self._models[name]
        try:
            need = one.planned.need.about
        except OSError:  # Its files are gone; a wake will say so.
            need = 0
        boot_ms = round(1e3 * max(one.boot_s, *(keeper.boot_s for keeper in one.keepers)))
        entry = one.planned.entry
        return ModelRest(name, one.sleep_state, one.cause, need, boot_ms, entry.keep, round(1e3 * entry.idle_s))

    def word(self, name: str) -> ModelServed:
        """One model, as the gateway is told."""
        one = self._models[name]
        entry = one.planned.entry
        adapters = [f"{adapter} {digest.hex()}" for adapter, digest in entry.adapter_digests.items()]
        truncates, again = int(entry.truncates), int(one.again)
        templated, labels = int(entry.pairs == "template"), list(entry.labels)
        entry_ = entry_digest(entry)
        return ModelServed(name, entry.runner, truncates, entry_, one.state, again, adapters, templated, labels)

    def add(self, planned: PlannedModel) -> None:
        """Take a model; its sandboxes are not booted before ``start``. One that is not always kept begins asleep."""
        name = planned.entry.name
        assert name not in self._models, "an earlier model of this name has ended"
        sleep_state = AWAKE if planned.entry.keep == ALWAYS else ASLEEP
        self._models[name] = _Served(planned, self._keepers(planned), sleep_state=sleep_state)
        self.digests[name], self.signers[name] = planned.files.digest, planned.files.signer

    def _keepers(self, planned: PlannedModel) -> tuple[Keeper, ...]:
        keepers = tuple(self._make(plan) for plan in planned.plans)
        for keeper in keepers:
            keeper.looks = self.looks
            if self._boots:  # Generations go on over all lives: no late word about one is taken for another's.
                keeper.life = Life(generation=self._boots, restarts=-1)
        return keepers

    def start(self, name: str) -> None:
        """Boot a model's sandboxes and keep them alive, unless it sleeps or has left meanwhile. Idempotent."""
        one = self._models.get(name)
        if one is None or one.tasks or one.state != SERVED or one.sleep_state == ASLEEP:
            return
        for keeper in one.keepers:
            task = asyncio.create_task(keeper.run(), name=f"keeper of {keeper.plan.name}")
            task.add_done_callback(self._note_end)
            one.tasks.append(task)

    async def sleep(self, name: str) -> bool:
        """End the sandboxes of a model that stays; returns whether that was to be done, when nothing is left of them.
        Their checkpoints are kept."""
        one = self._models.get(name)
        if one is None:
            return False
        async with one.turn:
            if one.state != SERVED or one.sleep_state != AWAKE:
                return False
            await self._end_for_sleep(one)
            return True

    async def _end_for_sleep(self, one: _Served) -> None:
        self._falling_asleep.update(one.tasks)
        for keeper in one.keepers:
            keeper.stop()
        await asyncio.gather(*one.tasks, return_exceptions=True)
        if one.state != SERVED:
            return  # It is taken away meanwhile, with the keepers that it has.
        self._boots = max(self._boots, *(keeper.life.generation for keeper in one.keepers))
        one.boot_s = max((keeper.boot_s for keeper in one.keepers if keeper.boot_s), default=one.boot_s)
        one.tasks.clear()
        # An engine that was given another card wakes on that one.
        if (plans := tuple(keeper.plan for keeper in one.keepers)) != one.planned.plans:
            one.planned = replace(one.planned, plans=plans)
        one.keepers, one.sleep_state = self._keepers(one.planned), ASLEEP

    async def wake(self, name: str, waking: Callable[[], None], ends: Collection[asyncio.Task[None]] = ()) -> bool:
        """Boot the sandboxes of a sleeping model; returns whether that was to be done, once both are ready or it sleeps
        again because one is not.

        Args:
            name: of the model.
            waking: called when it begins.
            ends: models that fall asleep. Their memory is there when they have: no program starts before, but its
                sandbox is made meanwhile. Cards are chosen by what is free, so nothing of a model on one is. Nor is
                anything of a second model: boots at their gates hold threads of the pool that boots share, and what
                they wait for may itself wait for a boot.
        """
        one = self._models.get(name)
        if one is None:
            return False
        async with one.turn:
            if self._holds or any(keeper.plan.card is not None for keeper in one.keepers):
                await asyncio.gather(*ends, return_exceptions=True)
            if one.state != SERVED or one.sleep_state != ASLEEP:
                return False
            one.sleep_state, one.cause = WAKING, ""
            self.on_wake()
            waking()
            await self._start_behind(one, ends)
            one.cause = await _came_up(one.keepers, one.tasks)
            if one.cause:
                await self._end_for_sleep(one)
            else:
                one.sleep_state = AWAKE
            return True

    async def _start_behind(self, one: _Served, ends: Collection[asyncio.Task[None]]) -> None:
        """Boot a model's sandboxes, and let their programs start once all of ``ends`` have ended."""
        name = one.planned.entry.name
        waits = any(not task.done() for task in ends)
        if not waits:
            self.start(name)
            return
        self._holds = True
        try:
            for keeper in one.keepers:
                keeper.gate.shut()
            self.start(name)
            # Where this is given up, the gates stay shut: what waits at them ends with its keeper.
            await asyncio.gather(*ends, return_exceptions=True)
            for keeper in one.keepers:
                keeper.gate.open()
        finally:
            self._holds = False

    def leave(self, name: str, *, again: bool) -> None:
        """Note that a model shall end; ``again``: another of its name comes after it."""
        one = self._models[name]
        one.state, one.again = LEAVING, again

    def drained(self, name: str) -> None:
        """Note that no request uses a leaving model any more; a late word about an earlier one is nothing."""
        one = self._models.get(name)
        if one is not None and one.state == LEAVING:
            one.drained.set()

    async def end(self, name: str, bound_s: float) -> PlannedModel:
        """End a leaving model's sandboxes once it is drained, or after ``bound_s`` seconds; returns its plan, when
        nothing is left of them."""
        one = self._models[name]
        try:
            async with asyncio.timeout(bound_s):
                await one.drained.wait()
        except TimeoutError:
            pass  # A gateway that was taken over keeps nothing alive.
        for keeper in one.keepers:
            keeper.stop()
        await asyncio.gather(*one.tasks, return_exceptions=True)
        self._boots = max(self._boots, *(keeper.life.generation for keeper in one.keepers))
        del self._models[name], self.digests[name], self.signers[name]
        return one.planned

    def offer(self) -> None:
        """Hand ready sandboxes to the gateway that has attached, and boot those that no gateway was expected for."""
        for keeper in self.keepers:
            keeper.gateway_came()

    def gateway_left(self, *, last: bool = False) -> None:
        """End sandboxes whose channel went with the gateway; no request uses a leaving model any more. Behind the
        ``last`` gateway none is booted anew."""
        for one in self._models.values():
            if one.state == LEAVING:
                one.drained.set()
        for keeper in self.keepers:
            keeper.gateway_left(last=last)

    def carry_out(self, wish: Fault | Freeze | HandedOver) -> None:
        """Do what the gateway wishes of one shared sandbox."""
        for keeper in self.keepers:
            if (keeper.plan.model, keeper.plan.role_name) != (wish.model, wish.role):
                continue
            if isinstance(wish, Fault):
                keeper.fault(wish.generation, wish.reason)
            elif isinstance(wish, HandedOver):
                keeper.taken(wish)
            else:
                keeper.freeze(wish.generation, frozen=bool(wish.frozen))

    async def close(self) -> None:
        """End all models; returns when nothing is left of them."""
        for keeper in self.keepers:
            keeper.stop()
        await asyncio.gather(*(task for one in self._models.values() for task in one.tasks), return_exceptions=True)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        asked = task in self._falling_asleep or any(
            one.state == LEAVING and task in one.tasks for one in self._models.values()
        )
        self._falling_asleep.discard(task)
        if asked and not task.cancelled() and task.exception() is None:
            return
        self.fail(task)

    def fail(self, task: asyncio.Task[None]) -> None:
        """Note a task that has ended and should not have, which is a defect."""
        self.ended.append(task)
        self._failed()


async def _came_up(keepers: tuple[Keeper, ...], tasks: list[asyncio.Task[None]]) -> str:
    """Wait until all sandboxes are ready for the first time; returns why one is not, empty where all are."""
    boots = [keeper.first_boot for keeper in keepers]
    while not all(boot.done() for boot in boots):
        waits: list[asyncio.Future[Any]] = [*(boot for boot in boots if not boot.done()), *tasks]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if problems := [problem for boot in boots if boot.done() and (problem := boot.result())]:
            return problems[0]
        if any(task.done() for task in tasks):
            return "it was ended while it started"
    return next((problem for boot in boots if (problem := boot.result())), "")
