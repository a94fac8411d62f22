"""Accounts of all tenants: admit, reserve and settle requests.

``policy.limits`` does the arithmetic; this module keeps the state between two calls. A request is admitted once
(concurrency, request rate), reserves its exact prompt and its grant of output tokens, and is settled once with what it
used: the rest is refunded. Where the tenant's spend is limited the largest cost is reserved likewise (``spend``). A
reload keeps the levels.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from appliance.common.errors import (
    ApplianceError,
    ContextLengthError,
    FeatureNotAllowedError,
    InvalidRequestError,
    PermissionDeniedError,
    PolicyChangedError,
    RateLimitedError,
    SpendLimitError,
    UnauthenticatedError,
)
from appliance.common.kv_shares import group_account
from appliance.gateway.generate_request import RateState
from appliance.gateway.request.spend import Spends
from policy.decision import Decision, Obligations, Reason
from policy.evaluate import evaluate, spend_left
from policy.limits import SECONDS_PER_MINUTE, Bucket, Rate, charge, full, refill, rescale, settle
from policy.model import Feature, Limits, PolicySet, Price
from policy.prices import affordable, amount_text, cost
from policy.request import AccessRequest, Usage

COUNTED_CONTEXTS = 2
"""How many times what a tenant may have a prompt is counted up to: one that is a little too long is told its exact
length, and of one that is far too long no more is tokenised, though the model's context be larger."""

NO_RATES = RateState(0, 0, 0.0, 0, 0, 0.0)
"""Rates of a principal that is no tenant any more."""


@dataclass(slots=True)
class _Account:
    requests: Bucket
    tokens: Bucket
    concurrency: int = 0


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys that a request runs under; no field of the request influences them."""

    namespace: bytes
    """Namespace key of the tenant."""
    group: bytes
    """Namespace key of the tenant's sharing group, under which blocks are found and left; empty without a group."""


