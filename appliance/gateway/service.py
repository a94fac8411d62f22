"""The one session object behind gRPC and HTTP: ``appliance.request.Service`` over rooms, ledger and telemetry."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from appliance.errors import (
    ApplianceError,
    CancelledError,
    InternalError,
    InvalidRequestError,
    ModelNotFoundError,
    UnavailableError,
)
from appliance.gateway.account import Account, Call
from appliance.gateway.audit import AuditFeed
from appliance.gateway.embedding import EmbeddingSession
from appliance.gateway.engine_link import EngineLink
from appliance.gateway.house import House
from appliance.gateway.kv_shares import quotas_of
from appliance.gateway.ledger import Ledger
from appliance.gateway.publications import Publications
from appliance.gateway.rooms import RETRY_AFTER_S, ModelRooms
from appliance.gateway.session import Session, Tools
from appliance.gateway.suspects import Suspects
from appliance.gateway.tally import Tally
from appliance.ids import new_request_id
from appliance.request import (
    CallContext,
    Embeddings,
    EmbedRequest,
    Event,
    GenerateRequest,
    ModelCard,
    Principal,
    RateState,
    Sink,
)
from appliance.telemetry import names
from appliance.telemetry.api import Phase, RequestTrace, Telemetry
from policy.evaluate import principal as find_tenant
from policy.evaluate import visible_models

FIRST_WIRE_ID_BITS = 32
"""Wire ids start at a random number of this size, so that two gateways in a row do not reuse them by habit."""


class GatewayService:
    """What the front ends call. One a gateway process."""

    def __init__(
        self,
        rooms: dict[str, ModelRooms],
        ledger: Ledger,
        telemetry: Telemetry,
        audit: AuditFeed | None = None,
        house: House | None = None,
    ) -> None:
        """``audit``: where entries for the audit log go; None: nowhere. ``house``: the sandboxes of single tenants."""
        self.rooms = rooms
        self.house = house or House()
        self._account = Account(audit, rooms)
        self.ledger = ledger
        self.sandbox = "unknown"
        """What holds the sandboxes, as the supervisor said; a span attribute."""
        self.tally = Tally()
        self.integrity_failures = 0
        """Since the start, in all engines."""
        self.publications = Publications(rooms, self.next_id)
        self._telemetry = telemetry
        self._suspects = {name: Suspects() for name in rooms}
        self._wire_id = (1 << FIRST_WIRE_ID_BITS) + secrets.randbits(FIRST_WIRE_ID_BITS)

    def next_id(self) -> int:
        """A wire id never used before in this process."""
        self._wire_id += 1
        return self._wire_id

    async def generate(
        self, principal: Principal, request: GenerateRequest, context: CallContext, sink: Sink | None = None
    ) -> AsyncGenerator[Event]:
        """Run the request; see ``appliance.request.Service``."""
        trace = self._telemetry.start(context, request.request_id, principal.tenant)
        self._telemetry.describe(trace, request)
        trace.annotate(tenant_id=principal.tenant, sandbox=self.sandbox)
        session: Session | None = None
        call = Call(request.request_id, request.model, request.operation.value)
        error: ApplianceError | None = CancelledError("the client left before the answer was complete")
        try:
            session = Session(self._tools(request.model, embeds=False), principal, request, trace)
            # The session lets go of the prompt's text once it has its ids; nobody else shall hold it for an hour.
            del request
            async with aclosing(session.run(sink)) as events:
                async for event in events:
                    yield event
            error = None
        except ApplianceError as raised:
            error = raised
            raise
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException:
            error = InternalError("a defect of the appliance")
            raise
        finally:
            self._end(principal, call, session, trace, error)

    async def embed(self, principal: Principal, request: EmbedRequest, context: CallContext) -> Embeddings:
        """Make a vector of each text; see ``appliance.request.Service``."""
        trace = self._telemetry.start(context, request.request_id, principal.tenant)
        self._telemetry.describe(trace, request)
        trace.annotate(tenant_id=principal.tenant, sandbox=self.sandbox)
        session: EmbeddingSession | None = None
        call = Call(request.request_id, request.model, request.operation.value)
        error: ApplianceError | None = CancelledError("the client left before the answer was complete")
        try:
            session = EmbeddingSession(self._tools(request.model, embeds=True), principal, request, trace)
            answer = await session.run()
            error = None
        except ApplianceError as raised:
            error = raised
            raise
        except asyncio.CancelledError:
            raise
        except BaseException:
            error = InternalError("a defect of the appliance")
            raise
        finally:
            self._end(principal, call, session, trace, error)
        return answer

    def models(self, principal: Principal) -> tuple[ModelCard, ...]:
        """The models this principal may use."""
        names = visible_models(self.ledger.policy, principal.tenant, self.rooms)
        return tuple(self._card(self.rooms[name]) for name in sorted(names))

    def rates(self, principal: Principal) -> RateState:
        """What is left of the tenant's rates."""
        return self.ledger.rates(principal.tenant)

    def pads(self, principal: Principal) -> bool:
        """Whether the tenant's class asks for padded answers; a tenant that is gone since is told so as if it did."""
        tenant = self.ledger.policy.tenants.get(principal.tenant)
        return tenant is None or tenant.isolation_class.pads

    def authenticate(self, credential: str) -> Principal | None:
        """The principal behind a verified credential."""
        tenant = find_tenant(self.ledger.policy, credential)
        return Principal(tenant, credential) if tenant is not None else None

    def record_refusal(self, context: CallContext, error: Exception, tenant: str | None) -> str:
        """Trace, metric and log line of a call that never became a session; gives its request id."""
        request_id = new_request_id()
        trace = self._telemetry.start(context, request_id, tenant)
        trace.begin(Phase.POLICY)
        trace.end(Phase.POLICY)
        known = error if isinstance(error, ApplianceError) else InternalError("a defect of the appliance")
        if tenant is not None:
            self.tally.add(tenant, error=known)
        self._account.refused(tenant, known)
        trace.finish(error=known)
        return request_id

    def engine_ended(self, rooms: ModelRooms, link: EngineLink) -> None:
        """Note who was in an engine that died."""
        self.take_integrity(rooms, link)
        inside = (stream.fingerprint for stream in link.inside)
        self._suspects[rooms.name].engine_died(inside, time.monotonic())

    def suspicion(self, now: float) -> dict[str, tuple[int, int]]:
        """Of each model, how many requests are remembered from engines that ended, and how many are in quarantine."""
        return {name: suspects.counts(now) for name, suspects in self._suspects.items()}

    def take_integrity(self, rooms: ModelRooms, link: EngineLink) -> None:
        """Account for the integrity failures that a link has counted since the last time."""
        count, link.integrity_failures = link.integrity_failures, 0
        if count:
            self.integrity_failures += count
            self._account.integrity(rooms.name, link.generation, count)
            self._telemetry.count(names.INTEGRITY_FAILURES, count, model=rooms.name)

    def share_out(self) -> None:
        """Tell every engine, now and whenever one comes up, what accounts may keep of its KV, and what is public."""
        ledger = self.ledger
        for rooms in self.rooms.values():
            rooms.set_quotas(quotas_of(ledger.policy, ledger.namespaces, rooms.name))
        self.publications.apply(ledger.policy, ledger.namespaces)

    def begin_drain(self) -> None:
        """Let nobody wait for a sandbox that is not there; other requests go on, and so do those that still arrive."""
        for rooms in self.rooms.values():
            rooms.begin_drain()
        self.house.begin_drain()

    def _tools(self, model: str, *, embeds: bool) -> Tools:
        rooms = self.rooms.get(model)
        if rooms is None:
            raise ModelNotFoundError(f"the model {model[:128]!r} does not exist here", param="model")
        if self._account.refuses:
            raise UnavailableError("no request is taken that cannot be accounted for", retry_after_s=RETRY_AFTER_S)
        if embeds != (rooms.runner == "embed"):
            what = "generates text; it gives no embeddings" if embeds else "gives embeddings; it generates no text"
            raise InvalidRequestError(f"the model {model} {what}", param="model")
        return Tools(
            rooms, self.ledger, self._suspects[model], self.next_id, self.house, self.publications
        )

    def _end(
        self,
        principal: Principal,
        call: Call,
        session: Session | EmbeddingSession | None,
        trace: RequestTrace,
        error: ApplianceError | None,
    ) -> None:
        if session is None:
            self._account.denied(principal, call, None, error)
            self.tally.add(principal.tenant, error=error)
            trace.finish(error=error)
            return
        session.place.leave()
        outcome = session.outcome
        charged = outcome.input_tokens if outcome.started or outcome.output_tokens else 0
        self.tally.add(principal.tenant, error=error, tokens=charged + outcome.output_tokens)
        if session.reservation is None or not session.reservation.decision.allowed:
            self._account.denied(principal, call, self.ledger.policy.digest, error)
        else:
            self._account.served(principal, call, session.reservation.decision, outcome, error)
        if session.reservation is not None:
            session.reservation.settle(charged, outcome.output_tokens)
        trace.finish(
            error=error,
            input_tokens=outcome.input_tokens,
            cached_tokens=outcome.cached_tokens,
            output_tokens=outcome.output_tokens,
            finish_reason=outcome.finish.value if outcome.finish else None,
        )

    @staticmethod
    def _card(rooms: ModelRooms) -> ModelCard:
        capacity = rooms.capacity
        return ModelCard(rooms.name, rooms.created, capacity.max_context if capacity else 0, rooms.runner)
