"""The service behind both front ends (``appliance.gateway.service.Service``)."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import aclosing
from dataclasses import replace

from appliance.common.errors import (
    ApplianceError,
    InternalError,
    InvalidRequestError,
    ModelNotFoundError,
    UnavailableError,
)
from appliance.common.external_config import EXTERNAL
from appliance.common.ids import new_request_id
from appliance.common.kv_shares import account_names, quotas_of
from appliance.gateway.generate_request import (
    AnyRequest,
    AttestRequest,
    CallContext,
    Embeddings,
    EmbedRequest,
    Event,
    GenerateRequest,
    Principal,
    RateState,
    Routable,
    ScoreRequest,
    Scores,
    Sink,
    Tokenized,
    TokenizerRequest,
)
from appliance.gateway.model_card import ModelCard
from appliance.gateway.request.attesting import AttestSession
from appliance.gateway.request.audit_feed import AuditFeed, NoAuditFeed
from appliance.gateway.request.audited_calls import AuditedCalls, Call
from appliance.gateway.request.embedding import EmbeddingSession
from appliance.gateway.request.ledger import Ledger
from appliance.gateway.request.lifecycle import Lifecycle, SessionDependencies
from appliance.gateway.request.operator_drain import OperatorDrain, check_taking
from appliance.gateway.request.routing import Routing, not_passed_on, takes
from appliance.gateway.request.scoring import ScoringSession
from appliance.gateway.request.session import Session
from appliance.gateway.request.shadow import Shadows
from appliance.gateway.request.suspects import Suspects
from appliance.gateway.request.tenant_counts import STRANGER, TenantCounts, Tokens
from appliance.gateway.request.tenant_use import TenantUses
from appliance.gateway.request.tokenizing import TokenizerSession
from appliance.gateway.request.withdrawal import caller_withdrawn, credential_gone, reason_to_end
from appliance.gateway.sandboxes.engine_link import EngineLink
from appliance.gateway.sandboxes.link import RETRY_AFTER_S
from appliance.gateway.sandboxes.model_leaving import Leaving, model_leaves
from appliance.gateway.sandboxes.model_sandboxes import ModelSandboxes
from appliance.gateway.sandboxes.publications import Publications
from appliance.gateway.sandboxes.questions import SupervisorQuestions
from appliance.gateway.sandboxes.tenant_sandboxes import TenantSandboxes
from appliance.gateway.telemetry import names
from appliance.gateway.telemetry.request_trace import Phase
from appliance.gateway.telemetry.tracer import OtelTelemetry
from appliance.gateway.tenant_account import TenantLimits, TenantUsed
from policy.adapters import base_of
from policy.evaluate import principal as find_tenant
from policy.evaluate import visible_models
from policy.networks import admits
from policy.routes import RouteChoice

FIRST_WIRE_ID_BITS = 32
"""Wire ids start at a random number of this size, so that two gateways in a row do not reuse them by habit."""

MAX_NAMED = 16
"""Most models that an error names; ``GET /v1/models`` lists all."""

MAX_SHOWN_CHARS = 128
"""Characters of a model's name that does not exist, as the refusal repeats it."""


