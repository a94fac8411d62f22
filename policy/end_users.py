"""Limits of one end user of a tenant: the checks beside those of the tenant itself. Pure.

A tenant's application says who of its users a request is for. All requests that do not say so count as one end user's.
An end user shares what its tenant has; a limit here is for each of them alone, and refuses what is beyond it.

The module imports only the standard library.
"""

from __future__ import annotations

from policy.decision import Decision, Effect, Reason
from policy.limits import Bucket, Rate, retry_after
from policy.model import PolicySet, Tenant
from policy.rates import filled
from policy.request import AccessRequest, EndUserUsage
from policy.wording import counted

CONCURRENCY_RETRY_S = 1.0
"""Retry hint in seconds after a denial for requests at once, as for the tenant's own."""


def end_user_denial(
    policy: PolicySet, tenant: Tenant, access: AccessRequest, usage: EndUserUsage, now: float, granted_output: int
) -> Decision | None:
    """Return the denial of a request that is beyond a limit of its end user; None where it is within all of them.

    Args:
        policy: in force.
        tenant: of the request.
        access: the request.
        usage: of its end user just before the request is admitted.
        now: as for ``policy.evaluate.evaluate``.
        granted_output: output tokens for each choice.
    """
    if access.input_tokens is None:
        return _concurrency(policy, tenant, access, usage) or _requests(policy, tenant, usage, now)
    return _output(policy, tenant, access.choices * granted_output, usage, now)


def _concurrency(policy: PolicySet, tenant: Tenant, access: AccessRequest, usage: EndUserUsage) -> Decision | None:
    limit = tenant.end_users.concurrency
    if limit is None or usage.concurrency + access.choices <= limit:
        return None
    key, reason = "concurrency", Reason.CONCURRENCY
    if access.choices > limit:
        asked = counted(access.choices, "choice", grouped=False)
        message = f"{asked} were asked for; each counts as a request, and this end user may have {limit}"
        return _denied(policy, tenant, reason, key, message, limit, access.choices, None)
    number = counted(usage.concurrency, "request", grouped=False)
    message = f"{number} of this end user {'is' if usage.concurrency == 1 else 'are'} running; {limit} may be at once"
    return _denied(policy, tenant, reason, key, message, limit, usage.concurrency, CONCURRENCY_RETRY_S)


def _requests(policy: PolicySet, tenant: Tenant, usage: EndUserUsage, now: float) -> Decision | None:
    limit = tenant.end_users.requests_per_minute
    if limit is None:
        return None
    wait = _wait(usage.request_bucket, Rate(limit), 1, now)
    if wait == 0:
        return None
    message = f"this end user may send {counted(limit, 'request', grouped=False)} a minute and has sent {limit}"
    return _denied(policy, tenant, Reason.REQUEST_RATE, "requests_per_minute", message, limit, limit, wait)


def _output(policy: PolicySet, tenant: Tenant, needed: int, usage: EndUserUsage, now: float) -> Decision | None:
    limit = tenant.end_users.output_tokens_per_minute
    if limit is None or not needed:
        return None
    wait = _wait(usage.output_bucket, Rate(limit), needed, now)
    if wait == 0:
        return None
    asked = counted(needed, "output token", grouped=False)
    message = f"this request may use {asked}; this end user may use {limit} a minute"
    if wait is None:
        message += ", so ask for fewer"
    return _denied(policy, tenant, Reason.TOKEN_RATE, "output_tokens_per_minute", message, limit, needed, wait)


def _wait(bucket: Bucket | None, rate: Rate, amount: int, now: float) -> float | None:
    return retry_after(filled(bucket, rate, now), rate, amount, now)


def _denied(  # noqa: PLR0913 - the parts of a decision
    policy: PolicySet,
    tenant: Tenant,
    reason: Reason,
    key: str,
    message: str,
    limit: int,
    actual: int,
    wait: float | None,
) -> Decision:
    return Decision(
        effect=Effect.DENY,
        reason=reason,
        rule=f"tenants.{tenant.id}.end_users.{key}",
        message=message,
        policy_digest=policy.digest,
        limit=limit,
        actual=actual,
        retry_after_s=wait,
    )
