"""Entries of the audit log for calls: caller, deciding rule, and how the call ended."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from appliance.common.audit.entry import Entry, entry
from appliance.common.errors import ApplianceError, UnauthenticatedError
from appliance.common.external_config import EXTERNAL
from appliance.common.usage.open_charges import GATEWAY_LOST, NO_CHARGE, OpenCharge
from appliance.gateway.generate_request import BatchLine, Principal
from appliance.gateway.request.audit_feed import AuditFeed, LineFeed
from appliance.gateway.request.tenant_counts import Tokens
from policy.decision import Decision
from policy.model import Retention

OK = "OK"
"""Outcome of a request without an error; others are reasons of ``appliance.common.errors``."""


@dataclass(frozen=True, slots=True)
class Charge:
    """Tokens that a request is charged for, and what they cost."""

    input: int
    cached: int
    output: int
    cost: int
    """Billionths of the currency's unit."""
    reserved: bool
    """Whether a cost was reserved, which the entry releases."""
    reasoning: int = 0
    """Output tokens that are reasoning, a part of ``output``."""


def charge_of(tokens: Tokens, cost: int, reasoning: int, *, reserved: bool) -> Charge:
    """Return what a request is charged for."""
    return Charge(tokens.input, tokens.cached, tokens.output, cost, reserved, reasoning)


@dataclass(frozen=True, slots=True)
class Call:
    """Fields of a request that its entry has; the request itself holds the prompt, and is not kept."""

    request_id: str
    model: str
    operation: str
    alias: str = ""
    """Route or adapter by which the model was asked for."""
    batch: str = ""
    """Batch of which it is a line."""
    adapter: str = ""
    """Whole name of the adapter with which the model serves it."""
    adapter_digest: str = ""
    end_user: str = ""
    """Digest of the name of the end user for whom it is; the supervisor writes a pseudonym."""
    runner: str = ""
    """What the model's engine does, or ``external``."""

    @property
    def external(self) -> bool:
        """Whether the model is computed outside of the appliance."""
        return self.runner == EXTERNAL


