"""Decision about one request: pure, total, default deny.

It is made twice. *Before* the prompt is tokenised (``input_tokens`` None), so that a refused caller costs no
tokenising: tenant, model, output cap, concurrency, request rate, debt of tokens, spend. *After*, with the exact count:
tenant and model again (the policy may have changed in between), output cap, context, token rate, spend. The second call
does not check concurrency and request rate, because the request itself is already counted in them.

Permission for the model and the feature is checked first. A model that is asked for by an alias needs permission for
the alias and none for its own name, and the alias must lead to it when the decision is taken (``policy.routes``). Rules
are tried in this order and the first denial decides; permanent refusals come before temporary ones, so that no caller
is told to retry a request that can never pass. A rule that cannot be evaluated denies: who has a limit of spend may not
use a model without a price.

The module imports only the standard library, and nothing from it for clock, files, sockets or environment: time is an
argument.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

from policy.decision import Decision, Effect, Obligations, Reason
from policy.limits import Rate, refill, retry_after
from policy.match import first_match
from policy.model import FREE, Feature, Limits, PolicySet, Price, Tenant
from policy.prices import affordable, cost, find_price
from policy.request import AccessRequest, Spend, Usage
from policy.routes import leads
from policy.wording import counted

CONCURRENCY_RETRY_S = 1.0
"""Retry hint in seconds after a concurrency denial: the end of a running request is unknown, and a short reply takes
about this long."""


def principal(policy: PolicySet, credential: str) -> str | None:
    """Return the tenant id of an authenticated credential, or None when the policy does not know it."""
    return policy.principals.get(credential)


def visible_models(policy: PolicySet, tenant: str, names: Iterable[str]) -> tuple[str, ...]:
    """Return those of ``names`` that the tenant may call, in their order; none for an unknown tenant."""
    known = policy.tenants.get(tenant)
    if known is None:
        return ()
    return tuple(name for name in names if first_match(known.models, name) is not None)


def evaluate(policy: PolicySet, access: AccessRequest, usage: Usage, now: float) -> Decision:
    """Allow or deny ``access``; ``now`` is in seconds of the clock by which the buckets of ``usage`` were updated."""
    tenant = policy.tenants.get(access.tenant)
    if tenant is None:
        return Decision(
            effect=Effect.DENY,
            reason=Reason.UNKNOWN_CREDENTIAL,
            rule="tenants",
            message="the credential belongs to no tenant of this service",
            policy_digest=policy.digest,
        )
    matched = first_match(tenant.models, access.alias or access.model)
    if (refused := _name_refused(policy, tenant, access, matched)) is not None:
        return refused
    if access.feature is not None and not tenant.features.grants(access.feature):
        return Decision(
            effect=Effect.DENY,
            reason=Reason.FEATURE_NOT_ALLOWED,
            rule=f"tenants.{tenant.id}.features.{access.feature.value}",
            message=f"this tenant may not use {_FEATURES[access.feature]}",
            policy_digest=policy.digest,
        )
    price = find_price(policy, access.model, tenant.isolation_class)
    if price is None and tenant.limits.bounds_spend:
        return Decision(
            effect=Effect.DENY,
            reason=Reason.NO_PRICE,
            rule="prices.rules",
            message="this tenant's spend is limited, and this model has no price",
            policy_digest=policy.digest,
        )
    case = _Case(tenant.limits, access, usage, now, price or FREE)
    for check in _CHECKS_BEFORE if access.input_tokens is None else _CHECKS_AFTER:
        denial = check(case)
        if denial is not None:
            return Decision(
                effect=Effect.DENY,
                reason=denial.reason,
                rule=f"tenants.{tenant.id}.limits.{denial.key}",
                message=denial.message,
                policy_digest=policy.digest,
                limit=denial.limit,
                actual=denial.actual,
                retry_after_s=denial.retry_after_s,
            )
    return Decision(
        effect=Effect.ALLOW,
        reason=Reason.ALLOWED,
        rule=f"tenants.{tenant.id}.models[{matched}]",
        message="allowed",
        policy_digest=policy.digest,
        obligations=_obligations(policy, tenant, case),
    )


def _name_refused(policy: PolicySet, tenant: Tenant, access: AccessRequest, matched: int | None) -> Decision | None:
    """Deny a name that matches none of the tenant's patterns, or that leads to the model no more."""
    if matched is None:
        return Decision(
            effect=Effect.DENY,
            reason=Reason.MODEL_NOT_ALLOWED,
            rule=f"tenants.{tenant.id}.models",
            message="there is no such model, or this tenant may not use it",
            policy_digest=policy.digest,
        )
    if not leads(policy, access.model, access.alias):
        return Decision(
            effect=Effect.DENY,
            reason=Reason.ROUTE_CHANGED,
            rule=f"routes.{access.alias or access.model}",
            message="the route to this model changed; the same request may be sent again",
            policy_digest=policy.digest,
        )
    return None