class GatewayService:
    """Serves the front ends; a gateway process has one."""

    def __init__(
        self,
        model_sandboxes: dict[str, ModelSandboxes],
        ledger: Ledger,
        telemetry: OtelTelemetry,
        audit: AuditFeed | None = None,
        tenant_sandboxes: TenantSandboxes | None = None,
        record_spend: Callable[[str, str, int], Awaitable[None]] | None = None,
        questions: SupervisorQuestions | None = None,
    ) -> None:
        """``model_sandboxes`` are shared, by model; ``tenant_sandboxes`` are those of single tenants; ``audit`` takes
        entries of the audit log; ``record_spend`` records what a request may cost; ``questions`` go to the
        supervisor."""
        self.questions = questions
        self._uses = TenantUses(questions.usage) if questions is not None else None
        self.model_sandboxes = model_sandboxes
        self.tenant_sandboxes = tenant_sandboxes or TenantSandboxes()
        self.audit = audit or NoAuditFeed()
        self.ledger = ledger
        self.sandbox = "unknown"
        """Kind of the sandboxes, as the supervisor reported it; a span attribute."""
        self.tenant_counts = TenantCounts(lambda: (life.tokens for life in self.dependencies.live))
        self.integrity_failures = 0
        """Requests ended for an integrity failure since the start, in all engines."""
        self.publications = Publications(model_sandboxes, self.next_id)
        self._telemetry = telemetry
        self.count = telemetry.count
        """Adds to a counter of ``names``."""
        self.suspects = {name: Suspects() for name in model_sandboxes}
        self.routing = Routing(model_sandboxes, self.tenant_sandboxes, self._count_choice)
        self.shadows = Shadows(ledger.spends, telemetry.count, ledger.region)
        """Policy that is tried, if any."""
        self._wire_id = (1 << FIRST_WIRE_ID_BITS) + secrets.randbits(FIRST_WIRE_ID_BITS)
        self._audited_calls = AuditedCalls(self.audit, model_sandboxes)
        self.operator_drain = OperatorDrain()
        self.dependencies = SessionDependencies(
            model_sandboxes,
            ledger,
            self.suspects,
            self.next_id,
            self._audited_calls,
            self.tenant_counts,
            self.tenant_sandboxes,
            self.publications,
            record_spend=record_spend,
            count=telemetry.count,
        )

    @property
    def live(self) -> Collection[Lifecycle]:
        """Requests between admission and settlement."""
        return self.dependencies.live

    def next_id(self) -> int:
        """Draw a wire id never used before in this process."""
        self._wire_id += 1
        return self._wire_id

    def routed(self, principal: Principal, request: Routable) -> Routable:
        """Choose the model of a request for a route; see ``appliance.gateway.service.Service``."""
        return self.routing.routed(self.ledger.policy, principal, request)

    async def generate(
        self, principal: Principal, request: GenerateRequest, context: CallContext, sink: Sink | None = None
    ) -> AsyncGenerator[Event]:
        """Run the request; see ``appliance.gateway.service.Service``."""
        with self._begin(principal, request, context) as life:
            session = Session(life, request, context.prefiller)
            # The session drops the prompt's text once it has the ids; it must not be held here for an hour.
            del request
            async with aclosing(session.run(sink)) as events:
                async for event in events:
                    yield event

    async def embed(self, principal: Principal, request: EmbedRequest, context: CallContext) -> Embeddings:
        """Make a vector of each text; see ``appliance.gateway.service.Service``."""
        with self._begin(principal, request, context) as life:
            return await EmbeddingSession(life, request).run()

    async def score(self, principal: Principal, request: ScoreRequest, context: CallContext) -> Scores:
        """Score pairs, or classify texts; see ``appliance.gateway.service.Service``."""
        with self._begin(principal, request, context) as life:
            return await ScoringSession(life, request).run()

    async def tokenize(self, principal: Principal, request: TokenizerRequest, context: CallContext) -> Tokenized:
        """Give a prompt's token ids; see ``appliance.gateway.service.Service``."""
        with self._begin(principal, request, context) as life:
            return await TokenizerSession(life, request).tokenize()

    async def detokenize(self, principal: Principal, request: TokenizerRequest, context: CallContext) -> str:
        """Give the text of token ids; see ``appliance.gateway.service.Service``."""
        with self._begin(principal, request, context) as life:
            return await TokenizerSession(life, request).detokenize()

    async def attest(self, principal: Principal, request: AttestRequest, context: CallContext) -> str:
        """Give an attestation; see ``appliance.gateway.service.Service``."""
        if self.questions is None:
            raise UnavailableError("no supervisor is there to attest anything", retry_after_s=RETRY_AFTER_S)
        with self._begin(principal, request, context) as life:
            return await AttestSession(life, request, self.questions.attestations).run()

    def _begin(self, principal: Principal, request: AnyRequest, context: CallContext) -> Lifecycle:
        """Begin a request's lifecycle with its trace; one that no model here can take ends at once. A request for a
        route is given its model here, if its front end has not asked for it.

        Raises:
            ApplianceError: no model here can take it.
        """
        request = self.routing.routed(self.ledger.policy, principal, request)
        trace = self._telemetry.start(context, request.request_id, principal.tenant)
        trace.describe(request)
        trace.annotate(tenant_id=principal.tenant, sandbox=self.sandbox, credential=principal.credential)
        try:
            self._check_model(principal, request)
        except ApplianceError as error:
            policy = self.ledger.policy
            alias = request.alias or (request.model if self._is_others(request.model) else "")
            batch = context.line.batch if context.line is not None else ""
            call = Call(request.request_id, request.model, request.operation.value, alias, batch)
            self._audited_calls.denied(principal, call, policy.digest if error.rule else "", error)
            self.tenant_counts.add(Tokens(principal.tenant, request.model), error)
            self.shadows.refused(principal, request, context, error)
            trace.finish(error=error)
            raise
        line = context.line
        dependencies = self.dependencies
        if line is not None:
            dependencies = replace(dependencies, audited_calls=self._audited_calls.of_line(line), batch=line.batch)
        return Lifecycle(dependencies, principal, request, trace, self.shadows.request(principal, context))

    def _check_model(self, principal: Principal, request: AnyRequest) -> None:
        name, policy = request.alias or request.model, self.ledger.policy
        model = self.model_sandboxes.get(request.model)
        # Whether a name that the tenant may not use is a model, a route or nothing is not told.
        hidden = principal.tenant in policy.tenants and not visible_models(policy, principal.tenant, (name,))
        if hidden or (model is None and not request.alias):
            raise self._not_found(principal, name, served=model is not None or self._is_others(name))
        check_taking(self.operator_drain, self._audited_calls)
        if model is None or (request.adapter and request.adapter not in model.adapters):
            raise UnavailableError(f"the model {name} is not available at the moment", retry_after_s=RETRY_AFTER_S)
        if model.leaving is not Leaving.NO:
            routed = request.alias not in ("", request.adapter)
            raise model_leaves(name, again=model.leaving is Leaving.AGAIN or routed, running=False)
        _check_work(name, model.runner, request)

    def _is_others(self, name: str) -> bool:
        """Return whether a name that leads its caller nowhere is a route's or an adapter's; for the audit log."""
        model = self.model_sandboxes.get(base_of(name))
        return name in self.ledger.policy.routes or (model is not None and name in model.adapters)

    def _not_found(self, principal: Principal, name: str, *, served: bool) -> ModelNotFoundError:
        """Return the refusal of a name that is no model of the tenant's. The audit log has the rule, where it is one of
        others."""
        error = _unknown_model(name, [card.name for card in self.models(principal)])
        rule = f"tenants.{principal.tenant}.models"
        return error.by_rule(rule, self.ledger.policy.digest, hidden=True) if served else error

    def models(self, principal: Principal) -> tuple[ModelCard, ...]:
        """Return the models that this principal may use, with the routes, which are models to it."""
        policy = self.ledger.policy
        staying = [name for name, one in self.model_sandboxes.items() if one.leaving is not Leaving.FOR_GOOD]
        names = visible_models(policy, principal.tenant, staying)
        cards = [self._card(self.model_sandboxes[name]) for name in names if name not in policy.routes]
        return tuple(sorted([*cards, *self.routing.cards(policy, principal)], key=lambda card: card.name))

    def limits(self, principal: Principal) -> TenantLimits:
        """Return the tenant's limits and what is left of them; see ``appliance.gateway.service.Service``."""
        return self.ledger.limits_now(principal.tenant)

    async def usage(self, principal: Principal, end_user: str = "") -> TenantUsed:
        """Return what the tenant has used; see ``appliance.gateway.service.Service``."""
        if self._uses is None:
            raise UnavailableError("no supervisor is there to tell what was used", retry_after_s=RETRY_AFTER_S)
        return await self._uses.of(principal.tenant, self.ledger.policy.currency, end_user)

    def rates(self, principal: Principal) -> RateState:
        """Return what is left of the tenant's rates."""
        return self.ledger.rates(principal.tenant)

    def pads(self, principal: Principal) -> bool:
        """Return whether the tenant's class asks for padded answers; those of a tenant that is gone are padded too."""
        tenant = self.ledger.policy.tenants.get(principal.tenant)
        return tenant is None or tenant.isolation_class.pads

    def authenticate(self, credential: str, address: str) -> Principal | None:
        """Return the principal behind a verified credential; None, as for one that is not known, where its tenant is
        called from outside of its networks, which the audit log tells."""
        policy = self.ledger.policy
        tenant = find_tenant(policy, credential)
        if tenant is None:
            return None
        principal = Principal(tenant, credential)
        if not admits(policy.tenants[tenant].networks, address):
            self._audited_calls.outside(principal, policy.digest)
            return None
        return principal

    def record_refusal(self, context: CallContext, error: Exception, caller: Principal | None) -> str:
        """Make trace, metric and log line of a call that never became a request; returns its request id."""
        request_id = new_request_id()
        tenant = caller.tenant if caller is not None else None
        trace = self._telemetry.start(context, request_id, tenant)
        trace.begin(Phase.POLICY)
        trace.end(Phase.POLICY)
        known = error if isinstance(error, ApplianceError) else InternalError("a defect of the appliance")
        if known.refusal:
            self._telemetry.count(names.REFUSED_CREDENTIALS, reason=known.refusal)
        self.tenant_counts.add(Tokens(tenant or STRANGER, ""), known)
        self._audited_calls.refused(caller, known)
        trace.finish(error=known)
        return request_id

    def end_unproved(self, credential_holds: Callable[[Principal], bool]) -> None:
        """End every request whose caller's credential has expired or was revoked; asked twice a second."""
        for life in list(self.dependencies.live):
            if not credential_holds(life.principal):
                life.withdraw(credential_gone())

    def end_withdrawn(self, credential_holds: Callable[[Principal], bool]) -> None:
        """End every request that does not hold under the policy in force any more (``request.withdrawal``).

        Args:
            credential_holds: whether a caller's credential is in force.
        """
        ledger = self.ledger
        for life in list(self.dependencies.live):
            holds, admitted = credential_holds(life.principal), life.admitted
            if admitted is None:  # it waits for its admission, and ``ledger`` has decided on it anew
                error = caller_withdrawn(life.principal, ledger.policy, credential_holds=holds)
            else:
                error = reason_to_end(admitted, ledger.policy, ledger.namespaces, credential_holds=holds)
            if error is not None:
                life.withdraw(error)

    def supervisor_attached(self, sandbox: str) -> None:
        """Note the kind of the sandboxes."""
        self.sandbox = sandbox

    def sandbox_lost(self, model: str, role: str, reason: str) -> None:
        """Count a sandbox that ended, as the supervisor says."""
        self._telemetry.count(names.SANDBOX_LOSSES, model=model, role=role, reason=reason)

    def hand_over_cut(self, model: str, role: str) -> None:
        """Count a hand-over of a sandbox that has to be repeated."""
        self._telemetry.count(names.HAND_OVER_CUTS, model=model, role=role)

    def use_namespaces(self, namespaces: dict[str, bytes]) -> None:
        """Put new namespace keys in force: of a supervisor that came anew, or of a tenant whose key was destroyed."""
        policy, known = self.ledger.policy, self.ledger.namespaces
        complete = all(tenant in namespaces for tenant in policy.tenants)
        # Keys of tenants that a reload is about to bring change nothing yet.
        if complete and any(known.get(name) != namespaces.get(name) for name in account_names(policy)):
            self.ledger.replace(policy, namespaces)
            # Engines know accounts by these keys: under the old ones no account's share would hold any more.
            self.share_out()

    def engine_ended(self, model: ModelSandboxes, link: EngineLink) -> None:
        """Note which requests were in an engine that ended, unless its GPU was lost."""
        self.take_integrity(model, link)
        inside = (stream.fingerprint for stream in link.suspected)
        self.suspects[model.name].engine_died(inside, time.monotonic())

    def suspicion(self, now: float) -> dict[str, tuple[int, int]]:
        """Return by model how many requests are suspected of ending engines, and how many are in quarantine."""
        return {name: suspects.counts(now) for name, suspects in self.suspects.items()}

    def take_integrity(self, model: ModelSandboxes, link: EngineLink) -> None:
        """Count and audit the integrity failures that a link has counted since the last call."""
        count, link.integrity_failures = link.integrity_failures, 0
        if count:
            self.integrity_failures += count
            self._audited_calls.integrity(model.name, link.generation, count)
            self._telemetry.count(names.INTEGRITY_FAILURES, count, model=model.name)

    def share_out(self) -> None:
        """Tell every engine, now and whenever one comes up, what accounts may keep of its KV, and what is public."""
        ledger = self.ledger
        for model in self.model_sandboxes.values():
            model.set_quotas(quotas_of(ledger.policy, ledger.namespaces, model.name))
        self.publications.apply(ledger.policy, ledger.namespaces)

    def begin_drain(self) -> None:
        """End all waits for sandboxes that are not there, and for limits; other requests go on, and so do those that
        still arrive."""
        self.ledger.lines.drain()
        for model in self.model_sandboxes.values():
            model.begin_drain()
        self.tenant_sandboxes.begin_drain()

    def _count_choice(self, alias: str, choice: RouteChoice) -> None:
        model = base_of(choice.model)
        self._telemetry.count(names.ROUTE_CHOICES, route=alias, model=model, reason=choice.reason.value)

    @staticmethod
    def _card(model: ModelSandboxes) -> ModelCard:
        capacity = model.capacity
        return ModelCard(model.name, model.created, capacity.max_context if capacity else 0, model.runner, model.digest)


