"""Answers the calls of the operator's API: role, message, turn, method, audit entry, metric.

A call that changes something has an entry in the audit log before it begins, and every call one when it has ended. What
was begun is carried to its end, also when its caller leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import grpc
import structlog
from google.protobuf.message import DecodeError, Message
from grpc_reflection.v1alpha import reflection, reflection_pb2

from appliance.common.account_roles import OVERFLOW, Identity
from appliance.common.audit.entry import MAX_TEXT
from appliance.common.config_loader import load_config
from appliance.common.errors import ApplianceError, InvalidRequestError, RateLimitedError, RouteNotFoundError
from appliance.common.ids import new_request_id
from appliance.common.operator_calls import MAX_MILLISECONDS, OperatorCall
from appliance.common.operator_roles import NEEDED, OperatorRole, require
from appliance.gateway.front.allowance import Allowance, Rate
from appliance.gateway.front.cut import shutting_down
from appliance.gateway.front.defect import defect
from appliance.gateway.front.operator_access import SECTION as REMOTE
from appliance.gateway.front.operator_rate import OperatorRates
from appliance.gateway.grpc import error_status
from appliance.gateway.grpc.call import CallEnded, GrpcCall
from appliance.gateway.grpc.wire import OK, Status
from appliance.operator.api import admin_calls, policy_calls, shadow_calls
from appliance.operator.api.method import TENANT, ChangeTurn, Method, Work
from appliance.operator.api.records import BEGUN, Records
from appliance.operator.api.shares import CALLS_RETRY_S, Key, Shares

MESSAGE_S = 30.0
"""Seconds for a call's one message to arrive."""

MAX_WORK = 8
"""Methods that work at once, each in a thread; the others wait."""

REFLECTION = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")
"""The two names of the same messages."""

REFUSED = Rate(burst=20, per_s=1)
"""Calls without a role that are audited one by one; those beyond are refused for their number."""

SERVICES: Mapping[str, Mapping[str, Method]] = {
    admin_calls.SERVICE: admin_calls.methods(),
    policy_calls.SERVICE: policy_calls.methods() | shadow_calls.methods(),
}

METHODS: Mapping[str, Method] = {
    f"/{service}/{name}": method for service, methods in SERVICES.items() for name, method in methods.items()
}
"""Every method of both services, by its path."""

assert METHODS.keys() <= NEEDED.keys(), "each method has its role in the table"

Identify = Callable[[GrpcCall], Identity]
"""Tells whose a call is; raises an ``ApplianceError`` where nothing that holds was shown."""

log = structlog.get_logger()

_M = TypeVar("_M", bound=Message)
_R = TypeVar("_R")


@dataclass(slots=True)
class _Call:
    """One call, as it goes."""

    caller: Identity
    wire: GrpcCall
    record: OperatorCall
    refusal: ApplianceError | None = None
    """Why the caller is nobody that is known, or is not taken now."""
    began: float = field(default_factory=time.monotonic)
    audited: bool = True
    """Whether its end is told where it is answered, and not elsewhere, or not at all."""
    change: asyncio.Task[Message] | None = None
    """What it changes, which goes on without its caller, with its message."""

    def ended(self, outcome: str) -> OperatorCall:
        """What is told of its end."""
        took = round((time.monotonic() - self.began) * 1_000)
        return replace(self.record, outcome=outcome, milliseconds=min(took, MAX_MILLISECONDS))


