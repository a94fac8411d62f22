"""Keeps one sandbox alive: boot, readiness by a real token, hand-over to the gateway, death, backoff, boot again.

The keeper owns the sandbox and, until the gateway takes it, the channel. Blocking work (runsc, the handshake) runs in
threads; ``lifecycle`` decides about states and delays.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import structlog

from appliance.common.control import RESTORED, Control, Frozen, HandedOver, SandboxDown, SandboxUp, SandboxUse
from appliance.common.control_cards import EngineEnds
from appliance.common.errors import SpillBreachError, SpillOverrunError, SpillPortError, StartError
from appliance.supervisor.boot import Booted, BootPlan, boot, end
from appliance.supervisor.cards.engines import engine_on_cards
from appliance.supervisor.cards.judge import CardVerdict, EngineOnCards
from appliance.supervisor.cards.placement import CardPlacement
from appliance.supervisor.fleet_backend import backend_digest
from appliance.supervisor.forms import Forms
from appliance.supervisor.gate import Latch
from appliance.supervisor.hand_over import HandOver
from appliance.supervisor.lifecycle import Event, Life, State
from appliance.supervisor.sandbox_looks import Looked, SandboxLooks
from appliance.supervisor.spill_port import SpillPort
from appliance.supervisor.spill_service import Vault
from appliance.supervisor.warm import WarmStarts
from isolation.errors import IsolationError
from isolation.gvisor.runtime import Ending, Runtime, Sandbox
from isolation.host.cores import format_cpu_list
from isolation.ipc.errors import ProtocolError
from isolation.ipc.messages import Role

log = structlog.get_logger()

Publish = Callable[[Control, tuple[int, ...]], bool]
"""Sends a message with descriptors to the gateway; False when none is attached."""


MOST_BOOTS = min(32, len(os.sched_getaffinity(0)) + 4)
"""Most sandboxes that boot at a time, on two cores those of three models: each imports torch when it starts cold, and
must connect within ``CONNECT_TIMEOUT_S``. A boot holds a thread for as long as it lasts, so boots have threads of their
own: what ends, and gives its memory to one that boots, waits for none of them."""

_boots = ThreadPoolExecutor(MOST_BOOTS, "boot")

GATEWAY_LEAVES_S = 1.0
"""Seconds for which the end of a sandbox with status 0 is no death yet, where the gateway had its channel: a gateway
that is killed closes channels and control socket within milliseconds, and its sandboxes may have ended before the
supervisor has read of it. That it left is the kernel's word alone; where it stays the end is a death, whatever the
status."""

MOST_RESTORED_DEATHS = 3
"""Deaths in a row after which a sandbox starts without its checkpoint, which may be their reason."""


@dataclass(slots=True)
class _End:
    """Why a running sandbox ends."""

    cause: str
    counted: bool = True
    """Whether the end counts as a failure of the sandbox."""
    reason: str = "ended"
    """One of ``control.LOSS_REASONS``."""


_GATEWAY_LEFT = _End("the gateway left", counted=False)


def _end_by(error: SpillPortError) -> _End:
    """End of a life by its spill channel: by what the engine did there, by what the machine refuses, or because it did
    not read, which is no failure."""
    counted = not isinstance(error, SpillOverrunError)
    return _End(str(error), counted, reason="fault" if isinstance(error, SpillBreachError) else "ended")


class Keeper:
    """Keeper of one sandbox. ``run`` lasts as long as the keeper; the other methods belong to the same event loop."""

    def __init__(
        self,
        plan: BootPlan,
        runtime: Runtime,
        publish: Publish,
        vault: Vault | None = None,
        warm: WarmStarts | None = None,
        forms: Forms | None = None,
        placement: CardPlacement | None = None,
    ) -> None:
        self.plan = plan
        self._placement = placement
        self._vault = vault
        self._warm = warm
        self._forms = forms
        self._told = plan
        """Plan with the form in which the engine computes, once it has tried some."""
        self.life = Life()
        self.gate = Latch()
        """Holds a boot back until the memory for it is there."""
        self._runtime = runtime
        self._publish = publish
        self._booted: Booted | None = None
        self._hand_over = HandOver()
        self._repeat: asyncio.TimerHandle | None = None
        self._ending: asyncio.Future[_End] | None = None
        self._stopping = asyncio.Event()
        self._needed = asyncio.Event()
        """Set unless no gateway is expected that the sandbox could serve: nothing is booted then."""
        self._needed.set()
        self.boot_s = 0.0
        """Seconds that the last boot took; 0: there was none."""
        self._reason = "ended"
        """Why the last life ended, for the gateway's count."""
        self._busy = False  # Whether the sandbox computed when its load was read last.
        self.looks = SandboxLooks()
        """Looks at load and memory; set by an owner of several keepers to one that all have."""
        self._looked: Looked | None = None  # The sandbox while it serves.
        self._left = False  # Whether the gateway that had the channel of the sandbox has left in this life.
        self._abandon: threading.Event | None = None
        """Ends the boot that is under way in its thread; None between boots."""
        self.first_boot: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        """Result of the first boot: None when the sandbox is ready, else what went wrong."""

    def __repr__(self) -> str:
        return f"<Keeper {self.plan.name} {self.life.state.value} generation {self.life.generation}>"

    async def run(self) -> None:
        """Boot and reboot until ``stop``; afterwards nothing of the sandbox is left."""
        while not self._stopping.is_set():
            self.life = self.life.advance(Event.BOOT, time.monotonic())
            cause = await self._one_life()
            if self._stopping.is_set():
                break
            delay = self.life.delay_s()
            # An end that is no failure, such as after the gateway left, is worth no warning.
            tell = log.warning if self.life.failures else log.info
            name, generation = self.plan.name, self.life.generation
            tell("sandbox is down", sandbox=name, cause=cause, retry_in_s=delay, generation=generation)
            self._publish(_down(self.plan, self.life, cause, self._reason), ())
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay)
            await self._needed.wait()
        self.life = self.life.advance(Event.STOP, time.monotonic())
        self.life = self.life.advance(Event.GONE, time.monotonic())

    async def _one_life(self) -> str:
        """Boot the sandbox, serve until it ends, remove it; gives the cause of the end."""
        try:
            if self._placement is not None:
                await self._placement.place(self.plan, self._take_plan)
            self._booted = booted = await self._boot_unless_stopped()
        except (IsolationError, ProtocolError, OSError, StartError) as error:
            self._reason, self.life = "ended", self.life.advance(Event.DIED, time.monotonic())
            self._report_first(str(error))
            return str(error)
        self.boot_s = booted.boot_s
        self.life = self.life.advance(Event.BECAME_READY, time.monotonic())
        _log_ready(self.plan, self.life.generation, booted)
        if self._warm is not None and (booted.start != RESTORED or (self.plan.ahead_bytes and not booted.ahead)):
            self._warm.ask(self._told, booted.boot_s)
        self._report_first(None)
        self._hand_over = HandOver()
        port = None
        try:
            port = self._open_port(booted)
        except SpillPortError as error:
            ending = _End(str(error))
        else:
            self.offer()
            ending = await self._until_end(booted)
        self._cancel_repeat()
        self._booted, self._reason = None, ending.reason
        if self._vault is not None and port is not None:
            await asyncio.to_thread(self._vault.end, port, suspicious=ending.counted)
        try:
            await asyncio.to_thread(end, booted)
        except IsolationError as error:
            # What is left may make the next boot fail, which is then reported; giving up would not help.
            log.error("sandbox could not be removed", sandbox=self.plan.name, problem=str(error))
            ending = _End(f"{ending.cause}; {error}")
        self.life = self.life.advance(Event.DIED if ending.counted else Event.ENDED, time.monotonic())
        return ending.cause

    def _take_plan(self, plan: BootPlan) -> None:
        """Boot by another plan from now on: the same sandbox on another card."""
        self.plan = self._told = plan

    async def _boot_unless_stopped(self) -> Booted:
        self._abandon = abandon = threading.Event()
        if self._stopping.is_set():
            abandon.set()
        try:
            context = contextvars.copy_context()
            return await asyncio.get_running_loop().run_in_executor(_boots, context.run, self._boot, abandon)
        finally:
            self._abandon = None

    def _boot(self, abandon: threading.Event) -> Booted:
        """Boot, from a checkpoint where there is one and in the form of an earlier trial, unless several deaths came in
        a row. Blocks."""
        deadly = self.life.failures >= MOST_RESTORED_DEATHS
        plan = self.plan if self._forms is None or deadly else self._forms.told(self.plan)
        if self._warm is None:
            booted = boot(plan, self._runtime, abandon, gate=self.gate)
        else:
            booted = (self._warm.boot_cold if deadly else self._warm.boot)(plan, abandon, self.gate)
        if self._forms is not None:
            self._forms.note(self.plan, booted)
            self._told = self._forms.told(self.plan)
        return booted

    def _open_port(self, booted: Booted) -> SpillPort | None:
        """Serve the engine's spill channel, if it has one, or raise ``SpillPortError``; its failure ends this life."""
        if self._vault is None or booted.spill is None:
            return None
        channel, booted.spill = booted.spill, None
        loop = asyncio.get_running_loop()
        return self._vault.serve(
            *(channel, self.plan.digest, self.plan.name, lambda: _backend(self._told, booted)),
            lambda error: loop.call_soon_threadsafe(self._end, _end_by(error)),
        )

    async def _until_end(self, booted: Booted) -> _End:
        """Wait until the process ends, the gateway reports a fault or leaves, or ``stop`` is called."""
        loop = asyncio.get_running_loop()
        self._ending, self._busy, self._left = loop.create_future(), False, False
        pidfd = booted.sandbox.pidfd
        loop.add_reader(pidfd, self._end, _End("the process ended"))
        # A text worker is never busy for long.
        load = partial(self._note_load, booted.sandbox) if self.plan.role is Role.ENGINE else None
        self._looked = looked = Looked(booted.sandbox, self._tell_memory, load)
        self.looks.add(looked)
        if self._stopping.is_set():
            self._end(_End("stopped", counted=False))
        try:
            ending = await self._ending
        finally:
            self.looks.remove(looked)
            self._looked = None
            loop.remove_reader(pidfd)
            self._ending = None
        if ending.cause != "the process ended":
            return ending
        cause, how = booted.describe_end(), booted.sandbox.ending()
        died = _End(cause, reason="oom" if how is not None and how.out_of_memory else "ended")
        # Any program can end with status 0. It only asks for a look whether its gateway went.
        asks = _is_clean(how) and _is_with_gateway(booted, self._hand_over)
        return await self._end_within(GATEWAY_LEAVES_S) or died if asks else died

    async def _end_within(self, longest_s: float) -> _End | None:
        """Wait for an end that is no death, such as the gateway's leaving; None: there was none."""
        if self._left:  # Read in the turn of the loop in which the process ended, behind that.
            return _GATEWAY_LEFT
        self._ending = asyncio.get_running_loop().create_future()
        ending = None
        with suppress(TimeoutError):
            ending = await asyncio.wait_for(self._ending, longest_s)
        self._ending = None
        return None if ending is None or ending.counted else ending

    def _end(self, ending: _End) -> None:
        if self._ending is not None and not self._ending.done():
            self._ending.set_result(ending)

    def offer(self) -> None:
        """Hand a ready, unclaimed sandbox to the gateway, if one is attached."""
        booted = self._booted
        if booted is None or booted.channel is None or self._hand_over.pending or self.life.state is not State.READY:
            return
        self._cancel_repeat()
        if self._publish(_up(self.plan, self.life, booted), booted.channel.fds()):
            self._hand_over.sent()

    def taken(self, answer: HandedOver) -> None:
        """Close the own copies of what the gateway has, or hand them over again after a while: not all arrived."""
        booted = self._booted
        if booted is None or answer.generation != self.life.generation or not self._hand_over.pending:
            return
        if answer.whole:
            assert booted.channel is not None
            booted.channel.close()
            booted.channel, self._hand_over = None, HandOver()
            return
        name, delay_s = self.plan.name, self._hand_over.cut()
        log.warning("a hand-over was cut off", sandbox=name, times=self._hand_over.repeats, again_in_s=delay_s)
        if (problem := self._hand_over.problem(name, answer.most_open)) is not None:
            log.error("sandbox cannot be handed over", sandbox=name, problem=problem.message)
        self._repeat = asyncio.get_running_loop().call_later(delay_s, self.offer)

    def _cancel_repeat(self) -> None:
        if self._repeat is not None:
            self._repeat.cancel()
            self._repeat = None

    def gateway_came(self) -> None:
        """Hand the sandbox to a gateway that has attached; boot it where no gateway was expected any more."""
        self._needed.set()
        self.offer()

    def gateway_left(self, *, last: bool = False) -> None:
        """End a sandbox whose channel went with the gateway, or may have, and start it anew unless that was the
        ``last`` gateway; one that was never offered waits for the next."""
        if last and not self._stopping.is_set():  # ``run`` must not wait for a gateway before it ends.
            self._needed.clear()
        self._cancel_repeat()
        if self._booted is not None and _is_with_gateway(self._booted, self._hand_over):
            self._left = True
            self._end(_GATEWAY_LEFT)

    def fault(self, generation: int, reason: str) -> None:
        """End this generation of the sandbox, because the gateway found it at fault."""
        if generation == self.life.generation:
            self._end(_End(f"ended at the gateway's word: {reason}", reason="fault"))

    @property
    def on_cards(self) -> EngineOnCards | None:
        """The engine with its cards; None where it has none."""
        booted = self._booted if self._ending is not None else None
        boots, pid = self._abandon is not None, None if booted is None else booted.sandbox.pid
        return engine_on_cards(self.plan, self.life.generation, pid, boots=boots)

    def lose_card(self, verdict: CardVerdict) -> None:
        """End this generation of the engine because of its GPU; the gateway tells the requests inside. A boot is given
        up."""
        if verdict.engine.generation != self.life.generation:
            return
        if self._abandon is not None:
            self._abandon.set()
        if self._ending is None or self._ending.done():
            return
        told = EngineEnds(self.plan.model, self.life.generation, verdict.reason, verdict.card, self.plan.tenant)
        self._publish(told, ())
        self._end(_End(verdict.cause, reason=verdict.reason))

    def freeze(self, generation: int, *, frozen: bool) -> None:
        """Freeze this generation of the sandbox, unless it computes, or let it go on; tells the gateway what it is."""
        booted = self._booted
        if booted is None or generation != self.life.generation:
            return
        done = frozen and not self._busy and booted.sandbox.freeze()
        if not frozen:
            booted.sandbox.thaw()
        if self._looked is not None:
            self._looked.frozen = done
        self._publish(Frozen(self.plan.model, self.plan.role_name, generation, int(done), self.plan.tenant), ())

    def stop(self) -> None:
        """End for good; ``run`` returns once everything is cleaned up."""
        self._stopping.set()
        self._needed.set()
        if self._abandon is not None:
            self._abandon.set()
        self._end(_End("stopped", counted=False))

    def _report_first(self, problem: str | None) -> None:
        if not self.first_boot.done():
            self.first_boot.set_result(problem)

    def _note_load(self, sandbox: Sandbox, busy: bool) -> None:
        """Tell the sandbox whether it is busy, which has changed."""
        self._busy = busy
        sandbox.settle(busy=busy)

    def _tell_memory(self, held: int) -> None:
        """Tell the gateway how much memory the sandbox holds."""
        limit = self.plan.spec.limits.memory_bytes
        self._publish(SandboxUse(self.plan.model, self.plan.role_name, held, limit, self.plan.tenant), ())


