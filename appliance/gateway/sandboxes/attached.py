"""Sandboxes that the supervisor hands over: each becomes a link of its model, until it or the supervisor ends."""

from __future__ import annotations

import asyncio
import os
import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Protocol

import structlog

from appliance.common.control import (
    LOSS_REASONS,
    REFUSED,
    Control,
    Fault,
    HandedOver,
    SandboxDown,
    SandboxUp,
    SandboxUse,
    Welcome,
)
from appliance.common.control_cards import EngineEnds
from appliance.gateway.sandboxes.engine_link import EngineLink
from appliance.gateway.sandboxes.engine_loss import EngineLoss
from appliance.gateway.sandboxes.model_sandboxes import ModelSandboxes, SandboxRecord
from appliance.gateway.sandboxes.spare_descriptors import SpareDescriptors
from appliance.gateway.sandboxes.supervisor_link import SupervisorLink
from appliance.gateway.sandboxes.tenant_sandboxes import TenantSandboxes
from appliance.gateway.sandboxes.text_link import TextLink, TextLostError
from isolation.ipc.channel import Channel
from isolation.ipc.errors import RemoteProtocolError
from isolation.ipc.messages import MAX_TOKENS_PER_REQUEST, EngineReady, Role, TextReady
from isolation.ipc.segment import Layout

log = structlog.get_logger()

GONE_GRACE_S = 2.0
"""Seconds in which a sandbox that closed its channel should have ended, and the supervisor have seen it; then the
supervisor is told to end it."""

SUPERVISOR_GONE = "the supervisor is gone"
"""Cause that status shows of a sandbox whose supervisor was lost."""


LOOK_S = 0.25
"""How often a gateway that started by itself looks whether its supervisor is there."""

ABSENT_S = 60.0
"""Seconds without a supervisor that listens after which none will come. It listens before it boots anything, and
systemd starts a gateway only when its supervisor has started or failed."""

MOST_LOSSES = 3
"""Supervisors that may come and go before anything is served."""


TakeFds = Callable[[tuple[int, ...]], None]
"""Takes over the descriptors of a message."""


@dataclass(slots=True)
class FirstStart:
    """Decides whether a gateway that has started by itself can still expect a supervisor. Pure: times are monotonic
    seconds, the first is ``absent_since``."""

    absent_since: float
    present: bool = False
    ended: int = 0

    def look(self, now: float, *, present: bool) -> str:
        """Note whether a supervisor is there; returns why none will come, empty while one may."""
        if self.present and not present:
            self.ended += 1
            self.absent_since = now
        self.present = present
        if self.ended >= MOST_LOSSES:
            return f"{self.ended} supervisors have ended before anything was served"
        if not present and now - self.absent_since > ABSENT_S:
            return f"no supervisor has listened for {ABSENT_S:g} s"
        return ""


class SandboxListener(Protocol):
    """Receives what happens to sandboxes."""

    def next_id(self) -> int:
        """Draw a wire id never used before in this process."""
        ...

    def supervisor_attached(self, sandbox: str) -> None:
        """A supervisor is there; ``sandbox`` is the kind of its sandboxes."""
        ...

    def engine_ended(self, model: ModelSandboxes, link: EngineLink) -> None:
        """An engine ended; its link still knows the requests inside."""
        ...

    def sandbox_lost(self, model: str, role: str, reason: str) -> None:
        """The supervisor says that a sandbox has ended; ``reason`` is one of ``LOSS_REASONS``."""
        ...

    def hand_over_cut(self, model: str, role: str) -> None:
        """A sandbox's descriptors did not arrive and have to be sent again."""
        ...


@dataclass(frozen=True, slots=True)
class Attachment:
    """Facts that the supervisor told on attaching."""

    sandbox: str = "unknown"
    """Kind of the sandboxes."""
    limits: str = "unknown"
    """One sentence on the limits of memory, CPU and processes in force."""
    attached: bool = False


