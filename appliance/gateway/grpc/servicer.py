"""The gRPC front end: one method table, default deny, one boundary for errors.

Every method goes through ``_call``: authenticate, run, and turn whatever is raised into a rich status.

* A caller is authenticated before its message is read, and a message is parsed inside the boundary: a malformed one is
  the caller's INVALID_ARGUMENT and not our INTERNAL.
* Methods are coroutines that write to the call, not generators: when a call is cancelled, a coroutine's ``finally``
  runs at once.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TypeVar

from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from appliance.common.errors import (
    ApplianceError,
    InvalidRequestError,
    RateLimitedError,
    RouteNotFoundError,
    UnauthenticatedError,
)
from appliance.common.ids import new_request_id
from appliance.common.scopes import Scope
from appliance.common.tracebacks import forget_frames
from appliance.gateway.front.affinity import HEADER, SessionAffinity
from appliance.gateway.front.auth import Auth, Resolver, require
from appliance.gateway.front.client_address import TrustedProxies
from appliance.gateway.front.connections import Connections, network_of
from appliance.gateway.front.cut import Cut, shutting_down
from appliance.gateway.front.defect import defect
from appliance.gateway.front.own_listeners import OF_ALL, Entrance
from appliance.gateway.front.padding import Padding, Ticks
from appliance.gateway.front.prefiller import PREFILLER, named_prefiller
from appliance.gateway.front.request_builder import Stamp, traceparent
from appliance.gateway.generate_request import CallContext, Event, GenerateRequest, Principal, TokenPrompt
from appliance.gateway.grpc import error_status, message_mapping
from appliance.gateway.grpc.batch_calls import BATCH_SERVICE, BatchCalls
from appliance.gateway.grpc.call import CallEnded, GrpcCall, principal_of
from appliance.gateway.grpc.generated import inference_pb2 as pb
from appliance.gateway.grpc.paced_grpc import PacedMessages
from appliance.gateway.grpc.usage_calls import USAGE_SERVICE, UsageCalls
from appliance.gateway.grpc.watched_health import WatchedHealth
from appliance.gateway.grpc.wire import OK, Status
from appliance.gateway.service import Service
from appliance.gateway.stored_work import StoredWork

SERVICE = "athanor.inference.v1.InferenceService"
HEALTH = "grpc.health.v1.Health"
SERVICES = (SERVICE, USAGE_SERVICE, BATCH_SERVICE)
"""What tenants call of ours."""

REFLECTION = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")
"""The two names of the same messages; newer clients ask for the first."""

STALL_S = 30.0
"""Seconds for which a client may leave one message unread before its call is ended."""

MESSAGE_S = 30.0
"""Seconds for a call's one message to arrive, as for an HTTP body."""

TENANT_READERS = 32
"""Messages of one tenant being read at once, 128 MiB at most; its other calls wait their turn."""

TENANT_CALLS = 512
"""Calls of one tenant at once, half of all that there may be: some of them (Watch, reflection) last as long as their
caller likes, and no policy counts them."""

MAX_CALLS = 1_024
"""Calls of tenants at once over all connections; one more ends with RESOURCE_EXHAUSTED. Those of strangers, which are
bounded by address and with their connections, take none of these places."""

STRANGER_CALLS = 8
"""Calls of one address at once without a credential: health checks."""

STRANGER_MESSAGE_S = 5.0
"""Seconds for the message of such a call, of a few bytes."""

STRANGER_MESSAGE_BYTES = 1 << 10
"""Bytes of it: the name of a service. So little needs no turn beside the messages of others."""

CALLS_RETRY_S = 1.0
"""When a caller with too many calls may try again."""

_M = TypeVar("_M", bound=Message)
_R = TypeVar("_R")
_Q = TypeVar("_Q")


