"""What the evaluator answers: allow or deny, the rule that made it so, and what follows from
it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from policy.model import Determinism, IsolationClass, Priority, Retention


class Effect(StrEnum):
    """The two outcomes; there is no third."""

    ALLOW = "allow"
    DENY = "deny"


class Reason(StrEnum):
    """Why; a closed list that front ends map to their status codes."""

    ALLOWED = "allowed"
    UNKNOWN_CREDENTIAL = "unknown_credential"
    """Nobody this policy knows."""
    MODEL_NOT_ALLOWED = "model_not_allowed"
    FEATURE_NOT_ALLOWED = "feature_not_allowed"
    CONTEXT_TOO_LONG = "context_too_long"
    OUTPUT_TOO_LONG = "output_too_long"
    REQUEST_RATE = "request_rate"
    TOKEN_RATE = "token_rate"  # noqa: S105 - a reason, no secret
    CONCURRENCY = "concurrency"


@dataclass(frozen=True, slots=True, kw_only=True)
class Obligations:
    """What the caller of ``evaluate`` must honour when it serves the request."""

    max_output_tokens: int
    """The grant: no more output tokens than this for each choice."""
    retention: Retention
    isolation_class: IsolationClass
    weight: int
    """Share in fair service, 1..1000."""
    priority: Priority
    """The most urgent that the request may be served at."""
    deterministic: Determinism
    public_prefixes: tuple[str, ...] = ()
    """Ids of the public prefixes of this model that the request may begin with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One decision. A denial has no obligations, an allowance has no retry time."""

    effect: Effect
    reason: Reason
    rule: str
    """Path in the policy of what decided, such as ``tenants.alpha.limits.concurrency``. For the
    operator."""
    message: str
    """One sentence for the caller; it names no other tenant."""
    policy_digest: str
    limit: int | None = None
    """The number of the rule, where it has one."""
    actual: int | None = None
    """The number that was held against it."""
    retry_after_s: float | None = None
    """Seconds after which the same request may pass; None when waiting does not help."""
    obligations: Obligations | None = None

    @property
    def allowed(self) -> bool:
        """Whether the effect is ``ALLOW``."""
        return self.effect is Effect.ALLOW