class Sandboxes:
    """Keeps the links and records of every model's sandboxes current; handles what the supervisor sends."""

    def __init__(
        self,
        supervisor: SupervisorLink,
        models: dict[str, ModelSandboxes],
        tenant_sandboxes: TenantSandboxes,
        listener: SandboxListener,
        takers: Mapping[type[Control], Callable[[Any], None]],
        fd_takers: Mapping[type[Control], TakeFds] | None = None,
    ) -> None:
        """``takers`` act on messages that are not about sandboxes, by the type of message; they raise ValueError at
        what no supervisor of this release sends. ``fd_takers`` take over the descriptors of messages that are nothing
        else, by type; there may be none where this process can open no more."""
        self._fd_takers = fd_takers or {}
        self._supervisor = supervisor
        self._models = models
        self._tenant_sandboxes = tenant_sandboxes
        self._listener = listener
        self._takers = takers
        self._tasks: set[asyncio.Task[None]] = set()
        self._reading: set[TextLink] = set()
        """Links whose vocabulary table is being read; no model has them yet."""
        self.attachment = Attachment()
        self._spare = SpareDescriptors()
        for model in models.values():
            model.records |= {role: SandboxRecord() for role in ("engine", "text")}

    @property
    def every(self) -> tuple[ModelSandboxes, ...]:
        """Sandboxes of all models: the shared ones, then those of single tenants."""
        return (*self._models.values(), *self._tenant_sandboxes.resident)

    async def run(self) -> None:
        """Attach to the supervisor, and again whenever it was lost; ends by cancellation."""
        self._spare.fill()
        try:
            await self._supervisor.run(self.take, self.supervisor_lost)
        finally:
            self._spare.free()

    async def without_hope(self, served: Callable[[], bool]) -> str:
        """Return why no supervisor can be expected any more, with the known causes; empty once everything is
        ``served``."""
        first = FirstStart(time.monotonic())
        while not (problem := first.look(time.monotonic(), present=self.attachment.attached)):
            if served():
                return ""
            await asyncio.sleep(LOOK_S)
        causes = {record.cause for model in self.every for record in model.records.values()} - {"", SUPERVISOR_GONE}
        known = "; ".join(sorted(causes)) or "its own log says why: journalctl -u athanor-supervisor"
        return f"{problem}: {known}"

    def supervisor_lost(self) -> None:
        """Close the links of all sandboxes."""
        self.attachment = Attachment()
        for model in self.every:
            model.close_links()
            if model.sleep_state.waking:
                model.fall_asleep(SUPERVISOR_GONE)
            for record in model.records.values():
                if record.state == "ready":
                    record.become("failed", SUPERVISOR_GONE)
        for reading in tuple(self._reading):
            reading.close()

    def take(self, message: Control, fds: tuple[int, ...]) -> None:
        """Act on a message of the supervisor and take over its descriptors.

        Raises:
            KeyError, TypeError, ValueError: no supervisor of this release sends that.
        """
        if isinstance(message, SandboxUp) and len(fds) == 3:
            self._up(message, (fds[0], fds[1], fds[2]))
            return
        if (take_over := self._fd_takers.get(type(message))) is not None:
            take_over(fds)
            return
        for stray in fds:
            os.close(stray)
        if isinstance(message, SandboxUp) and not fds:
            self._again(message)
            return
        if isinstance(message, Welcome):
            self.attachment = Attachment(message.sandbox, message.limits, attached=True)
            self._listener.supervisor_attached(message.sandbox)
        if isinstance(message, SandboxDown):
            self._down(message)
        elif isinstance(message, SandboxUse):
            self._note_use(message)
        elif isinstance(message, EngineEnds):
            self._engine_ends(message)
        elif (taker := self._takers.get(type(message))) is not None:
            taker(message)
        else:
            self._supervisor.detach(f"it sent {type(message).__name__}")

    def _up(self, message: SandboxUp, fds: tuple[int, int, int]) -> None:
        model = self._find(message)
        channel = None
        try:
            if model is not None:
                role = Role[message.role.upper()]
                layout = Layout.decode(bytes.fromhex(message.layout))
                channel = Channel.host(*fds, layout, role, established=True)
        except RemoteProtocolError as error:
            # The guest could write into the segment since the supervisor looked at it.
            self._refuse(model, message, f"broke the protocol: {error}")
        except OSError:
            # To map the segment takes one descriptor more.
            self._again(message)
            return
        finally:
            if channel is None:
                for fd in fds:
                    os.close(fd)
        self._spare.fill()
        self._supervisor.tell(_answer(message, whole=True))
        if model is None or channel is None:
            return
        record = model.record(message.role)
        record.generation = message.generation
        model.digest = message.model_digest
        if role is Role.ENGINE:
            on_end = partial(self._engine_ended, model)
            model.set_engine(EngineLink(channel, _engine_ready(message.ready), message.generation, on_end))
            record.note_up(message)
        else:
            link = TextLink(channel, _text_ready(message.ready), message.generation, partial(self._text_ended, model))
            task = asyncio.create_task(self._read_table(model, link, message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _again(self, message: SandboxUp) -> None:
        """Have a sandbox handed over again whose descriptors did not arrive: this process may open no more, but for the
        numbers that it frees now. The sandbox has not noticed."""
        self._spare.free()
        answer = _answer(message, whole=False)
        model = self._find(message)
        if model is not None:
            cause = f"the gateway cannot take it: all {answer.most_open} descriptors that it may open are in use"
            log.warning("a hand-over was cut off", model=message.model, role=message.role, cause=cause)
            record = model.record(message.role)
            record.generation, record.restarts = message.generation, message.restarts
            record.become("failed", cause)
            self._listener.hand_over_cut(message.model, message.role)
        self._supervisor.tell(answer)

    def _refuse(self, model: ModelSandboxes | None, message: SandboxUp, reason: str) -> None:
        fault = Fault(message.model, message.role, message.generation, reason, message.tenant)
        if model is not None:
            self._note_end(model, fault, at_fault=True)

    async def _read_table(self, model: ModelSandboxes, link: TextLink, message: SandboxUp) -> None:
        """Read the vocabulary table of a text sandbox, which counts as there after that."""
        self._reading.add(link)
        try:
            if link.ready.exact_vocabulary:
                await link.read_table(self._listener.next_id)
        except TextLostError as error:
            log.warning("text sandbox was lost at once", model=model.name, reason=str(error))
        finally:
            self._reading.discard(link)
        if model.tenant and self._tenant_sandboxes.find(model.name, model.tenant) is not model:
            link.close()  # Others have needed its place meanwhile.
        # It may have ended between its last answer and this turn of the loop.
        if not link.closed:
            model.set_text(link)
            model.record("text").note_up(message)

    def _engine_ended(self, model: ModelSandboxes, link: EngineLink, reason: str, at_fault: bool) -> None:
        if model.engine is link:
            model.set_engine(None)
        self._listener.engine_ended(model, link)
        self._note_end(model, Fault(model.name, "engine", link.generation, reason, model.tenant), at_fault=at_fault)

    def _text_ended(self, model: ModelSandboxes, link: TextLink, reason: str, at_fault: bool) -> None:
        if model.text is link:
            model.set_text(None)
        self._note_end(model, Fault(model.name, "text", link.generation, reason, model.tenant), at_fault=at_fault)

    def _note_end(self, model: ModelSandboxes, fault: Fault, *, at_fault: bool) -> None:
        model.record(fault.role).become("failed", fault.reason)
        model.note_failure()
        log.warning("sandbox is lost", **asdict(fault))
        if at_fault:
            self._supervisor.tell(fault)
        else:
            sock = self._supervisor.socket
            asyncio.get_running_loop().call_later(GONE_GRACE_S, self._tell_same, sock, fault)

    def _tell_same(self, sock: object, fault: Fault) -> None:
        """Tell the supervisor of a fault unless it is another by now, whose generations began anew."""
        if sock is self._supervisor.socket:
            self._supervisor.tell(fault)

    def _note_use(self, message: SandboxUse) -> None:
        model = self._find(message)
        if model is not None and (record := model.records.get(message.role)) is not None:
            record.memory_bytes, record.memory_limit_bytes = message.memory_bytes, message.memory_limit_bytes

    def _engine_ends(self, message: EngineEnds) -> None:
        """Tell the requests in an engine why the supervisor ends it."""
        model, loss = self._find(message), EngineLoss.told(message)
        if model is not None and model.engine is not None and model.engine.generation == message.generation:
            model.engine.lose(loss)

    def _down(self, message: SandboxDown) -> None:
        if message.state == REFUSED:
            self._tenant_sandboxes.refuse(message.model, message.tenant, message.cause)
            return
        model = self._find(message)
        if model is not None:
            reason = message.reason if message.reason in LOSS_REASONS else "ended"
            self._listener.sandbox_lost(message.model, message.role, reason)
            record = model.record(message.role)
            record.generation, record.restarts = message.generation, message.restarts
            record.become(message.state, message.cause)
            model.note_failure()

    def _find(self, message: SandboxUp | SandboxDown | SandboxUse | EngineEnds) -> ModelSandboxes | None:
        """Return the sandboxes that a message is about; None when they are not, or no longer, asked for."""
        if message.tenant:
            return self._tenant_sandboxes.find(message.model, message.tenant)
        return self._models.get(message.model)


def _answer(message: SandboxUp, *, whole: bool) -> HandedOver:
    """Say whether what was handed over is here."""
    most_open = 0 if whole else resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return HandedOver(message.model, message.role, message.generation, int(whole), message.tenant, most_open)


def _engine_ready(told: dict[str, int]) -> EngineReady:
    """Decode what an engine announced. Its context is a claim: beyond the protocol's bound it would break every prompt
    on its way to the text sandbox."""
    numbers = dict(told)
    deterministic, publishes = (bool(numbers.pop(name, 0)) for name in ("deterministic", "publishes"))
    ready = EngineReady(**numbers, deterministic=deterministic, publishes=publishes)
    return replace(ready, max_context=min(ready.max_context, MAX_TOKENS_PER_REQUEST))


def _text_ready(told: dict[str, int]) -> TextReady:
    return TextReady(
        vocab_size=told["vocab_size"],
        has_chat_template=bool(told["has_chat_template"]),
        exact_vocabulary=bool(told["exact_vocabulary"]),
        strip_leading_space=bool(told["strip_leading_space"]),
        calls=bool(told["calls"]),
        thinks=bool(told["thinks"]),
        think_begins=told["think_begins"],
        think_ends=told["think_ends"],
    )
