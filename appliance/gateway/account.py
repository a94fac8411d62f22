"""What the gateway reports of each call to the audit log: who, what was decided by which rule, and how it ended."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from appliance.errors import ApplianceError
from appliance.gateway.answer import Outcome
from appliance.gateway.audit import AuditFeed
from appliance.request import Principal
from policy.decision import Decision

OK = "OK"
"""Outcome of a request without an error; others are reasons of ``appliance.errors``."""


@dataclass(frozen=True, slots=True)
class Call:
    """What an entry says of a request; the request itself holds the prompt, and is not kept."""

    request_id: str
    model: str
    operation: str


class Account:
    """Makes entries of calls; of none where there is no feed."""

    def __init__(self, feed: AuditFeed | None, models: Container[str]) -> None:
        """``models``: those that are served; no entry names another, so that nobody can fill the log with names."""
        self._feed = feed
        self._models = models

    @property
    def refuses(self) -> bool:
        """Whether no request may be taken, because it could not be accounted for."""
        return self._feed is not None and self._feed.refuses

    def served(
        self, principal: Principal, call: Call, decision: Decision, outcome: Outcome, error: ApplianceError | None
    ) -> None:
        """A request that the policy allowed has ended. One that its second decision denied counts as denied."""
        if self._feed is None:
            return
        if error is not None and error.rule:
            self.denied(principal, call, decision.policy_digest, error)
            return
        self._feed.add(
            "request", request=call.request_id, tenant=principal.tenant, principal=principal.credential,
            model=call.model, operation=call.operation, rule=decision.rule, policy=decision.policy_digest,
            outcome=_outcome(error), input_tokens=outcome.input_tokens, output_tokens=outcome.output_tokens,
        )  # fmt: skip

    def denied(self, principal: Principal, call: Call, policy: str | None, error: ApplianceError | None) -> None:
        """The policy, or the appliance itself, denied a request; ``policy``: its digest, if it was asked."""
        if self._feed is not None:
            self._feed.count(
                "denied", tenant=principal.tenant, principal=principal.credential,
                model=call.model if call.model in self._models else "", rule=error.rule if error is not None else "",
                policy=policy or "", outcome=_outcome(error),
            )  # fmt: skip

    def refused(self, tenant: str | None, error: ApplianceError) -> None:
        """A call that never became a request: without a valid credential, or malformed."""
        if self._feed is None:
            return
        if tenant is None:
            self._feed.count("refused", outcome=_outcome(error))
        else:
            self._feed.count(
                "denied", tenant=tenant, principal="", model="", rule="", policy="", outcome=_outcome(error)
            )

    def integrity(self, model: str, generation: int, count: int) -> None:
        """An engine ended requests because a KV block in their tables was not theirs."""
        if self._feed is not None:
            self._feed.add("integrity", model=model, generation=generation, count=count)


def _outcome(error: ApplianceError | None) -> str:
    return OK if error is None else error.wire.reason
