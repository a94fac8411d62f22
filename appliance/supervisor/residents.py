"""Sandboxes of single tenants: booted on the gateway's request where the policy grants them and limits leave room.

The gateway may have been taken over, so its word is a wish. The supervisor reads the policy itself, counts itself, and
what it does not boot it refuses by name. Wishes are served one after the other; boots run beside each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import structlog

from appliance.common.control import REFUSED, Fault, Freeze, HandedOver, Release, SandboxDown, Want
from appliance.common.errors import StartError
from appliance.common.residency import NOTHING, Key, Need, ResidentLimits, declared, total, without_engine
from appliance.supervisor.boot import BootPlan
from appliance.supervisor.cards.placement import CardPlacement
from appliance.supervisor.forms import Forms
from appliance.supervisor.keeper import Keeper, Publish
from appliance.supervisor.lifecycle import Life
from appliance.supervisor.sandbox_looks import SandboxLooks
from isolation.gvisor.runtime import Runtime
from isolation.ipc.messages import Role
from policy.model import PolicySet

log = structlog.get_logger()

MAX_WISHES = 256
"""Most requests that wait; more are refused. A gateway asks once a second for each tenant and model at most."""


@dataclass(slots=True)
class _Held:
    """One sandbox, and the task of its keeper."""

    keeper: Keeper
    task: asyncio.Task[None]
    leaving: bool = False

    @property
    def need(self) -> Need:
        engine = self.keeper.plan.role is Role.ENGINE
        return Need(int(engine), int(not engine))


class Residents:
    """Keepers of single tenants' sandboxes. All methods run in one event loop; ``run`` serves requests until it is
    cancelled."""

    def __init__(
        self,
        limits: ResidentLimits,
        plan: Callable[[str, str, Role], BootPlan],
        runtime: Runtime,
        publish: Publish,
        policy: Callable[[], PolicySet],
        forms: Forms | None = None,
        placement: CardPlacement | None = None,
    ) -> None:
        """``plan`` raises ``KeyError`` for a model that is not served and ``StartError`` for one whose engine finds no
        GPU; ``policy`` reads the one in force. Both may block."""
        self._limits = limits
        self._plan = plan
        self._runtime = runtime
        self._publish = publish
        self._policy = policy
        self._forms = forms
        self._placement = placement
        self.looks = SandboxLooks()
        """Looks at load and memory of all sandboxes; set by the owner to that of the shared ones."""
        self._turn = asyncio.Lock() if placement is None else placement.turn
        """Held while engines get their cards."""
        self._wishes: asyncio.Queue[Want | BaseException] = asyncio.Queue()
        self._wanted: set[Key] = set()
        """Models and tenants whose requests wait or are served and were not taken back."""
        self._absent: set[str] = set()
        """Tenants that have no sandboxes of their own for now."""
        self._later: set[Key] = set()
        """Models and those tenants that are served again afterwards."""
        self._held: dict[tuple[Key, Role], _Held] = {}
        self._boots = 1
        self.is_external: Callable[[str], bool] = lambda _model: False
        """Whether a model is computed outside of the appliance, so that nobody has an engine of it; set by the
        owner."""

    @property
    def plans(self) -> list[BootPlan]:
        """Plans of all sandboxes that are there; also for other threads."""
        return [held.keeper.plan for held in tuple(self._held.values())]

    @property
    def keepers(self) -> list[Keeper]:
        """Keepers of all sandboxes that are there."""
        return [held.keeper for held in tuple(self._held.values())]

    def want(self, wish: Want) -> None:
        """Take the gateway's request for a tenant's sandboxes."""
        if self._wishes.qsize() + len(self._later) < MAX_WISHES and wish.tenant in self._absent:
            self._later.add((wish.model, wish.tenant))
        elif self._wishes.qsize() < MAX_WISHES and wish.tenant not in self._absent:
            self._wanted.add((wish.model, wish.tenant))
            self._wishes.put_nowait(wish)
        else:
            self._refuse(wish, "too many wishes wait")

    def release(self, wish: Release) -> None:
        """End a tenant's sandboxes, which the gateway no longer needs. A request for them that still waits is void: it
        would boot sandboxes that nothing uses or releases."""
        for keys in (self._wanted, self._later):
            keys.discard((wish.model, wish.tenant))
        self._end(lambda key: key == (wish.model, wish.tenant))

    def fault(self, fault: Fault) -> None:
        """End a sandbox that the gateway found at fault."""
        for (key, _), held in self._held.items():
            if key == (fault.model, fault.tenant) and held.keeper.plan.role_name == fault.role:
                held.keeper.fault(fault.generation, fault.reason)

    def freeze(self, wish: Freeze) -> None:
        """Freeze a sandbox that nobody uses, or let it go on."""
        for (key, _), held in self._held.items():
            if key == (wish.model, wish.tenant) and held.keeper.plan.role_name == wish.role:
                held.keeper.freeze(wish.generation, frozen=bool(wish.frozen))

    def taken(self, answer: HandedOver) -> None:
        """Note what became of a sandbox that the gateway was handed."""
        for (key, _), held in self._held.items():
            if key == (answer.model, answer.tenant) and held.keeper.plan.role_name == answer.role:
                held.keeper.taken(answer)

    def offer(self) -> None:
        """Hand ready sandboxes to the gateway that has attached."""
        for held in self._held.values():
            held.keeper.offer()

    def gateway_left(self) -> None:
        """End all of them; the next gateway asks for what it needs."""
        self._wanted.clear()
        self._later.clear()
        while not self._wishes.empty():
            self._wishes.get_nowait()
        self._end(lambda _key: True)

    async def run(self) -> None:
        """Serve the gateway's requests.

        Raises:
            BaseException: a keeper failed, which is a defect.
        """
        while True:
            wish = await self._wishes.get()
            if isinstance(wish, BaseException):
                raise wish
            try:
                await self._serve(wish)
            except KeyError:
                self._refuse(wish, "the model is not served here")
            except StartError as error:
                self._refuse(wish, error.message)
            except OSError as error:
                # Files of a model can be gone under a shared engine that has read them.
                self._refuse(wish, f"the sandboxes cannot be planned: {error}")
            finally:
                self._wanted.discard((wish.model, wish.tenant))

    async def end_model(self, model: str) -> None:
        """End all sandboxes of a model that is served no more; returns when nothing is left of them."""
        self._wanted = {key for key in self._wanted if key[0] != model}
        self._later = {key for key in self._later if key[0] != model}
        self._end(lambda key: key[0] == model)
        leaving = [held.task for (key, _), held in self._held.items() if key[0] == model]
        await asyncio.gather(*leaving, return_exceptions=True)

    @asynccontextmanager
    async def without(self, tenant: str) -> AsyncIterator[None]:
        """End a tenant's sandboxes; the block begins when nothing is left of them, and behind it those that the gateway
        still needs boot again."""
        self._absent.add(tenant)
        present = {key for (key, _), held in self._held.items() if not held.leaving}
        self._later |= {key for key in present | self._wanted if key[1] == tenant}
        self._wanted -= self._later
        self._end(lambda key: key[1] == tenant)
        try:
            leaving = [held.task for (key, _), held in self._held.items() if key[1] == tenant]
            await asyncio.gather(*leaving, return_exceptions=True)
            yield
        finally:
            self._absent.discard(tenant)
            again = {key for key in self._later if key[1] == tenant}
            self._later -= again
            for key in sorted(again):
                self.want(Want(*key))

    async def close(self) -> None:
        """End all of them; returns when nothing is left of them."""
        self.gateway_left()
        await asyncio.gather(*(held.task for held in self._held.values()), return_exceptions=True)

    async def _serve(self, wish: Want) -> None:
        key = wish.model, wish.tenant
        if key not in self._wanted:
            return
        need = declared(await asyncio.to_thread(self._policy), key)
        if self.is_external(wish.model):
            need = without_engine(need)
        if need == NOTHING:
            self._refuse(wish, "the policy grants this tenant no sandboxes of its own for this model")
            return
        roles = [Role.ENGINE] * need.engines + [Role.TEXT] * need.texts
        missing = [role for role in roles if (key, role) not in self._held or self._held[key, role].leaving]
        staying = [held.need for held in self._held.values() if not held.leaving]
        more = Need(int(Role.ENGINE in missing), int(Role.TEXT in missing))
        if not self._limits.hold(total([*staying, more])):
            self._refuse(wish, "there are as many sandboxes of single tenants as there may be")
            return
        # Who leaves still has its memory, and maybe the very name that is needed.
        await asyncio.gather(*(held.task for held in self._held.values() if held.leaving), return_exceptions=True)
        async with self._turn:
            plans = [await asyncio.to_thread(self._plan, wish.model, wish.tenant, role) for role in missing]
            if key in self._wanted:
                for plan in plans:
                    self._keep(key, plan)
        self.offer()

    def _keep(self, key: Key, plan: BootPlan) -> None:
        keeper = Keeper(plan, self._runtime, self._publish, forms=self._forms, placement=self._placement)
        keeper.looks = self.looks
        # Generations go on over all lives, so that no late word about one sandbox is taken for another's.
        keeper.life = Life(generation=self._boots, restarts=-1)
        self._boots += 1
        task = asyncio.create_task(keeper.run(), name=f"keeper of {plan.name}")
        held = self._held[key, plan.role] = _Held(keeper, task)
        task.add_done_callback(lambda done: self._ended(key, held, done))

    def _ended(self, key: Key, held: _Held, done: asyncio.Task[None]) -> None:
        role = held.keeper.plan.role
        # One that was restarted has had more than the one generation that it began with.
        self._boots = max(self._boots, held.keeper.life.generation)
        if self._held.get((key, role)) is held:
            del self._held[key, role]
        if not done.cancelled() and (error := done.exception()) is not None:
            self._wishes.put_nowait(error)

    def _end(self, which: Callable[[Key], bool]) -> None:
        for (key, _), held in self._held.items():
            if which(key) and not held.leaving:
                held.leaving = True
                held.keeper.stop()

    def _refuse(self, wish: Want, cause: str) -> None:
        log.warning("sandboxes of a tenant are refused", model=wish.model, tenant=wish.tenant, cause=cause)
        self._publish(SandboxDown(wish.model, "text", 0, 0, REFUSED, cause, 0.0, wish.tenant), ())