class Ledger:
    """All tenants' accounts under one policy. ``namespaces`` maps each tenant, and each sharing group's account name,
    to its namespace key."""

    def __init__(
        self,
        policy: PolicySet,
        namespaces: dict[str, bytes],
        clock: Callable[[], float] = time.monotonic,
        spends: Spends | None = None,
    ) -> None:
        self._policy = policy
        self.spends = spends or Spends()
        """What tenants have spent."""
        self._namespaces = namespaces
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    @property
    def policy(self) -> PolicySet:
        """Policy in force."""
        return self._policy

    def replace(self, policy: PolicySet, namespaces: dict[str, bytes]) -> None:
        """Put a new policy in force: levels are rescaled, running requests keep the tokens that they were granted
        (``withdrawal`` decides which may go on)."""
        now = self._clock()
        for tenant, account in self._accounts.items():
            old, new = self._policy.tenants.get(tenant), policy.tenants.get(tenant)
            if new is None:
                continue
            if old is None:
                # Gone and back while a request ran: no more is left than the new limits give.
                account.requests = Bucket(min(account.requests.level, new.limits.requests_per_minute), now)
                account.tokens = Bucket(min(account.tokens.level, new.limits.tokens_per_minute), now)
                continue
            before, after = old.limits, new.limits
            # A level under the same rate rises as before; most reloads change the rates of few tenants.
            if before.requests_per_minute != after.requests_per_minute:
                rates = Rate(before.requests_per_minute), Rate(after.requests_per_minute)
                account.requests = rescale(account.requests, *rates, now)
            if before.tokens_per_minute != after.tokens_per_minute:
                rates = Rate(before.tokens_per_minute), Rate(after.tokens_per_minute)
                account.tokens = rescale(account.tokens, *rates, now)
        self._policy, self._namespaces = policy, namespaces
        for tenant in [name for name, account in self._accounts.items() if not account.concurrency]:
            if tenant not in policy.tenants:
                del self._accounts[tenant]

    @property
    def namespaces(self) -> Mapping[str, bytes]:
        """Namespace keys by account name."""
        return self._namespaces

    def concurrency(self, tenant: str) -> int:
        """Return the tenant's requests that are admitted and not settled."""
        account = self._accounts.get(tenant)
        return account.concurrency if account else 0

    @property
    def at_work(self) -> list[str]:
        """Tenants that have requests admitted and not settled."""
        return [tenant for tenant, account in self._accounts.items() if account.concurrency]

    def left(self, tenant: str) -> RateState | None:
        """Return what is left of both rates of a tenant; None while it has used nothing."""
        return self.rates(tenant) if tenant in self._accounts else None

    def admit(
        self,
        tenant: str,
        model: str,
        max_tokens: int | None,
        choices: int = 1,
        *,
        feature: Feature | None = None,
        alias: str = "",
    ) -> Reservation:
        """Take the first decision; on allowance the request has one concurrency slot a choice until it is settled.

        Raises:
            ApplianceError: the policy denies.
        """
        access = AccessRequest(
            tenant=tenant,
            model=model,
            input_tokens=None,
            max_output_tokens=max_tokens,
            choices=choices,
            feature=feature,
            alias=alias,
        )
        now = self._clock()
        account, decision = self._decide(access, now)
        known = self._policy.tenants[tenant]
        group = self._namespaces[group_account(known.group)] if known.group is not None else b""
        keys = Keys(self._namespaces[tenant], group)
        reservation = Reservation(self, tenant, model, decision, keys, choices, alias)
        rate = Rate(known.limits.requests_per_minute)
        current = refill(account.requests, rate, now)
        account.requests = Bucket(current.level - 1, now)
        account.concurrency += choices
        return reservation

    def reserve(self, access: AccessRequest) -> Decision:
        """Take the second decision, with exact counts; on allowance the tokens are taken from the bucket.

        Raises:
            ApplianceError: the policy denies.
        """
        now = self._clock()
        account, decision = self._decide(access, now)
        assert decision.obligations is not None
        amount = (access.input_tokens or 0) + access.choices * decision.obligations.max_output_tokens
        rate = Rate(self._policy.tenants[access.tenant].limits.tokens_per_minute)
        current = refill(account.tokens, rate, now)
        account.tokens = Bucket(current.level - amount, now)
        return decision

    def refuse(self, access: AccessRequest) -> None:
        """Raise what the policy denies an access for, if it does; nothing is taken either way.

        Raises:
            ApplianceError: the policy denies.
        """
        self._decide(access, self._clock())

    def settle(self, tenant: str, reserved: int, used: int, choices: int = 1, refused: int = 0) -> None:
        """End a request: free its slots, refund the tokens that it did not use, and charge what a refused prompt cost,
        which nobody could reserve."""
        account = self._accounts[tenant]
        account.concurrency -= choices
        known = self._policy.tenants.get(tenant)
        if known is None:
            return
        rate, now = Rate(known.limits.tokens_per_minute), self._clock()
        if reserved:
            account.tokens = settle(account.tokens, rate, reserved=reserved, used=used, now=now)
        if refused:
            account.tokens = charge(account.tokens, rate, refused, now)

    def affordable(self, tenant: str, price: Price, input_tokens: int, choices: int) -> int | None:
        """Return the output tokens that what is left of the tenant's spend gives each choice; None without a limit.

        Raises:
            UnauthenticatedError: it is no tenant any more.
        """
        limits = self.limits(tenant)
        left = spend_left(limits, self.spends.of(tenant)) if limits.bounds_spend else None
        return None if left is None else affordable(price, input_tokens, choices, left)

    def rates(self, tenant: str) -> RateState:
        """Return what is left of both rates. A tenant that is gone since its request was admitted has none: its last
        answer or error goes out without them."""
        now = self._clock()
        known = self._policy.tenants.get(tenant)
        if known is None:
            return NO_RATES
        limits = known.limits
        account = self._account(tenant, now)
        requests, tokens = Rate(limits.requests_per_minute), Rate(limits.tokens_per_minute)
        left_requests = refill(account.requests, requests, now).level
        left_tokens = refill(account.tokens, tokens, now).level
        return RateState(
            limit_requests=requests.per_minute,
            remaining_requests=max(0, int(left_requests)),
            reset_requests_s=(requests.per_minute - left_requests) / requests.per_second,
            limit_tokens=tokens.per_minute,
            remaining_tokens=max(0, int(left_tokens)),
            reset_tokens_s=(tokens.per_minute - left_tokens) / tokens.per_second,
        )

    def limits(self, tenant: str) -> Limits:
        """Return the tenant's limits now.

        Raises:
            UnauthenticatedError: it is no tenant any more.
        """
        known = self._policy.tenants.get(tenant)
        if known is None:
            raise UnauthenticatedError("the credential belongs to no tenant of this service")
        return known.limits

    def _account(self, tenant: str, now: float) -> _Account:
        account = self._accounts.get(tenant)
        if account is None:
            known = self._policy.tenants.get(tenant)
            if known is None:
                return _Account(Bucket(0.0, now), Bucket(0.0, now))
            account = self._accounts[tenant] = _Account(
                full(Rate(known.limits.requests_per_minute), now), full(Rate(known.limits.tokens_per_minute), now)
            )
        return account

    def _decide(self, access: AccessRequest, now: float) -> tuple[_Account, Decision]:
        """Return the tenant's account and the policy's allowance.

        Raises:
            ApplianceError: the policy denies.
        """
        account = self._account(access.tenant, now)
        known = self._policy.tenants.get(access.tenant)
        bounded = known is not None and known.limits.bounds_spend
        usage = Usage(
            concurrency=account.concurrency,
            request_bucket=account.requests,
            token_bucket=account.tokens,
            spend=self.spends.of(access.tenant) if bounded else None,
        )
        decision = evaluate(self._policy, access, usage, now)
        if not decision.allowed:
            raise denial(decision)
        return account, decision


