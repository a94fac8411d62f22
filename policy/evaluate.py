"""Decision about one request: pure, total, default deny.

It is made twice. *Before* the prompt is tokenised (``input_tokens`` None), so that a refused caller costs no
tokenising: tenant, model, output cap, concurrency, request rate, debt of tokens, spend. *After*, with the exact count:
tenant and model again (the policy may have changed in between), output cap, context, token rate, tokens of KV, spend.
The second call does not check concurrency and request rate, because the request itself is already counted in them.

Permission for the model and the feature is checked first. A model that is asked for by an alias needs permission for
the alias and none for its own name, and the alias must lead to it when the decision is taken (``policy.routes``). Rules
are tried in this order and the first denial decides; permanent refusals come before temporary ones, so that no caller
is told to retry a request that can never pass. Where the policy says that requests beyond a limit wait (``queue``), the
request waits only if no other rule denies it; where it says that they are downgraded, the request is allowed with low
priority, and may take once the burst more. A rule that cannot be evaluated denies: who has a limit of spend may not use
a model without a price.

The module imports only the standard library, and nothing from it for clock, files, sockets or environment: time is an
argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from math import ceil

from policy.adapters import granting_rule
from policy.content import content_denial
from policy.decision import Decision, Effect, Obligations, Reason
from policy.end_users import end_user_denial
from policy.feature import Feature
from policy.kept import keeps_files, keeps_responses
from policy.limits import Bucket, Rate, level, retry_after
from policy.model import FREE, Exceeded, External, Limits, PolicySet, Price, Priority, Tenant
from policy.outside import outside_denial
from policy.prices import affordable, cost, find_price, spend_left
from policy.rates import filled, input_rate, output_rate, overdraft, request_rate, token_rate, waits
from policy.request import AccessRequest, Usage
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
    return tuple(name for name in names if granting_rule(policy, known, name) is not None)


def evaluate(policy: PolicySet, access: AccessRequest, usage: Usage, now: float) -> Decision:
    """Decide on ``access``; ``now`` is in seconds of the clock by which the buckets of ``usage`` were updated."""
    tenant = policy.tenants.get(access.tenant)
    if tenant is None:
        return Decision(
            effect=Effect.DENY,
            reason=Reason.UNKNOWN_CREDENTIAL,
            rule="tenants",
            message="the credential belongs to no tenant of this service",
            policy_digest=policy.digest,
        )
    matched = granting_rule(policy, tenant, access.alias or access.model)
    if matched is None or not leads(policy, tenant, access.adapter or access.model, access.alias):
        return _name_refused(policy, tenant, access, matched)
    if (outside := outside_denial(policy, tenant, access)) is not None:
        return outside
    if (withheld := _withheld(tenant, access)) is not None:
        return Decision(
            effect=Effect.DENY,
            reason=Reason.FEATURE_NOT_ALLOWED,
            rule=f"tenants.{tenant.id}.{withheld[0]}",
            message=f"this tenant may not use {withheld[1].said}",
            policy_digest=policy.digest,
        )
    if access.content is not None and (refused := content_denial(policy, tenant, access.content)) is not None:
        return refused
    price = find_price(policy, access.model, tenant.isolation_class, batch=access.batch)
    if price is None and tenant.limits.bounds_spend:
        return Decision(
            effect=Effect.DENY,
            reason=Reason.NO_PRICE,
            rule="prices.rules",
            message="this tenant's spend is limited, and this model has no price",
            policy_digest=policy.digest,
        )
    granted = _granted_output(tenant.limits, access, usage, price or FREE)
    case = _Case(tenant.limits, access, usage, now, price or FREE, granted)
    return _by_limits(policy, tenant, case, matched)


def _withheld(tenant: Tenant, access: AccessRequest) -> tuple[str, Feature] | None:
    """Return what of an access is withheld from the tenant, with the key that withholds it."""
    if access.batch and not keeps_files(tenant):
        return "retention" if tenant.features.batches else "features.batches", Feature.BATCHES
    if access.feature is not None and not tenant.features.grants(access.feature):
        return f"features.{access.feature.value}", access.feature
    if access.asleep and not (tenant.features.wake or tenant.isolation_class.own_engine):
        return "features.wake", Feature.WAKE
    if access.feature is Feature.STORED_RESPONSES and not keeps_responses(tenant):
        return "retention", access.feature
    return None


def _name_refused(policy: PolicySet, tenant: Tenant, access: AccessRequest, matched: str | None) -> Decision:
    """Deny a name that matches none of the tenant's patterns, or that leads to the model no more."""
    if matched is None:
        return Decision(
            effect=Effect.DENY,
            reason=Reason.MODEL_NOT_ALLOWED,
            rule=f"tenants.{tenant.id}.models",
            message="there is no such model, or this tenant may not use it",
            policy_digest=policy.digest,
        )
    return Decision(
        effect=Effect.DENY,
        reason=Reason.ROUTE_CHANGED,
        rule=f"routes.{access.alias or access.model}",
        message="the route to this model changed; the same request may be sent again",
        policy_digest=policy.digest,
    )