class _Call:
    """What one call is known by."""

    def __init__(self, method: str, wire: GrpcCall, proxies: TrustedProxies, entrance: Entrance) -> None:
        self.wire = wire
        self.entrance = entrance
        named = [value for name, value in wire.metadata if name == proxies.header]
        self.address = proxies.client_of(wire.address, named)
        """The caller's address, also behind a trusted proxy."""
        self.authorization = [value for name, value in wire.metadata if name == "authorization"]
        self.sessions = [value for name, value in wire.metadata if name == HEADER]
        self.facts = CallContext(
            route=method,
            front_end="grpc",
            traceparent=traceparent([value for name, value in wire.metadata if name == "traceparent"]),
            attributes={"client.address": self.address},
            listener=entrance.tenant,
            prefiller=named_prefiller([value for name, value in wire.metadata if name == PREFILLER]),
        )
        self.principal: Principal | None = None
        self.request_id: str | None = None
        """Set when a session begins: from then on the session traces its own errors."""

    def caller(self, resolver: Resolver) -> Principal:
        """Return whose call it is, by the credentials in force now.

        Raises:
            UnauthenticatedError: no proof that holds, or one of another tenant than the listener's.
        """
        return resolver.resolve(
            self.authorization,
            self.wire.peer_uris,
            address=self.address,
            only=self.entrance.tenant,
            listener=self.entrance.listener("grpc"),
        )


Behaviour = Callable[[_Call], Awaitable[Message | None]]


@dataclass(frozen=True, slots=True)
class _Method:
    """One row of the method table. A behaviour writes its messages, or returns its only one."""

    auth: Auth
    behaviour: Behaviour
    scope: Scope | None = None
    """What a caller's credential must have; None: the method is public, or there is none of this name."""


