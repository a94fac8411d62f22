"""Denials of the policy as the errors that callers see."""

from __future__ import annotations

from appliance.common.errors import (
    ApplianceError,
    ContextLengthError,
    FeatureNotAllowedError,
    InvalidRequestError,
    PayloadTooLargeError,
    PermissionDeniedError,
    PolicyChangedError,
    RateLimitedError,
    SpendLimitError,
    UnauthenticatedError,
)
from policy.decision import Decision, Reason
from policy.prices import amount_text

HIDDEN = frozenset({Reason.UNKNOWN_CREDENTIAL, Reason.MODEL_NOT_ALLOWED})
"""Reasons whose rule the caller is not told: it would tell which names are there."""


def denial(decision: Decision) -> ApplianceError:
    """Return a denial, or what a request would have to wait for, as the error that the caller sees, with its rule and
    the policy's digest. Its ``param`` is ``prompt``, ``max_tokens``, ``choices`` or a field of ``policy.content``; the
    request's lifecycle replaces it by the caller's name."""
    return _denial(decision).by_rule(decision.rule, decision.policy_digest, hidden=decision.reason in HIDDEN)


def _details(decision: Decision) -> dict[str, str]:
    details = {}
    if decision.limit is not None:
        details["limit"] = str(decision.limit)
    if decision.actual is not None:
        details["actual"] = str(decision.actual)
    if decision.reason is Reason.SPEND:
        details = {name: amount_text(int(number)) for name, number in details.items()}
    return details


def _denial(decision: Decision) -> ApplianceError:
    details = _details(decision)
    wait = decision.retry_after_s
    match decision.reason:
        case Reason.UNKNOWN_CREDENTIAL:
            return UnauthenticatedError(decision.message)
        case Reason.MODEL_NOT_ALLOWED | Reason.NO_PRICE:
            return PermissionDeniedError(decision.message, param="model")
        case Reason.ROUTE_CHANGED:
            return PolicyChangedError(decision.message)
        case Reason.NETWORK_NOT_ALLOWED | Reason.REGION_NOT_ALLOWED | Reason.EXTERNAL_NOT_ALLOWED | Reason.OUT_OF_HOURS:
            return PermissionDeniedError(decision.message, details=details)
        case Reason.FEATURE_NOT_ALLOWED:
            return FeatureNotAllowedError(decision.message)
        case Reason.FIELD_NOT_ALLOWED | Reason.ROLE_NOT_ALLOWED:
            return FeatureNotAllowedError(decision.message, param=decision.param)
        case Reason.CONTENT_TOO_LARGE:
            return PayloadTooLargeError(decision.message, param=decision.param, details=details)
        case Reason.CONTEXT_TOO_LONG:
            return ContextLengthError(decision.message, param="prompt", details=details)
        case Reason.OUTPUT_TOO_LONG:
            return InvalidRequestError(decision.message, param="max_tokens", details=details)
        case Reason.REQUEST_RATE | Reason.CONCURRENCY | Reason.TOKEN_RATE | Reason.KV_TOKENS if wait is not None:
            return RateLimitedError(decision.message, retry_after_s=wait, details=details)
        case Reason.SPEND if wait is not None:
            return SpendLimitError(decision.message, retry_after_s=wait, details=details)
        case _:
            # More choices than may run, or a request larger than a whole burst or a whole period's spend:
            # waiting does not help.
            param = "choices" if decision.reason is Reason.CONCURRENCY else "max_tokens"
            return InvalidRequestError(decision.message, param=param, details=details)