class AuditedCalls:
    """Makes the audit log's entries of calls."""

    def __init__(self, feed: AuditFeed, models: Container[str]) -> None:
        """``models`` are served; no entry names another, so that callers cannot fill the log with names."""
        self._feed = feed
        self._models = models

    def of_line(self, line: BatchLine | None) -> AuditedCalls:
        """Return the entries of a line of a batch, or these of every other request."""
        return self if line is None else AuditedCalls(LineFeed(self._feed, line.charge), self._models)

    @property
    def refuses(self) -> bool:
        """Whether no request may be taken, because its entry could not be written."""
        return self._feed.refuses

    def begin(
        self, principal: Principal, call: Call, decision: Decision, reserved: int | None, queued_ms: int = 0
    ) -> OpenCharge:
        """Keep what the entry of a request will have, before it enters an engine: should this process end before the
        entry was sent, the supervisor makes it. ``reserved`` is the cost recorded for it, None where none was."""
        if decision.obligations is None:
            return NO_CHARGE
        fields = _fields(principal, call, decision, Charge(0, 0, 0, 0, reserved=False), GATEWAY_LOST, queued_ms)
        return self._feed.charges.open(entry("request", **fields), decision.obligations.price, reserved)

    def served(
        self,
        principal: Principal,
        call: Call,
        decision: Decision,
        charge: Charge,
        error: ApplianceError | None,
        queued_ms: int = 0,
        kept: OpenCharge = NO_CHARGE,
    ) -> None:
        """Make the entry of a request that the policy allowed and that has ended; one that the second decision denied
        counts as denied. ``queued_ms`` is the time for which it waited for limits, ``kept`` what ``begin`` gave."""
        if error is not None and error.rule and not charge.reserved:
            # The second decision, which denied it, may be of a later policy than the first.
            self.denied(principal, call, error.policy or decision.policy_digest, error)
            kept.release()
            return
        outcome = _outcome(error)
        if kept.entry is None:
            fields = _fields(principal, call, decision, charge, outcome, queued_ms) | _cut(error)
            one = entry("request", **fields)
        else:
            # What was clean before need not be cleaned again, which takes as long as all else here.
            numbers = {"input_tokens": charge.input, "cached_tokens": charge.cached, "output_tokens": charge.output}
            numbers["reasoning_tokens"] = min(charge.reasoning, charge.output)
            ended = kept.entry.fields | numbers | {"cost": charge.cost, "outcome": outcome}
            cut = _cut(error)
            one = entry("request", **(ended | cut)) if cut else Entry("request", ended)
            kept.end(outcome, charge.input, charge.cached, charge.output)
        self._feed.end(one, kept)

    def denied(self, principal: Principal, call: Call, policy: str, error: ApplianceError | None) -> None:
        """Count a request that the policy, or the appliance itself, denied; ``policy`` is its digest, empty where
        it was not asked. One that waited for its admission when a policy ended it was denied by that policy."""
        self._feed.count(
            "denied",
            tenant=principal.tenant,
            principal=principal.credential,
            model=call.model if call.model in self._models else "",
            alias=call.alias,
            rule=(error.rule or error.cut_rule) if error is not None else "",
            policy=policy,
            outcome=_outcome(error),
        )

    def outside(self, principal: Principal, policy: str) -> None:
        """Count a call with a valid credential from outside of its tenant's networks; to its sender it is one without
        a valid credential."""
        self._feed.count(
            "denied",
            tenant=principal.tenant,
            principal=principal.credential,
            model="",
            alias="",
            rule=f"tenants.{principal.tenant}.networks",
            policy=policy,
            outcome=UnauthenticatedError.wire.reason,
        )

    def refused(self, caller: Principal | None, error: ApplianceError) -> None:
        """Count a call that never became a request: without a valid credential, malformed, or denied before by a rule
        about files, batches or stored responses."""
        if caller is None:
            self._feed.count("refused", outcome=_outcome(error), reason=error.refusal)
        else:
            self._feed.count(
                "denied",
                tenant=caller.tenant,
                principal=caller.credential,
                model="",
                alias="",
                rule=error.rule,
                policy=error.policy,
                outcome=_outcome(error),
            )

    def integrity(self, model: str, generation: int, count: int) -> None:
        """Make the entry of an engine that ended requests because a KV block in their tables was not theirs."""
        self._feed.add("integrity", model=model, generation=generation, count=count)


def _fields(
    principal: Principal, call: Call, decision: Decision, charge: Charge, outcome: str, queued_ms: int
) -> dict[str, str | int]:
    """Return the fields of a request's entry."""
    return {
        "request": call.request_id,
        "tenant": principal.tenant,
        "principal": principal.credential,
        "model": call.model,
        "alias": call.alias,
        "operation": call.operation,
        "rule": decision.rule,
        "policy": decision.policy_digest,
        "cut_rule": "",
        "cut_policy": "",
        "outcome": outcome,
        "input_tokens": charge.input,
        "cached_tokens": charge.cached,
        "output_tokens": charge.output,
        "reasoning_tokens": min(charge.reasoning, charge.output),
        "cost": charge.cost,
        "queued_ms": queued_ms,
        "downgraded": decision.obligations.downgraded if decision.obligations is not None else "",
        "batch": call.batch,
        "adapter": call.adapter,
        "adapter_digest": call.adapter_digest,
        "runner": call.runner,
        "end_user": call.end_user if _keeps(decision) else "",
        "listener": principal.listener,
    }


def _keeps(decision: Decision) -> bool:
    """Return whether anything of a request may be kept that tells its end user from another."""
    return decision.obligations is not None and decision.obligations.retention is not Retention.NONE


def _cut(error: ApplianceError | None) -> dict[str, str | int]:
    """Return the fields of an entry that name what of a policy ended a running request; none where no policy did."""
    return (
        {"cut_rule": error.cut_rule, "cut_policy": error.cut_policy} if error is not None and error.cut_policy else {}
    )


def _outcome(error: ApplianceError | None) -> str:
    return OK if error is None else error.wire.reason