@dataclass(slots=True)
class _Case:
    """What one decision is about, for the checks, which leave it as it is. It is not frozen: that takes three times as
    long to make."""

    limits: Limits
    access: AccessRequest
    usage: Usage
    now: float
    price: Price
    granted_output: int
    """Output tokens for each choice."""


def _by_limits(policy: PolicySet, tenant: Tenant, case: _Case, matched: str) -> Decision:
    """Decide by the tenant's limits."""
    waiting: _Denial | None = None
    downgraded = ""
    for check in _checks(case):
        denial = check(case)
        if denial is None:
            continue
        if denial.treatment is Exceeded.REFUSE:
            return _denied(policy, tenant, denial, Effect.DENY)
        if denial.treatment is Exceeded.QUEUE:
            waiting = waiting or denial
        else:
            downgraded = downgraded or denial.key
    if (user := case.usage.end_user) is not None:
        refused = end_user_denial(policy, tenant, case.access, user, case.now, case.granted_output)
        if refused is not None:
            return refused
    if waiting is not None:
        return _denied(policy, tenant, waiting, Effect.WAIT)
    return Decision(
        effect=Effect.ALLOW,
        reason=Reason.ALLOWED,
        rule=f"tenants.{tenant.id}.{matched}",
        message="allowed",
        policy_digest=policy.digest,
        obligations=_obligations(policy, tenant, case, downgraded),
    )


def _checks(case: _Case) -> Sequence[_Check]:
    limits = case.limits
    apart = limits.input_tokens_per_minute is not None or limits.output_tokens_per_minute is not None
    spends = limits.spend_per_day is not None or limits.spend_per_month is not None
    return _CHECKS[case.access.input_tokens is not None, apart, limits.kv_tokens is not None, spends]


@dataclass(frozen=True, slots=True)
class _Denial:
    reason: Reason
    key: str
    message: str
    limit: int
    actual: int
    retry_after_s: float | None = None
    treatment: Exceeded = Exceeded.REFUSE


def _denied(policy: PolicySet, tenant: Tenant, denial: _Denial, effect: Effect) -> Decision:
    return Decision(
        effect=effect,
        reason=denial.reason,
        rule=f"tenants.{tenant.id}.limits.{denial.key}",
        message=denial.message,
        policy_digest=policy.digest,
        limit=denial.limit,
        actual=denial.actual,
        retry_after_s=denial.retry_after_s,
    )