@dataclass(frozen=True, slots=True)
class _Case:
    """What one decision is about, for the checks."""

    limits: Limits
    access: AccessRequest
    usage: Usage
    now: float
    price: Price

    @property
    def granted_output(self) -> int:
        """Output tokens for each choice: those asked for, else as many as limits and money give."""
        limits, access = self.limits, self.access
        if access.max_output_tokens is not None:
            return access.max_output_tokens
        most = min(limits.max_output_tokens // access.choices, limits.max_context_tokens - (access.input_tokens or 0))
        left = spend_left(limits, self.usage.spend)
        if left is None:
            return most
        # One token must fit; where it does not, the denial says so.
        return min(most, max(1, affordable(self.price, access.input_tokens or 0, access.choices, left)))


@dataclass(frozen=True, slots=True)
class _Denial:
    reason: Reason
    key: str
    message: str
    limit: int
    actual: int
    retry_after_s: float | None = None


def _obligations(policy: PolicySet, tenant: Tenant, case: _Case) -> Obligations:
    access = case.access
    return Obligations(
        max_output_tokens=case.granted_output,
        retention=tenant.retention,
        isolation_class=tenant.isolation_class,
        weight=tenant.weight,
        priority=tenant.priority,
        deterministic=tenant.deterministic,
        public_prefixes=tuple([name for name in tenant.public if policy.public[name].model == access.model]),
        reasoning=tenant.features.reasoning,
        price=case.price,
        bounds_spend=tenant.limits.bounds_spend,
    )


def spend_left(limits: Limits, spend: Spend | None) -> int | None:
    """Return what may still be spent under both limits, in billionths; below 0 when more was spent, None without a
    limit."""
    day, month = (spend.day, spend.month) if spend is not None else (0, 0)
    left = [
        limit - spent
        for limit, spent in ((limits.spend_per_day, day), (limits.spend_per_month, month))
        if limit is not None
    ]
    return min(left, default=None)


def _output(case: _Case) -> _Denial | None:
    limits, access = case.limits, case.access
    # Without a requested number, one token for each choice must fit.
    each = 1 if access.max_output_tokens is None else access.max_output_tokens
    limit, asked = limits.max_output_tokens, access.choices * each
    if asked <= limit:
        return None
    message = f"{asked} output tokens were asked for; this tenant may have at most {limit} a request"
    return _Denial(Reason.OUTPUT_TOO_LONG, "max_output_tokens", message, limit, asked)


def _context(case: _Case) -> _Denial | None:
    access, limit = case.access, case.limits.max_context_tokens
    # Without a requested number, one output token must fit.
    output = 1 if access.max_output_tokens is None else access.max_output_tokens
    needed = (access.longest_input or access.input_tokens or 0) + output
    if needed <= limit:
        return None
    message = f"prompt and output need {_counted(access, needed)}; this tenant may have at most {limit} a request"
    return _Denial(Reason.CONTEXT_TOO_LONG, "max_context_tokens", message, limit, needed)


def _concurrency(case: _Case) -> _Denial | None:
    access, limit, running = case.access, case.limits.concurrency, case.usage.concurrency
    if running + access.choices <= limit:
        return None
    if access.choices > limit:
        message = f"{access.choices} choices were asked for; each counts as a request, and this tenant may have {limit}"
        return _Denial(Reason.CONCURRENCY, "concurrency", message, limit, access.choices)
    number = counted(running, "request", grouped=False)
    message = f"{number} of this tenant {'is' if running == 1 else 'are'} running; it may have {limit} at once"
    return _Denial(Reason.CONCURRENCY, "concurrency", message, limit, running, CONCURRENCY_RETRY_S)


def _request_rate(case: _Case) -> _Denial | None:
    limit = case.limits.requests_per_minute
    wait = retry_after(case.usage.request_bucket, Rate(limit), 1, case.now)
    if wait == 0:
        return None
    message = f"this tenant may send {counted(limit, 'request', grouped=False)} a minute and has sent {limit}"
    return _Denial(Reason.REQUEST_RATE, "requests_per_minute", message, limit, limit, wait)


def _debt(case: _Case) -> _Denial | None:
    # Debt is of prompts that were refused after the work on them. Who has none is not refused before the count, however
    # little is left: only the count says how long to wait.
    limit, bucket = case.limits.tokens_per_minute, case.usage.token_bucket
    wait = retry_after(bucket, Rate(limit), 0, case.now)
    if wait == 0:
        return None
    owed = ceil(-refill(bucket, Rate(limit), case.now).level)
    more = counted(owed, "token", grouped=False)
    message = f"this tenant has used {more} more than the {limit} a minute that it may use"
    return _Denial(Reason.TOKEN_RATE, "tokens_per_minute", message, limit, limit + owed, wait)


def _token_rate(case: _Case) -> _Denial | None:
    access, limit = case.access, case.limits.tokens_per_minute
    needed = (access.input_tokens or 0) + access.choices * case.granted_output
    wait = retry_after(case.usage.token_bucket, Rate(limit), needed, case.now)
    if wait == 0:
        return None
    message = f"this request may use {_counted(access, needed)}; this tenant may use {limit} a minute"
    if wait is None:
        message += ", so ask for fewer output tokens or send a shorter prompt"
    return _Denial(Reason.TOKEN_RATE, "tokens_per_minute", message, limit, needed, wait)


def _spend_per_day(case: _Case) -> _Denial | None:
    spend = case.usage.spend
    spent, wait = (spend.day, spend.day_left_s) if spend is not None else (0, 0.0)
    return _spend(case, "spend_per_day", case.limits.spend_per_day, spent, wait)


def _spend_per_month(case: _Case) -> _Denial | None:
    spend = case.usage.spend
    spent, wait = (spend.month, spend.month_left_s) if spend is not None else (0, 0.0)
    return _spend(case, "spend_per_month", case.limits.spend_per_month, spent, wait)


def _spend(case: _Case, key: str, limit: int | None, spent: int, wait: float) -> _Denial | None:
    """Check one limit of spend; before the count, that anything is left of it."""
    if limit is None:
        return None
    access, period = case.access, key.rpartition("_")[2]
    if access.input_tokens is None:
        if spent < limit:
            return None
        message = f"this tenant has spent what it may spend in a {period}"
        return _Denial(Reason.SPEND, key, message, limit, spent, wait)
    needed = cost(case.price, access.input_tokens, 0, access.choices * case.granted_output)
    if spent + needed <= limit:
        return None
    message = f"this request may cost more than is left of what this tenant may spend in a {period}"
    if needed > limit:
        return _Denial(Reason.SPEND, key, f"{message}, and more than all of it", limit, needed)
    return _Denial(Reason.SPEND, key, f"{message}; ask for fewer output tokens", limit, spent + needed, wait)


def _counted(access: AccessRequest, tokens: int) -> str:
    text = counted(tokens, "token", grouped=False)
    return f"at least {text}" if access.uncounted else text


_FEATURES = {
    Feature.STRUCTURED_OUTPUT: "structured output",
    Feature.TOKENIZE: "the tokenizer alone",
    Feature.TOOLS: "tools",
}
"""Feature -> what a denial calls it."""

_CHECKS_BEFORE = (_output, _concurrency, _request_rate, _debt, _spend_per_day, _spend_per_month)
_CHECKS_AFTER = (_output, _context, _token_rate, _spend_per_day, _spend_per_month)