def _check_work(name: str, runner: str, request: AnyRequest) -> None:
    """Check that a model does what it is asked for.

    Raises:
        InvalidRequestError: it does something else.
    """
    if takes(runner, request):
        return
    if runner == EXTERNAL and (lacking := not_passed_on(request)) is not None:
        what, param = lacking
        raise InvalidRequestError(f"the model {name} is external: {what} cannot be had from it", param=param)
    does = {"embed": "gives embeddings", "classify": "classifies"}.get(runner, "generates text")
    lacks = "it has no labels" if runner == "embed" else "it scores no texts"
    if isinstance(request, GenerateRequest):
        lacks = "it generates no text"
    elif isinstance(request, EmbedRequest):
        lacks = "it gives no embeddings"
    raise InvalidRequestError(f"the model {name} {does}; {lacks}", param="model")


def _unknown_model(name: str, usable: list[str]) -> ModelNotFoundError:
    """Return the refusal of a name; ``usable`` are the names of the tenant's models."""
    known = ", ".join(usable[:MAX_NAMED]) + (", ..." if len(usable) > MAX_NAMED else "")
    return ModelNotFoundError(
        f"the model {name[:MAX_SHOWN_CHARS]!r} does not exist here; "
        + (f"yours are: {known}" if known else "you have none"),
        param="model",
        details={"model": name[:MAX_SHOWN_CHARS]},
    )