class GrpcFrontEnd:
    """The methods. ``serve`` answers one call."""

    def __init__(
        self,
        service: Service,
        resolver: Resolver,
        padding: Padding | None = None,
        max_calls: int = MAX_CALLS,
        proxies: TrustedProxies | None = None,
        affinity: SessionAffinity | None = None,
        stored: StoredWork | None = None,
    ) -> None:
        """``stored`` keeps files and batches; None where the appliance keeps none."""
        self._proxies, self._affinity = proxies or TrustedProxies(), affinity
        self.health = WatchedHealth()
        self._service = service
        self._resolver = resolver
        self._max_calls = max_calls
        self._calls = 0
        self._padding = padding or Padding()
        self._paced: set[PacedMessages] = set()
        self._draining = self._over = False
        self._readers: dict[str, asyncio.Semaphore] = {}
        self._tenants, self._strangers = Connections(TENANT_CALLS), Connections(STRANGER_CALLS)
        self._live: set[Cut] = set()
        self._reflection = reflection.aio.ReflectionServicer([*SERVICES, HEALTH, *REFLECTION])
        self._usage = UsageCalls(service, self._padding)
        self._batches = BatchCalls(service, self._padding, stored)
        self._table = self._methods()

    def begin_drain(self) -> None:
        """Keep nobody waiting for the sake of padding, and end watches; other calls that still come are answered."""
        self._draining = True
        self._usage.begin_drain()
        for paced in self._paced:
            paced.hurry()

    def cut_all(self) -> None:
        """End those that still run with a retryable error, and take none any more."""
        self._over = True
        for cut in list(self._live):
            cut.end(shutting_down())

    def methods(self) -> dict[str, Auth]:
        """Every method there is and what it asks of its caller."""
        return {name: method.auth for name, method in self._table.items()}

    async def serve(self, wire: GrpcCall, *, entrance: Entrance = OF_ALL) -> Status:
        """Answer one call, by this listener, and return its end. An unknown method too is authenticated first."""
        method = self._table.get(wire.method, _Method(Auth.TENANT, self._unknown))
        known = wire.method if wire.method in self._table else "*"
        return await self._answer(method, _Call(known, wire, self._proxies, entrance))

    async def _answer(self, method: _Method, call: _Call) -> Status:
        try:
            self._authenticate(method, call)
            with self._entered(call):
                message = await method.behaviour(call)
                if message is not None:
                    await call.wire.write(message)
                return OK
        except CallEnded as ended:
            forget_frames(ended)
            return ended.status
        except ApplianceError as error:
            shown = error
            request_id = call.request_id or self._record(call, error)
            forget_frames(error)
        except Exception as error:  # noqa: BLE001 - the gRPC boundary: a defect shows its request id, nothing else
            request_id = call.request_id or self._record(call, error)
            shown = defect(error, request_id)
        rich = error_status.status_of(shown, request_id)
        status = Status(rich.code, rich.message, rich.SerializeToString())
        if call.principal is not None and self._service.pads(call.principal):
            status = replace(status, metadata=(self._padding.trailer(status.message, status.details),))
        return status

    def _authenticate(self, method: _Method, call: _Call) -> None:
        """Find out whose call it is.

        Raises:
            UnauthenticatedError: the method asks for a credential, and there is none that holds.
            RateLimitedError: its tenant has as many connections as it may.
            ScopeError: the credential is limited to other methods.
        """
        if method.auth is Auth.PUBLIC:
            call.wire.unproved()
            return
        try:
            call.principal = call.caller(self._resolver)
        except UnauthenticatedError:
            call.wire.unproved()
            raise
        if not call.wire.claim(call.principal.tenant):
            raise RateLimitedError("too many connections; close some of them first", retry_after_s=CALLS_RETRY_S)
        if method.scope is not None:
            require(call.principal, method.scope)

    def _record(self, call: _Call, error: Exception) -> str:
        return self._service.record_refusal(call.facts, error, call.principal)

    @contextmanager
    def _entered(self, call: _Call) -> Iterator[None]:
        """One more call of its tenant, or of a stranger's address.

        Raises:
            RateLimitedError: that has as many as it may, or all together have.
        """
        if call.principal is not None:
            counts, kind, name = self._tenants, "tenant", call.principal.tenant
        else:
            counts, kind, name = self._strangers, "address", network_of(call.address)
        places = call.principal is not None
        if self._calls + places > self._max_calls or not counts.enter(kind, name):
            raise RateLimitedError("too many calls at once; end some of them first", retry_after_s=CALLS_RETRY_S)
        self._calls += places
        try:
            yield
        finally:
            self._calls -= places
            counts.leave(kind, name)

    async def _request(self, call: _Call, kind: type[_M], build: Callable[[_M, Stamp], _R]) -> tuple[_R, Ticks]:
        """Return the request that ``build`` makes of the call's message, and the moments of a padded answer to it."""
        if self._over:
            raise shutting_down()
        ticks = Ticks(time.monotonic(), self._padding.tick_s)
        message = await self._only(kind, call)
        left = call.wire.time_remaining()
        return build(message, Stamp(new_request_id(), None if left is None else time.monotonic() + left)), ticks

    @asynccontextmanager
    async def _session(self, call: _Call, request_id: str) -> AsyncIterator[Cut]:
        """Begin a session, for which a drain waits, and which it may cut."""
        affinity = () if self._affinity is None else self._affinity.rows(principal_of(call).credential, call.sessions)
        with _living(self._live) as cut:
            call.request_id = request_id
            await call.wire.send_initial_metadata((("x-request-id", request_id), *affinity))
            yield cut

    def _drained(self, behaviour: Behaviour) -> Behaviour:
        """Return a method that a drain cuts as it cuts sessions: it may last as long as a file takes."""

        async def serve(call: _Call) -> Message | None:
            if self._over:
                raise shutting_down()
            with _living(self._live) as cut:
                return await cut.run(_awaited(behaviour(call)))

        return serve

    async def _generate(self, call: _Call) -> None:
        asked, ticks = await self._request(call, pb.GenerateRequest, message_mapping.to_request)
        asked = self._service.routed(principal_of(call), asked)
        async with self._session(call, asked.request_id) as cut:
            events = self._service.generate(principal_of(call), asked, call.facts)
            # The prompt is the session's from here on, which lets go of it as soon as it can.
            asked = replace(asked, prompt=TokenPrompt(array("I")))
            if self._service.pads(principal_of(call)):
                await cut.run(self._stream_padded(call, events, asked, ticks))
            else:
                await cut.run(self._stream(call, events, asked))

    async def _stream(self, call: _Call, events: AsyncGenerator[Event, None], asked: GenerateRequest) -> None:
        async with aclosing(events):
            number = 0
            async for event in events:
                message = message_mapping.to_response(event, asked)
                message.sequence, number = number, number + 1
                await call.wire.write(message)

    async def _stream_padded(
        self, call: _Call, events: AsyncGenerator[Event, None], asked: GenerateRequest, ticks: Ticks
    ) -> None:
        scored = asked.logprobs >= 0 or asked.prompt_logprobs >= 0
        size = self._padding.size(choices=asked.choices, scored=scored)
        paced = PacedMessages(self._padding, size, lambda event: message_mapping.to_response(event, asked))
        self._paced.add(paced)
        if self._draining:
            paced.hurry()
        try:
            async with aclosing(paced.records(events, ticks)) as records:
                async for record in records:
                    await call.wire.write(record)
        finally:
            self._paced.discard(paced)

    async def _embed(self, call: _Call) -> Message:
        asked, ticks = await self._request(call, pb.EmbedRequest, message_mapping.to_embed_request)
        asked = self._service.routed(principal_of(call), asked)
        async with self._session(call, asked.request_id) as cut:
            embeddings = await cut.run(self._rested(call, ticks, self._service.embed, asked))
            return message_mapping.to_embed_response(embeddings, asked.request_id, asked.model)

    async def _rerank(self, call: _Call) -> Message:
        (asked, top), ticks = await self._request(call, pb.RerankRequest, message_mapping.to_score_request)
        asked = self._service.routed(principal_of(call), asked)
        async with self._session(call, asked.request_id) as cut:
            scores = await cut.run(self._rested(call, ticks, self._service.score, asked))
            return message_mapping.to_rerank_response(scores, asked, top)

    async def _count_tokens(self, call: _Call) -> Message:
        (request, with_ids), ticks = await self._request(
            call, pb.CountTokensRequest, message_mapping.to_tokenizer_request
        )
        async with self._session(call, request.request_id) as cut:
            found = await cut.run(self._rested(call, ticks, self._service.tokenize, request))
            return message_mapping.to_count_response(found, request.request_id, with_ids=with_ids)

    async def _rested(
        self, call: _Call, ticks: Ticks, ask: Callable[[Principal, _Q, CallContext], Awaitable[_R]], asked: _Q
    ) -> _R:
        """The service's answer, of a tenant whose answers are padded at its next tick."""
        found = await ask(principal_of(call), asked, call.facts)
        if self._service.pads(principal_of(call)) and not self._draining:
            await ticks.rest(self._padding)
        return found

    async def _attest(self, call: _Call) -> Message:
        asked, ticks = await self._request(call, pb.AttestRequest, message_mapping.to_attest_request)
        async with self._session(call, asked.request_id) as cut:
            text = await cut.run(self._service.attest(principal_of(call), asked, call.facts))
            if self._service.pads(principal_of(call)) and not self._draining:
                await cut.run(ticks.rest(self._padding))
            return pb.AttestResponse(request_id=asked.request_id, attestation=text)

    async def _list_models(self, call: _Call) -> Message:
        await self._only(pb.ListModelsRequest, call)
        return message_mapping.to_models(self._service.models(principal_of(call)))

    async def _get_model(self, call: _Call) -> Message:
        asked = await self._only(pb.GetModelRequest, call)
        return message_mapping.to_model(self._service.models(principal_of(call)), asked.model)

    def _caller(self, call: _Call) -> Principal:
        return call.caller(self._resolver)

    async def _check(self, call: _Call) -> Message:
        asked = await self._only(health_pb2.HealthCheckRequest, call)
        answer: Message = await self.health.check(asked, call.wire)
        return answer

    async def _watch(self, call: _Call) -> None:
        asked = await self._only(health_pb2.HealthCheckRequest, call)
        await self.health.watch(asked, call.wire)

    async def _reflect(self, call: _Call) -> None:
        asked = (_parsed(reflection_pb2.ServerReflectionRequest, data) async for data in call.wire.messages())
        async for answer in self._reflection.ServerReflectionInfo(asked, call.wire):
            await call.wire.write(answer)

    async def _unknown(self, _call: _Call) -> None:
        raise RouteNotFoundError("no such method; ask server reflection for those served")

    async def _only(self, kind: type[_M], call: _Call) -> _M:
        """The one message of a call, read in bounded time: a tenant's beside few others of it, a stranger's if it is
        short."""
        within_s = STRANGER_MESSAGE_S
        turn: AbstractAsyncContextManager[None] = nullcontext()
        if call.principal is None:
            call.wire.bound(STRANGER_MESSAGE_BYTES)
        else:
            within_s = MESSAGE_S
            turn = self._readers.setdefault(call.principal.tenant, asyncio.Semaphore(TENANT_READERS))
        try:
            async with asyncio.timeout(within_s), turn:
                data = await call.wire.receive()
        except TimeoutError:
            raise InvalidRequestError(f"the message did not arrive within {within_s:g} s") from None
        if data is None:
            raise InvalidRequestError("the call ended without its message")
        return _parsed(kind, data)

    def _methods_of(self, service: str, calls: UsageCalls | BatchCalls, scope: Scope) -> dict[str, _Method]:
        found = calls.methods(self._only, self._caller)
        return {f"/{service}/{name}": _Method(Auth.TENANT, behaviour, scope) for name, behaviour in found.items()}

    def _methods(self) -> dict[str, _Method]:
        return {
            f"/{SERVICE}/Generate": _Method(Auth.TENANT, self._generate, Scope.GENERATE),
            f"/{SERVICE}/Embed": _Method(Auth.TENANT, self._embed, Scope.EMBEDDINGS),
            f"/{SERVICE}/Rerank": _Method(Auth.TENANT, self._rerank, Scope.RERANK),
            f"/{SERVICE}/CountTokens": _Method(Auth.TENANT, self._count_tokens, Scope.TOKENIZE),
            f"/{SERVICE}/Attest": _Method(Auth.TENANT, self._attest, Scope.ATTESTATION),
            f"/{SERVICE}/ListModels": _Method(Auth.TENANT, self._list_models, Scope.MODELS),
            f"/{SERVICE}/GetModel": _Method(Auth.TENANT, self._get_model, Scope.MODELS),
            **self._methods_of(USAGE_SERVICE, self._usage, Scope.ACCOUNT),
            **{
                name: replace(method, behaviour=self._drained(method.behaviour))
                for name, method in self._methods_of(BATCH_SERVICE, self._batches, Scope.BATCHES).items()
            },
            f"/{HEALTH}/Check": _Method(Auth.PUBLIC, self._check),
            f"/{HEALTH}/Watch": _Method(Auth.TENANT, self._watch, Scope.MODELS),
            **{
                f"/{name}/ServerReflectionInfo": _Method(Auth.TENANT, self._reflect, Scope.MODELS)
                for name in REFLECTION
            },
        }


@contextmanager
def _living(live: set[Cut]) -> Iterator[Cut]:
    """Add one more piece of work to those that run; yield what a drain ends it by."""
    cut = Cut()
    live.add(cut)
    try:
        yield cut
    finally:
        live.discard(cut)


async def _awaited(work: Awaitable[_R]) -> _R:
    return await work


def _parsed(kind: type[_M], data: bytes) -> _M:
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError:
        raise InvalidRequestError("the message is not valid protobuf of this method's type") from None
    return message
