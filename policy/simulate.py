"""Decision about a request that nobody sent: the question of ``athanor policy explain``, of a policy case, of a test.

The answer comes from ``policy.evaluate.evaluate``, called as the gateway calls it: before the prompt is tokenised, then
with its count. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from policy.adapters import served_by, split
from policy.decision import Decision
from policy.evaluate import evaluate, principal
from policy.feature import Feature
from policy.limits import Bucket, Rate, full
from policy.model import ModelState, PolicySet, Tenant
from policy.outside import may_leave
from policy.prices import BILLIONTHS
from policy.rates import request_rate, token_rate
from policy.request import AccessRequest, Content, EndUserUsage, Spend, Usage
from policy.routes import DRAWS, ChoiceReason, RouteChoice, choose, visible_route

NOW = 0.0
"""Seconds of the simulated clock: the buckets are as the question says, so no time has to pass."""

DAY_S = 86_400.0
"""Seconds until midnight where a question does not say: a whole day."""

MONTH_S = 30 * DAY_S
"""Seconds until the next month where a question does not say."""

NO_RATE = Rate(1)
"""Rate of a caller that is no tenant: any will do."""

NO_TENANT = ""
"""Tenant id that no policy has, for a credential that the policy does not know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Request to decide on: exactly one of ``tenant`` and ``credential`` names the caller."""

    tenant: str | None = None
    credential: str | None = None
    model: str
    input_tokens: int | None = None
    """Prompt tokens; None: only the decision before the prompt is tokenised is taken."""
    longest_input: int | None = None
    """Tokens of the longest of several texts."""
    max_tokens: int | None = None
    """Output tokens asked for, for each choice; None for as many as allowed, 0 for none."""
    choices: int = 1
    feature: Feature | None = None
    """What it uses that can be withheld; ``BATCHES``: it is a line of a batch."""
    content: Content | None = None
    """What it holds; None: not asked about."""
    address: str | None = None
    """Address of the caller; None: not asked about."""
    region: str | None = None
    """Region of the appliance, empty for none; None: not asked about."""
    unix_s: float | None = None
    """Unix time of the request; None: not asked about."""
    uncounted: bool = False
    """Whether the prompt has ``input_tokens`` or more."""
    admitted: bool = False
    """Whether the first decision was taken already, so that the request itself is counted in the tenant's load."""
    served: str | None = None
    """Model that was chosen for a route when the first decision was taken, under a policy that may be gone."""
    draw: float = 0.0
    """Draw of the request as a part of all, 0 to less than 1; decides where it names a route that chooses by
    weight."""

    def __post_init__(self) -> None:
        if (self.tenant is None) == (self.credential is None):
            raise ValueError("exactly one of tenant and credential names the caller")
        if self.admitted and self.input_tokens is None:
            raise ValueError("an admitted request has its prompt tokens counted")
        if self.served is not None and not self.admitted:
            raise ValueError("the model of a request that is not admitted is chosen by its route")
        if not 0 <= self.draw < 1:
            raise ValueError("a draw is at least 0 and less than 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What the tenant uses just before the request; by default nothing, with full buckets."""

    running: int = 0
    """Requests admitted and not yet finished."""
    requests_left: float | None = None
    """Requests left in this minute; None: all. Below 0 is debt."""
    tokens_left: float | None = None
    """Tokens left in this minute; None: all. Below 0 is debt."""
    input_tokens_left: float | None = None
    """Prompt tokens left of their own rate; None: all."""
    output_tokens_left: float | None = None
    """Output tokens left of their own rate; None: all."""
    queued: int = 0
    """Requests that wait for a limit."""
    kv_tokens_held: int = 0
    """Tokens of KV that running requests may need."""
    end_user_running: int = 0
    """Requests of the end user that are admitted and not yet finished."""
    end_user_requests_left: float | None = None
    """Requests left of the end user's rate; None: all."""
    end_user_output_tokens_left: float | None = None
    """Output tokens left of the end user's rate; None: all."""
    spent_today: float = 0.0
    """Units of the currency spent since midnight UTC."""
    spent_this_month: float = 0.0
    """Units of the currency spent since the first of the month, UTC."""
    day_left_s: float = DAY_S
    """Seconds until the next day begins."""
    month_left_s: float = MONTH_S
    """Seconds until the next month begins."""
    unready: tuple[str, ...] = ()
    """Models that cannot serve; all others can."""
    busy: tuple[str, ...] = ()
    """Models in which requests wait."""
    asleep: tuple[str, ...] = ()
    """Models that sleep and can be woken."""
    external: tuple[str, ...] = ()
    """Models that are computed outside of the appliance."""


IDLE = Load()


def decide(policy: PolicySet, question: Question, load: Load = IDLE) -> Decision:
    """Return the decision on a request: the first that does not allow it, or the last allowance."""
    tenant = _caller(policy, question)
    choice = chosen(policy, question, load)
    usage = _usage(policy.tenants.get(tenant), load)
    if not question.admitted:
        access = _access(policy, question, tenant, None, choice, load)
        first = evaluate(policy, replace(access, asleep=access.model in load.asleep), usage, NOW)
        if not first.allowed or question.input_tokens is None:
            return first
    return evaluate(policy, _access(policy, question, tenant, question.input_tokens, choice, load), usage, NOW)


def chosen(policy: PolicySet, question: Question, load: Load = IDLE) -> RouteChoice | None:
    """Return the model that a route gives the request to; None where the request names none that its tenant may use."""
    if question.served is not None:
        return RouteChoice(question.served, ChoiceReason.WEIGHT)
    tenant = policy.tenants.get(_caller(policy, question))
    route = visible_route(policy, tenant, question.model)
    if tenant is None or route is None:
        return None
    states = dict.fromkeys(route.models, ModelState.READY)
    if not tenant.isolation_class.own_engine:
        states |= dict.fromkeys(load.asleep, ModelState.ASLEEP if tenant.features.wake else ModelState.UNREADY)
    if not may_leave(tenant):
        states |= dict.fromkeys(load.external, ModelState.UNREADY)
    states |= dict.fromkeys(load.busy, ModelState.BUSY) | dict.fromkeys(load.unready, ModelState.UNREADY)
    return choose(policy, route, tenant.isolation_class, states, int(question.draw * DRAWS))


def _caller(policy: PolicySet, question: Question) -> str:
    tenant = question.tenant if question.credential is None else principal(policy, question.credential)
    return tenant or NO_TENANT


def _access(
    policy: PolicySet, question: Question, tenant: str, input_tokens: int | None, choice: RouteChoice | None, load: Load
) -> AccessRequest:
    counted = input_tokens is not None
    model, adapter, alias = question.model, "", ""
    if choice is not None:
        (model, adapter), alias = split(choice.model), question.model
    elif (known := policy.tenants.get(tenant)) is not None:
        model, adapter, alias = served_by(known, question.model)
    return AccessRequest(
        tenant=tenant,
        model=model,
        adapter=adapter,
        alias=alias,
        input_tokens=input_tokens,
        max_output_tokens=question.max_tokens,
        longest_input=question.longest_input if counted else None,
        feature=question.feature,
        content=question.content,
        address=question.address,
        region=question.region,
        unix_s=question.unix_s,
        choices=question.choices,
        uncounted=question.uncounted and counted,
        batch=question.feature is Feature.BATCHES,
        external=model in load.external,
    )


def _usage(tenant: Tenant | None, load: Load) -> Usage:
    requests = request_rate(tenant.limits) if tenant is not None else NO_RATE
    tokens = token_rate(tenant.limits) if tenant is not None else NO_RATE
    return Usage(
        concurrency=load.running,
        request_bucket=_bucket(requests, load.requests_left),
        token_bucket=_bucket(tokens, load.tokens_left),
        input_bucket=None if load.input_tokens_left is None else Bucket(float(load.input_tokens_left), NOW),
        output_bucket=None if load.output_tokens_left is None else Bucket(float(load.output_tokens_left), NOW),
        queued=load.queued,
        kv_tokens=load.kv_tokens_held,
        end_user=None if tenant is None or not tenant.end_users.any else _end_user(load),
        spend=Spend(
            day=round(load.spent_today * BILLIONTHS),
            month=round(load.spent_this_month * BILLIONTHS),
            day_left_s=load.day_left_s,
            month_left_s=load.month_left_s,
        ),
    )


def _end_user(load: Load) -> EndUserUsage:
    left = (load.end_user_requests_left, load.end_user_output_tokens_left)
    requests, output = (None if one is None else Bucket(float(one), NOW) for one in left)
    return EndUserUsage(concurrency=load.end_user_running, request_bucket=requests, output_bucket=output)


def _bucket(rate: Rate, left: float | None) -> Bucket:
    return full(rate, NOW) if left is None else Bucket(float(left), NOW)