def _granted_output(limits: Limits, access: AccessRequest, usage: Usage, price: Price) -> int:
    """Return the output tokens for each choice: those asked for, else as many as limits and money give."""
    if access.max_output_tokens is not None:
        return access.max_output_tokens
    most = min(limits.max_output_tokens // access.choices, limits.max_context_tokens - (access.input_tokens or 0))
    left = spend_left(limits, usage.spend)
    if left is None:
        return most
    # One token must fit; where it does not, the denial says so.
    return min(most, max(1, affordable(price, access.input_tokens or 0, access.choices, left)))


def _obligations(policy: PolicySet, tenant: Tenant, case: _Case, downgraded: str) -> Obligations:
    access = case.access
    prefixes = () if access.adapter else tenant.public  # an adapter computes others than the model alone
    if prefixes:
        prefixes = tuple([name for name in prefixes if policy.public[name].model == access.model])
    return Obligations(
        max_output_tokens=case.granted_output,
        retention=tenant.retention,
        isolation_class=tenant.isolation_class,
        weight=tenant.weight,
        priority=Priority.LOW if downgraded else tenant.priority,
        deterministic=tenant.deterministic,
        namespace=tenant.namespace,
        public_prefixes=prefixes,
        reasoning=tenant.features.reasoning,
        wakes=tenant.features.wake,
        external=tenant.external is External.ALLOW,
        price=case.price,
        bounds_spend=tenant.limits.bounds_spend,
        downgraded=downgraded,
    )


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
    exceeded, wait = case.limits.concurrency_exceeded, CONCURRENCY_RETRY_S
    fits = running + access.choices <= limit + overdraft(exceeded, limit)
    treatment = _treatment(case, exceeded, wait, fits=fits)
    return _Denial(Reason.CONCURRENCY, "concurrency", message, limit, running, wait, treatment)


def _kv_whole(case: _Case) -> _Denial | None:
    """Check that the request alone needs no more KV than the tenant may have."""
    limit, needed = case.limits.kv_tokens, _kv_needed(case)
    if limit is None or needed <= limit:
        return None
    message = f"this request may need KV of {_counted(case.access, needed)}; this tenant may have {limit} at once"
    return _Denial(Reason.KV_TOKENS, "kv_tokens", f"{message}, so {_REMEDIES['token']}", limit, needed)


def _kv_tokens(case: _Case) -> _Denial | None:
    """Check that running requests leave the KV that the request may need."""
    limit, held = case.limits.kv_tokens, case.usage.kv_tokens
    if limit is None or (total := held + _kv_needed(case)) <= limit:
        return None
    message = f"running requests of this tenant may need KV of {counted(held, 'token', grouped=False)}, and this one "
    message += f"of {_counted(case.access, _kv_needed(case))}; it may have {limit} at once"
    exceeded, wait = case.limits.kv_tokens_exceeded, CONCURRENCY_RETRY_S
    treatment = _treatment(case, exceeded, wait, fits=total <= limit + overdraft(exceeded, limit))
    return _Denial(Reason.KV_TOKENS, "kv_tokens", message, limit, total, wait, treatment)


def _kv_needed(case: _Case) -> int:
    return (case.access.input_tokens or 0) + case.access.choices * case.granted_output


def _request_rate(case: _Case) -> _Denial | None:
    rate, exceeded = request_rate(case.limits), case.limits.requests_exceeded
    wait = retry_after(case.usage.request_bucket, rate, 1, case.now)
    if wait == 0:
        return None
    comma = "" if rate.burst is None else ","
    message = (
        f"this tenant may send {counted(rate.per_minute, 'request', grouped=False)} a minute{_at_once(rate)}{comma}"
    )
    message += f" and has sent {rate.capacity}"
    wait, treatment = _beyond(case, case.usage.request_bucket, rate, 1, exceeded, wait)
    limit = rate.capacity
    return _Denial(Reason.REQUEST_RATE, "requests_per_minute", message, limit, limit, wait, treatment)


def _debt(case: _Case) -> _Denial | None:
    # Debt is of prompts that were refused after the work on them. Who has none is not refused before the count, however
    # little is left: only the count says how long to wait.
    limits, usage = case.limits, case.usage
    found = _in_debt(case, "tokens_per_minute", token_rate(limits), usage.token_bucket, limits.tokens_exceeded)
    if found is None and (rate := input_rate(limits)) is not None and usage.input_bucket is not None:
        key, exceeded = "input_tokens_per_minute", limits.input_tokens_exceeded
        return _in_debt(case, key, rate, usage.input_bucket, exceeded, "input token")
    return found


def _in_debt(
    case: _Case, key: str, rate: Rate, bucket: Bucket, exceeded: Exceeded, noun: str = "token"
) -> _Denial | None:
    allowed = overdraft(exceeded, rate.capacity)
    wait = retry_after(bucket, rate, 0, case.now, allowed)
    if wait == 0:
        return None
    limit, owed = rate.per_minute, ceil(-level(bucket, rate, case.now))
    more = counted(owed, noun, grouped=False)
    message = f"this tenant has used {more} more than the {limit} a minute that it may use"
    treatment = _treatment(case, exceeded, wait, fits=False)
    return _Denial(Reason.TOKEN_RATE, key, message, limit, limit + owed, wait, treatment)


def _token_bursts(case: _Case) -> _Denial | None:
    """Check that full buckets of a tenant with several rates of tokens hold what the request may use."""
    limits, access = case.limits, case.access
    prompt, output = access.input_tokens or 0, access.choices * case.granted_output
    needs = (
        ("tokens_per_minute", token_rate(limits), prompt + output, "token"),
        ("input_tokens_per_minute", input_rate(limits), prompt, "input token"),
        ("output_tokens_per_minute", output_rate(limits), output, "output token"),
    )
    for key, rate, needed, noun in needs:
        if rate is not None and needed > rate.capacity:
            return _too_large(case, key, rate, needed, noun)
    return None


def _too_large(case: _Case, key: str, rate: Rate, needed: int, noun: str) -> _Denial:
    message = f"{_needs(case, rate, needed, noun)}, so {_REMEDIES[noun]}"
    return _Denial(Reason.TOKEN_RATE, key, message, rate.capacity, needed)


def _token_rate(case: _Case) -> _Denial | None:
    limits, access = case.limits, case.access
    needed = (access.input_tokens or 0) + access.choices * case.granted_output
    rate, exceeded = token_rate(limits), limits.tokens_exceeded
    return _short(case, "tokens_per_minute", rate, case.usage.token_bucket, needed, exceeded, "token")


def _input_rate(case: _Case) -> _Denial | None:
    rate = input_rate(case.limits)
    if rate is None:
        return None
    bucket, needed = filled(case.usage.input_bucket, rate, case.now), case.access.input_tokens or 0
    exceeded = case.limits.input_tokens_exceeded
    return _short(case, "input_tokens_per_minute", rate, bucket, needed, exceeded, "input token")


def _output_rate(case: _Case) -> _Denial | None:
    rate, needed = output_rate(case.limits), case.access.choices * case.granted_output
    # What asks for no output owes nothing to the rate of outputs.
    if rate is None or not needed:
        return None
    bucket, exceeded = filled(case.usage.output_bucket, rate, case.now), case.limits.output_tokens_exceeded
    return _short(case, "output_tokens_per_minute", rate, bucket, needed, exceeded, "output token")


def _short(
    case: _Case, key: str, rate: Rate, bucket: Bucket, needed: int, exceeded: Exceeded, noun: str
) -> _Denial | None:
    """Check that a bucket holds what the request may use now."""
    wait = retry_after(bucket, rate, needed, case.now)
    if wait == 0:
        return None
    if wait is None:
        return _too_large(case, key, rate, needed, noun)
    wait, treatment = _beyond(case, bucket, rate, needed, exceeded, wait)
    message = _needs(case, rate, needed, noun)
    return _Denial(Reason.TOKEN_RATE, key, message, rate.capacity, needed, wait, treatment)


def _beyond(
    case: _Case, bucket: Bucket, rate: Rate, needed: int, exceeded: Exceeded, wait: float | None
) -> tuple[float | None, Exceeded]:
    """Return the seconds until a request that exceeds a rate may pass, and what becomes of it."""
    if exceeded is Exceeded.DOWNGRADE:
        wait = retry_after(bucket, rate, needed, case.now, overdraft(exceeded, rate.capacity))
    return wait, _treatment(case, exceeded, wait, fits=wait == 0)


def _treatment(case: _Case, exceeded: Exceeded, wait: float | None, *, fits: bool) -> Exceeded:
    """Return what becomes of a request that exceeds a limit; ``fits``: below the bound of those that are downgraded."""
    if exceeded is Exceeded.DOWNGRADE and fits:
        return exceeded
    return Exceeded.QUEUE if waits(case.limits, case.usage, exceeded, wait) else Exceeded.REFUSE


def _needs(case: _Case, rate: Rate, needed: int, noun: str) -> str:
    may = f"this tenant may use {rate.per_minute} a minute{_at_once(rate)}"
    return f"this request may use {_counted(case.access, needed, noun)}; {may}"


def _at_once(rate: Rate) -> str:
    return "" if rate.burst is None else f", {rate.burst} at once"


def _spend_per_day(case: _Case) -> _Denial | None:
    if case.limits.spend_per_day is None:
        return None
    spend = case.usage.spend
    spent, wait = (spend.day, spend.day_left_s) if spend is not None else (0, 0.0)
    return _spend(case, "spend_per_day", case.limits.spend_per_day, spent, wait)


def _spend_per_month(case: _Case) -> _Denial | None:
    if case.limits.spend_per_month is None:
        return None
    spend = case.usage.spend
    spent, wait = (spend.month, spend.month_left_s) if spend is not None else (0, 0.0)
    return _spend(case, "spend_per_month", case.limits.spend_per_month, spent, wait)


def _spend(case: _Case, key: str, limit: int, spent: int, wait: float) -> _Denial | None:
    """Check one limit of spend; before the count, that anything is left of it."""
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


def _counted(access: AccessRequest, tokens: int, noun: str = "token") -> str:
    text = counted(tokens, noun, grouped=False)
    return f"at least {text}" if access.uncounted else text


_REMEDIES = {
    "token": "ask for fewer output tokens or send a shorter prompt",
    "input token": "send a shorter prompt",
    "output token": "ask for fewer",
}
"""What a rate counts -> remedy where a request needs more than its burst."""

_Check = Callable[[_Case], _Denial | None]

_BEFORE: Sequence[_Check] = (_output, _concurrency, _request_rate, _debt, _spend_per_day, _spend_per_month)
_AFTER: Sequence[_Check] = (_output, _context, _kv_whole, _token_rate, _kv_tokens, _spend_per_day, _spend_per_month)
_APART: Sequence[_Check] = (
    *(_output, _context, _kv_whole, _token_bursts, _token_rate, _input_rate, _output_rate, _kv_tokens),
    *(_spend_per_day, _spend_per_month),
)
"""Checks of a tenant whose input or output tokens have a rate of their own."""


def _needed(checks: Sequence[_Check], *, kv: bool, spends: bool) -> Sequence[_Check]:
    """Leave out the checks of limits that a tenant does not have."""
    absent = (() if kv else (_kv_whole, _kv_tokens)) + (() if spends else (_spend_per_day, _spend_per_month))
    return tuple(check for check in checks if check not in absent)


_CHECKS = {
    (counts, apart, kv, spends): _needed((_APART if apart else _AFTER) if counts else _BEFORE, kv=kv, spends=spends)
    for counts, apart, kv, spends in product((False, True), repeat=4)
}
"""Checks by whether the prompt is counted, its tokens have a rate of their own, KV is limited, and spend is."""