class Reservation:
    """Slots and tokens that one admitted request has of its tenant's account."""

    def __init__(
        self, ledger: Ledger, tenant: str, model: str, decision: Decision, keys: Keys, choices: int, alias: str = ""
    ) -> None:
        self._alias = alias
        self._ledger = ledger
        self._tenant = tenant
        self._model = model
        self._choices = choices
        self._reserved = 0
        self.reserved_cost = 0
        """Largest cost of the request in billionths, where the tenant's spend is limited; it must be recorded before
        the first token."""
        self._settled = False
        self.decision = decision
        self.namespace = keys.namespace
        self.group = keys.group
        self.grant = 0
        """Output tokens that the engine may give, for each choice."""

    @property
    def obligations(self) -> Obligations:
        """Obligations of the decision in force, which the gateway must honour when it serves the request."""
        assert self.decision.obligations is not None, "an allowance has obligations"
        return self.decision.obligations

    def reserve(self, input_tokens: int, asked: int | None, room: int, *, longest: int | None = None) -> None:
        """Reserve the exact prompt and the grants; ``room`` is what the model's context leaves for output, ``longest``
        the tokens of the longest of several texts.

        Raises:
            ApplianceError: the policy denies.
        """
        if asked is None:
            # Today's limits: with those of the admission, a reload in between would refuse tokens never asked for.
            limits = self._ledger.limits(self._tenant)
            most = min(room, limits.max_output_tokens // self._choices, limits.max_context_tokens - input_tokens)
            price = self.obligations.price
            paid = self._ledger.affordable(self._tenant, price, input_tokens, self._choices)
            most = most if paid is None else min(most, paid)
            asked = most if most >= 1 else None
        access = AccessRequest(
            tenant=self._tenant,
            model=self._model,
            input_tokens=input_tokens,
            max_output_tokens=asked,
            longest_input=longest,
            choices=self._choices,
            alias=self._alias,
        )
        self.decision = self._ledger.reserve(access)
        most = self.obligations.max_output_tokens
        self.grant = min(room, most)
        self._reserved = input_tokens + self._choices * most
        if self.obligations.bounds_spend:
            self.reserved_cost = cost(self.obligations.price, input_tokens, 0, self._choices * most)
            self._ledger.spends.reserve(self._tenant, self.reserved_cost)

    def cost(self, input_tokens: int, cached_tokens: int, output_tokens: int) -> int:
        """Return what so many tokens cost, in billionths of the currency's unit."""
        return cost(self.obligations.price, input_tokens, cached_tokens, output_tokens)

    def most_counted(self) -> int:
        """Return the tokens beyond which nobody counts those of a prompt of this tenant.

        Raises:
            UnauthenticatedError: it is no tenant any more.
        """
        limits = self._ledger.limits(self._tenant)
        return COUNTED_CONTEXTS * min(limits.max_context_tokens, limits.tokens_per_minute)

    def refuse_uncounted(self, least: int, asked: int | None) -> None:
        """Raise what the policy denies a prompt of so many tokens or more for, if it does.

        Raises:
            ApplianceError: the policy denies.
        """
        access = AccessRequest(
            tenant=self._tenant,
            model=self._model,
            input_tokens=least,
            max_output_tokens=asked,
            choices=self._choices,
            alias=self._alias,
            uncounted=True,
        )
        self._ledger.refuse(access)

    def settle(self, input_tokens: int, output_tokens: int, refused_tokens: int = 0, cached_tokens: int = 0) -> None:
        """Charge what was used, and what a refused prompt took, and free the slot; the second and later calls do
        nothing. ``cached_tokens`` are part of the input and change its cost alone."""
        if not self._settled:
            self._settled = True
            price = self.cost(input_tokens, cached_tokens, output_tokens)
            if price or self.reserved_cost:
                self._ledger.spends.settle(self._tenant, self.reserved_cost, price)
            used = input_tokens + output_tokens
            self._ledger.settle(self._tenant, self._reserved, used, self._choices, refused_tokens)


def denial(decision: Decision) -> ApplianceError:
    """Return a denial as the error that the caller sees; its rule is for the audit log. Its ``param`` is ``prompt``,
    ``max_tokens`` or ``choices``, which the request's lifecycle replaces by the caller's name."""
    error = _denial(decision)
    error.rule = decision.rule
    return error


def _denial(decision: Decision) -> ApplianceError:
    details = {}
    if decision.limit is not None:
        details["limit"] = str(decision.limit)
    if decision.actual is not None:
        details["actual"] = str(decision.actual)
    if decision.reason is Reason.SPEND:
        details = {name: amount_text(int(number)) for name, number in details.items()}
    details["rule"] = decision.rule.rpartition(".")[2]
    wait = decision.retry_after_s
    match decision.reason:
        case Reason.UNKNOWN_CREDENTIAL:
            return UnauthenticatedError(decision.message)
        case Reason.MODEL_NOT_ALLOWED | Reason.NO_PRICE:
            return PermissionDeniedError(decision.message, param="model")
        case Reason.ROUTE_CHANGED:
            return PolicyChangedError(decision.message)
        case Reason.FEATURE_NOT_ALLOWED:
            return FeatureNotAllowedError(decision.message)
        case Reason.CONTEXT_TOO_LONG:
            return ContextLengthError(decision.message, param="prompt", details=details)
        case Reason.OUTPUT_TOO_LONG:
            return InvalidRequestError(decision.message, param="max_tokens", details=details)
        case Reason.REQUEST_RATE | Reason.CONCURRENCY | Reason.TOKEN_RATE if wait is not None:
            return RateLimitedError(decision.message, retry_after_s=min(wait, SECONDS_PER_MINUTE), details=details)
        case Reason.SPEND if wait is not None:
            return SpendLimitError(decision.message, retry_after_s=wait, details=details)
        case _:
            # More choices than may run, or a request larger than a whole minute's tokens or a whole period's spend:
            # waiting does not help.
            param = "choices" if decision.reason is Reason.CONCURRENCY else "max_tokens"
            return InvalidRequestError(decision.message, param=param, details=details)
