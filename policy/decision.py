"""Result of the evaluator: allow, wait or deny, the rule that decided, and the obligations that follow."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from policy.model import FREE, Determinism, IsolationClass, Namespace, Price, Priority, Retention


class Effect(StrEnum):
    """Outcome of a decision."""

    ALLOW = "allow"
    WAIT = "wait"
    """Not now: the request may wait in the gateway, and is decided on again after the retry time at the latest."""
    DENY = "deny"


class Reason(StrEnum):
    """Reason for a decision: a closed list that front ends map to their status codes."""

    ALLOWED = "allowed"
    UNKNOWN_CREDENTIAL = "unknown_credential"
    """The policy does not know this credential."""
    MODEL_NOT_ALLOWED = "model_not_allowed"
    ROUTE_CHANGED = "route_changed"
    """The name that was asked for leads to this model no more; chosen anew, the request is served."""
    NETWORK_NOT_ALLOWED = "network_not_allowed"
    """The call comes from outside of the tenant's networks."""
    REGION_NOT_ALLOWED = "region_not_allowed"
    """The appliance is in none of the tenant's regions, or of the model's."""
    EXTERNAL_NOT_ALLOWED = "external_not_allowed"
    """The model is computed outside of the appliance, and the tenant may not use such models."""
    OUT_OF_HOURS = "out_of_hours"
    """The tenant is not served at this time."""
    FEATURE_NOT_ALLOWED = "feature_not_allowed"
    CONTENT_TOO_LARGE = "content_too_large"
    FIELD_NOT_ALLOWED = "field_not_allowed"
    """The request uses a field that the tenant may not use."""
    ROLE_NOT_ALLOWED = "role_not_allowed"
    """The conversation has a message of a role that the tenant may not send, or the prompt is no conversation."""
    CONTEXT_TOO_LONG = "context_too_long"
    OUTPUT_TOO_LONG = "output_too_long"
    REQUEST_RATE = "request_rate"
    TOKEN_RATE = "token_rate"  # noqa: S105 - a reason, no secret
    CONCURRENCY = "concurrency"
    KV_TOKENS = "kv_tokens"
    """Running requests may need as much KV as the tenant may have, or the request alone needs more."""
    SPEND = "spend"
    """A limit of spend is reached, or the request may cost more than is left of it."""
    NO_PRICE = "no_price"
    """The tenant has a limit of spend, and the policy has no price for the model: the limit cannot be evaluated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Obligations:
    """Limits and grants that the caller of ``evaluate`` must enforce while it serves the request."""

    max_output_tokens: int
    """Grant: largest number of output tokens for each choice."""
    retention: Retention
    isolation_class: IsolationClass
    weight: int
    """Share in fair service, 1..1000."""
    priority: Priority
    """Most urgent priority at which the request may be served."""
    deterministic: Determinism
    namespace: Namespace = Namespace.TENANT
    public_prefixes: tuple[str, ...] = ()
    """Ids of this model's public prefixes with which the request may begin."""
    reasoning: bool = True
    """Whether the answer may show the model's reasoning."""
    external: bool = False
    """Whether the policy allows the tenant models outside of the appliance by name, so that what its class promises is
    not promised there."""
    wakes: bool = True
    """Whether the request may wake the model, should it sleep by then."""
    price: Price = FREE
    """Price of the request's tokens; zeros where the policy has none."""
    bounds_spend: bool = False
    """Whether the largest cost must be reserved, because the tenant has a limit of spend."""
    downgraded: str = ""
    """Key of the limit that the request exceeds, and for which it is served with priority ``LOW``; empty for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Result for one request. Only an allowance has obligations, and it has no retry time."""

    effect: Effect
    reason: Reason
    rule: str
    """Path in the policy of the rule that decided, such as ``tenants.alpha.limits.concurrency``; for the operator."""
    message: str
    """One sentence for the caller; it names no other tenant."""
    policy_digest: str
    limit: int | None = None
    """Limit set by the rule, where it has one."""
    actual: int | None = None
    """Number that was compared with the limit."""
    param: str = ""
    """Field of the request that a content rule is about."""
    retry_after_s: float | None = None
    """Seconds after which the same request may pass; None when waiting does not help."""
    obligations: Obligations | None = None

    @property
    def allowed(self) -> bool:
        """Return whether the effect is ``ALLOW``."""
        return self.effect is Effect.ALLOW