class OperatorFront:
    """The methods. ``serve`` answers one call."""

    def __init__(self, config_path: Path) -> None:
        self._config_path = config_path
        self._records = Records(lambda: load_config(config_path))
        self._turns = {turn: asyncio.Lock() for turn in ChangeTurn}
        self._shares = Shares()
        self._rates = OperatorRates()
        self._work = asyncio.Semaphore(MAX_WORK)
        self._refused: dict[str, Allowance] = {}
        """What callers without a role may still ask, by the section that would give one."""
        self._running: set[asyncio.Task[Any]] = set()
        self._ending = False
        self._reflection = reflection.aio.ReflectionServicer([*SERVICES, *REFLECTION])

    async def serve(self, identify: Identify, wire: GrpcCall) -> Status:
        """Answer one call and return its end."""
        refusal: ApplianceError | None = None
        try:
            caller = identify(wire)
        except ApplianceError as error:
            caller, refusal = Identity(OVERFLOW, frozenset(), given_by=REMOTE), error
        known = wire.method in METHODS or wire.method in _REFLECTIONS
        record = OperatorCall(
            method=wire.method.removeprefix("/") if known else "*",
            user=caller.user,
            roles=",".join(sorted(caller.roles)),
            subject="",
            request=new_request_id(),
            outcome=BEGUN,
            caller=caller.who[:MAX_TEXT],
            reason="" if refusal is None else refusal.refusal,
        )
        call = _Call(caller, wire, record, refusal)
        try:
            status = await self._answer(call)
        except asyncio.CancelledError:
            if call.audited:
                self._keep(self._record(call.ended("CANCELLED")))
            raise
        if call.audited and wire.method not in _REFLECTIONS:
            await self._record(call.ended(_NAMES[status.code]))
        return status

    async def end(self, grace_s: float) -> None:
        """Take no calls any more, and wait for those that change something, at most so long."""
        self._ending = True
        if self._running:
            await asyncio.wait(self._running, timeout=grace_s)

    async def _record(self, record: OperatorCall) -> None:
        try:
            await asyncio.to_thread(self._records.end, record)
        except ApplianceError as error:
            log.warning("a call of the operator's API is not in the audit log", problem=error.message)

    async def _answer(self, call: _Call) -> Status:
        try:
            async with self._entered(call) as key:
                message = await self._behave(call, key)
                if message is not None:
                    await call.wire.write(message)
            return OK
        except CallEnded as ended:
            return ended.status
        except ApplianceError as error:
            shown = error
        except Exception as error:  # noqa: BLE001 - the gRPC boundary: a defect shows its request id, nothing else
            shown = defect(error, call.record.request)
        rich = error_status.status_of(shown, call.record.request)
        return Status(rich.code, rich.message, rich.SerializeToString())

    @contextlib.asynccontextmanager
    async def _entered(self, call: _Call) -> AsyncIterator[Key]:
        """Count a call, until what it changes has ended, too; gives what it is counted as.

        Raises:
            ApplianceError: no more are taken.
        """
        if self._ending:
            raise shutting_down()
        key = self._shares.enter(call.caller)
        try:
            yield key
        finally:
            if call.change is None or call.change.done():
                self._shares.leave(key)
            else:
                call.change.add_done_callback(lambda _change: self._shares.leave(key))

    def _count(self, call: _Call, *, changes: bool) -> None:
        """Count a call of an operator with a role.

        Raises:
            RateLimitedError: there were too many. Its end is not told: each entry is the supervisor's work.
        """
        caller = call.caller
        if caller.user in (0, os.geteuid()):
            return  # These may order the supervisor themselves.
        try:
            self._rates.spend(caller.who or f"user {caller.user}", changes=changes)
        except RateLimitedError:
            call.audited = False
            raise

    async def _behave(self, call: _Call, key: Key) -> Message | None:
        method = METHODS.get(call.wire.method)
        caller, now = call.caller, time.monotonic()
        if not caller.roles:
            allowance = self._refused.setdefault(caller.given_by, Allowance(REFUSED, now))
            if not allowance.spend(1, now):
                call.audited = False
                raise RateLimitedError("too many calls without a role", retry_after_s=CALLS_RETRY_S)
        if call.refusal is not None:
            raise call.refusal
        role = OperatorRole.VIEWER if method is None else NEEDED[call.wire.method]
        self._count(call, changes=method is not None and method.turn is not None)
        require(caller.roles, role, call.wire.method, caller.given_by)
        if call.wire.method in _REFLECTIONS:
            await self._reflect(call)
            return None
        if method is None:
            raise RouteNotFoundError("no such method; ask server reflection for those served")
        async with self._shares.reading(key), self._shares.readers:
            asked = await _only(method.request, call.wire)
        about = _subject(method, asked)
        if method.subject == TENANT:
            call.record = replace(call.record, tenant=about)
        else:
            call.record = replace(call.record, subject=about)
        work = Work(self._config_path, caller.roles, caller.given_by)
        if method.turn is None:
            async with self._work:
                return await asyncio.to_thread(method.answer, asked, work)
        call.audited = False
        call.change = self._keep(self._change(method, method.turn, asked, work, call))
        return await asyncio.shield(call.change)

    def _keep(self, work: Coroutine[Any, Any, _R]) -> asyncio.Task[_R]:
        """Have work done to its end, whatever becomes of the call."""
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def _change(self, method: Method, turn: ChangeTurn, asked: Message, work: Work, call: _Call) -> Message:
        """Answer a call that changes something, when it is its turn, and tell of it."""
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._turns[turn])
            answer = await self._told(call, partial(self._begun, method, asked, work, call))
            if work.later is not None:
                # The turn ends with what is left to do.
                self._keep(self._finish(stack.pop_all(), work.later, call))
            return answer

    def _begun(self, method: Method, asked: Message, work: Work, call: _Call) -> Message:
        self._records.begin(call.record)
        return method.answer(asked, work)

    async def _finish(self, turn: AsyncExitStack, later: Callable[[], None], call: _Call) -> None:
        """Do what a method left to do when its answer is on its way."""
        async with turn:
            try:
                await self._told(call, later)
            except ApplianceError as error:
                log.error("a policy did not come into force", request=call.record.request, problem=error.message)

    async def _told(self, call: _Call, work: Callable[[], _R]) -> _R:
        """Do a part of a call in a thread, and tell how it ended."""
        outcome = "INTERNAL"
        try:
            async with self._work:
                done = await asyncio.to_thread(work)
            outcome = "OK"
            return done
        except ApplianceError as error:
            outcome = error.wire.grpc
            raise
        finally:
            await self._record(call.ended(outcome))

    async def _reflect(self, call: _Call) -> None:
        asked = (_parsed(reflection_pb2.ServerReflectionRequest, data) async for data in call.wire.messages())
        async for answer in self._reflection.ServerReflectionInfo(asked, call.wire):
            await call.wire.write(answer)


_NAMES: Mapping[int, str] = {one.value[0]: one.name for one in grpc.StatusCode}
"""Number of a status to its name."""

_REFLECTIONS = frozenset(f"/{name}/ServerReflectionInfo" for name in REFLECTION)


async def _only(kind: type[_M], wire: GrpcCall) -> _M:
    """The one message of a call, read in bounded time."""
    try:
        async with asyncio.timeout(MESSAGE_S):
            data = await wire.receive()
    except TimeoutError:
        raise InvalidRequestError(f"the message did not arrive within {MESSAGE_S:g} s") from None
    if data is None:
        raise InvalidRequestError("the call ended without its message")
    return _parsed(kind, data)


def _parsed(kind: type[_M], data: bytes) -> _M:
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError:
        raise InvalidRequestError("the message is not valid protobuf of this method's type") from None
    return message


def _subject(method: Method, asked: Message) -> str:
    """What a call is about, as the audit log takes it: cut off where it is long."""
    if not method.subject:
        return ""
    value = getattr(asked, method.subject)
    if isinstance(value, str | int):
        return str(value or "")[:MAX_TEXT]
    return ",".join(value)[:MAX_TEXT]