def _is_clean(how: Ending | None) -> bool:
    """Whether a program ended of itself and says that all is well."""
    return how is not None and how.status == 0 and not how.out_of_memory


def _is_with_gateway(booted: Booted, hand_over: HandOver) -> bool:
    """Whether the gateway has, or may have, a sandbox's channel, which goes with it."""
    return booted.channel is None or hand_over.begun


def _up(plan: BootPlan, life: Life, booted: Booted) -> SandboxUp:
    """Message that a sandbox is ready, which goes with its channel."""
    return SandboxUp(
        model=plan.model,
        role=plan.role_name,
        generation=life.generation,
        pid=booted.sandbox.pid,
        restarts=life.restarts,
        layout=booted.layout,
        ready=booted.ready,
        tenant=plan.tenant,
        start=booted.start,
        computes=booted.computes,
        ranks=plan.ranks,
    )


def _down(plan: BootPlan, life: Life, cause: str, reason: str) -> SandboxDown:
    """Message that a sandbox is down."""
    return SandboxDown(
        model=plan.model,
        role=plan.role_name,
        generation=life.generation,
        restarts=life.restarts,
        state=life.state.value,
        cause=cause,
        retry_in_s=life.delay_s(),
        tenant=plan.tenant,
        reason=reason,
    )


def _backend(plan: BootPlan, booted: Booted) -> bytes:
    """Return the digest of what the bits of an engine's KV depend on; nothing for one on a GPU, which shares none."""
    return b"" if plan.card is not None else backend_digest(plan.configuration, booted.ready)


def _log_ready(plan: BootPlan, generation: int, booted: Booted) -> None:
    """Write the line of a sandbox that is ready."""
    log.info(
        "sandbox is ready",
        sandbox=plan.name,
        generation=generation,
        pid=booted.sandbox.pid,
        boot_ms=round(booted.boot_s * 1000),
        start=booted.start,
        **_place(plan),
    )


def _place(plan: BootPlan) -> dict[str, str]:
    """Fields of the log line about where an engine computes: number of threads with the reason, processors if it is
    pinned, card if it has one."""
    cpus = plan.spec.cpus if plan.threads else ()
    card = "" if plan.card is None else str(plan.card.card)
    fields = {"threads": plan.threads, "pinned_to": format_cpu_list(cpus), "gpu": card}
    return {name: value for name, value in fields.items() if value}
