"""Accounts of all tenants: admit, reserve and settle requests.

``policy.limits`` does the arithmetic; this module keeps the state between two calls. A request is admitted once
(concurrency, request rate), reserves its exact prompt and its grant of output tokens, and is settled once with what it
used: the rest is refunded. Where the tenant's spend is limited the largest cost is reserved likewise (``spend``). A
reload keeps the levels.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from appliance.common.errors import UnauthenticatedError
from appliance.common.kv_shares import group_account
from appliance.gateway.generate_request import RateState
from appliance.gateway.request.account_table import AccountTable
from appliance.gateway.request.accounts import Account, AccountRates
from appliance.gateway.request.denials import denial
from appliance.gateway.request.end_users import EndUserAccount, EndUsers
from appliance.gateway.request.limit_states import limit_states
from appliance.gateway.request.spend import SpendAccounts, Spends
from appliance.gateway.request.user_keys import NO_USER_KEY, UserKey, user_key_of
from appliance.gateway.request.waiting import Lines
from appliance.gateway.tenant_account import TenantLimits
from policy.decision import Decision, Effect, Obligations
from policy.evaluate import evaluate
from policy.feature import Feature
from policy.limits import Bucket, Rate, level
from policy.model import Limits, Namespace, PolicySet, Price, Priority, Retention
from policy.prices import affordable, cost, spend_left
from policy.rates import most_input
from policy.request import AccessRequest, Usage

COUNTED_CONTEXTS = 2
"""How many times what a tenant may have a prompt is counted up to: one that is a little too long is told its exact
length, and of one that is far too long no more is tokenised, though the model's context be larger."""

NOTHING = 0, 0
"""Prompt and output tokens of a request that has reserved none."""

NO_ACCOUNT = Account(AccountRates(Rate(1), Rate(1), None, None), Bucket(0.0, 0.0), Bucket(0.0, 0.0), None, None)
"""Account of a principal that is no tenant, which the policy denies."""

NO_RATES = RateState(0, 0, 0.0, 0, 0, 0.0)
"""Rates of a principal that is no tenant any more."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys that a request runs under; no field of the request influences them."""

    namespace: bytes
    """Namespace key of the tenant."""
    group: bytes
    """Namespace key of the tenant's sharing group, under which blocks are found and left; empty without a group."""
    user: UserKey = NO_USER_KEY
    """Key of the end user's namespace, where the policy says that there is one (``user_keys``)."""


class Ledger:
    """All tenants' accounts under one policy. ``namespaces`` maps each tenant, and each sharing group's account name,
    to its namespace key."""

    def __init__(
        self,
        policy: PolicySet,
        namespaces: Mapping[str, bytes],
        clock: Callable[[], float] = time.monotonic,
        spends: SpendAccounts | None = None,
        region: str = "",
    ) -> None:
        """``region`` is the appliance's; empty for none."""
        self._policy = policy
        self.region = region
        self.spends: SpendAccounts = spends or Spends()
        """What tenants have spent."""
        self._end_users = EndUsers()
        self._namespaces = namespaces
        self._clock = clock
        self._accounts = AccountTable()
        self.on_used: Callable[[str], None] = lambda _tenant: None
        """Told each tenant of whose limits something was taken or refused; set where limits are a fleet's."""
        self.lines = Lines(clock, lambda tenant: self.limits(tenant).max_queued_requests)
        """Requests that wait for a limit of their tenant."""

    def account(self, tenant: str, *, begin: bool = False) -> Account | None:
        """Return a tenant's account: None while it has used nothing, unless it is to begin now, and where it is no
        tenant."""
        if begin and tenant in self._policy.tenants:
            return self._account(tenant, self._clock())
        return self._accounts.find(tenant)

    @property
    def policy(self) -> PolicySet:
        """Policy in force."""
        return self._policy

    def replace(self, policy: PolicySet, namespaces: Mapping[str, bytes]) -> None:
        """Put a new policy in force: levels are rescaled, running requests keep the tokens that they were granted
        (``withdrawal`` decides which may go on). ``catch_up`` does the rest of the work."""
        self._accounts.switch(self._policy.tenants, policy.tenants, self._clock())
        self._policy, self._namespaces = policy, namespaces
        self._end_users.keep(policy.tenants)
        self.lines.reconsider()

    def catch_up(self, most: int) -> bool:
        """Rescale the levels of up to ``most`` tenants that have not called since the policy came into force; returns
        whether that leaves some. A tenant that calls before has its levels rescaled then: this saves it the work."""
        return self._accounts.catch_up(most)

    @property
    def namespaces(self) -> Mapping[str, bytes]:
        """Namespace keys by account name."""
        return self._namespaces

    def concurrency(self, tenant: str) -> int:
        """Return the tenant's requests that are admitted and not settled."""
        return self._accounts.concurrency(tenant)

    @property
    def at_work(self) -> list[str]:
        """Tenants that have requests admitted and not settled."""
        return self._accounts.at_work

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
            ApplianceError: the policy denies it, or would make it wait.
        """
        found = self.try_admit(first_access(tenant, model, max_tokens, choices, feature, alias))
        if isinstance(found, Decision):
            raise denial(found)
        return found

    def try_admit(self, access: AccessRequest, queued: int = 0, *, takes: bool = True) -> Reservation | Decision:
        """Take the first decision, beside so many waiting requests of the tenant; returns it where it makes the request
        wait, or where nothing is to be taken.

        Raises:
            ApplianceError: the policy denies.
        """
        now, tenant, choices = self._clock(), access.tenant, access.choices
        user = self._end_users.find(self._policy.tenants.get(tenant), access.end_user, now)
        account, decision = self._decide(access, now, queued, user)
        if not takes or decision.effect is Effect.WAIT:
            return decision
        known = self._policy.tenants[tenant]
        group = self._namespaces[group_account(known.group)] if known.group is not None else b""
        key = self._namespaces[tenant]
        user_key = user_key_of(key, access.end_user) if known.namespace is Namespace.USER else NO_USER_KEY
        keys = Keys(key, group, user_key)
        reservation = Reservation(self, access, decision, keys, user)
        account.take_request(choices, now)
        if user is not None:
            user.take_request(choices, now)
        return reservation

    def reserve(
        self, access: AccessRequest, queued: int = 0, *, takes: bool = True, user: EndUserAccount | None = None
    ) -> Decision:
        """Take the second decision, with exact counts, beside so many waiting requests of the tenant; on allowance the
        tokens are taken from the buckets, unless nothing is to be taken.

        Raises:
            ApplianceError: the policy denies.
        """
        now = self._clock()
        account, decision = self._decide(access, now, queued, user)
        if not takes or decision.obligations is None:
            return decision
        prompt, output = access.input_tokens or 0, access.choices * decision.obligations.max_output_tokens
        account.take_tokens(prompt, output, now)
        if user is not None:
            user.take_output(output, now)
        return decision

    def refuse(self, access: AccessRequest) -> None:
        """Raise what the policy denies an access for, if it does; nothing is taken either way.

        Raises:
            ApplianceError: the policy denies.
        """
        self._decide(access, self._clock())

    def settle(
        self, tenant: str, reserved: tuple[int, int], used: tuple[int, int], choices: int = 1, refused: int = 0
    ) -> None:
        """End a request: free its slots, refund the tokens that it did not use, and charge what a refused prompt cost,
        which nobody could reserve. ``reserved`` and ``used`` are prompt and output tokens."""
        account = self._accounts.find(tenant)
        assert account is not None, "a tenant has its account while its requests run"
        account.release(*reserved, choices)
        known = self._policy.tenants.get(tenant)
        if known is None:
            return
        now = self._clock()
        if reserved != NOTHING:
            account.refund(reserved, used, now)
        if refused:
            account.charge(refused, now)
        self.lines.wake(tenant)

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
        account = self._account(tenant, now)
        requests, tokens = account.rates.requests, account.rates.tokens
        left_requests = level(account.requests, requests, now)
        left_tokens = level(account.tokens, tokens, now)
        return RateState(
            limit_requests=requests.capacity,
            remaining_requests=max(0, int(left_requests)),
            reset_requests_s=(requests.capacity - left_requests) / requests.per_second,
            limit_tokens=tokens.capacity,
            remaining_tokens=max(0, int(left_tokens)),
            reset_tokens_s=(tokens.capacity - left_tokens) / tokens.per_second,
        )

    def limits_now(self, tenant: str) -> TenantLimits:
        """Return every limit of the tenant, and what is left of it.

        Raises:
            UnauthenticatedError: it is no tenant any more.
        """
        limits, now = self.limits(tenant), self._clock()
        account = self._account(tenant, now)
        return TenantLimits(
            tenant=tenant,
            limits=limit_states(limits, account, self.spends.of(tenant), now),
            running=account.concurrency,
            waiting=self.lines.of(tenant),
            max_context_tokens=limits.max_context_tokens,
            max_output_tokens=limits.max_output_tokens,
            currency=self._policy.currency,
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

    def _account(self, tenant: str, now: float) -> Account:
        account = self._accounts.find(tenant)
        if account is None:
            known = self._policy.tenants.get(tenant)
            return NO_ACCOUNT if known is None else self._accounts.begin(tenant, known.limits, now)
        return account

    def end(self, user: EndUserAccount, reserved: int, used: int, choices: int) -> None:
        """Settle a request with its end user's account; ``reserved`` and ``used`` are output tokens."""
        user.settle(reserved, used, choices, self._clock())

    def _decide(
        self, access: AccessRequest, now: float, queued: int = 0, user: EndUserAccount | None = None
    ) -> tuple[Account, Decision]:
        """Return the tenant's account, and the policy's decision that allows the request or makes it wait.

        Raises:
            ApplianceError: the policy denies.
        """
        account = self._account(access.tenant, now)
        known = self._policy.tenants.get(access.tenant)
        bounded = known is not None and known.limits.bounds_spend
        if known is not None and known.hours:
            access = replace(access, unix_s=self.spends.now)
        if known is not None and (known.regions or known.model_regions):
            access = replace(access, region=self.region)
        usage = Usage(
            concurrency=account.concurrency,
            request_bucket=account.requests,
            token_bucket=account.tokens,
            input_bucket=account.input,
            output_bucket=account.output,
            queued=queued,
            kv_tokens=account.held_input + account.held_output,
            end_user=user.usage if user is not None else None,
            spend=self.spends.of(access.tenant) if bounded else None,
        )
        decision = evaluate(self._policy, access, usage, now)
        self.on_used(access.tenant)
        if decision.effect is Effect.DENY:
            raise denial(decision)
        return account, decision


def first_access(
    tenant: str,
    model: str,
    max_tokens: int | None,
    choices: int,
    feature: Feature | None,
    alias: str = "",
    external: bool = False,
) -> AccessRequest:
    """Return what the first decision is about."""
    return AccessRequest(
        tenant=tenant,
        model=model,
        input_tokens=None,
        max_output_tokens=max_tokens,
        choices=choices,
        feature=feature,
        alias=alias,
        external=external,
    )


class Reservation:
    """Slots and tokens that one admitted request has of its tenant's account."""

    def __init__(
        self, ledger: Ledger, access: AccessRequest, decision: Decision, keys: Keys, user: EndUserAccount | None = None
    ) -> None:
        """``user``: account of the end user, where the policy limits these."""
        self._ledger = ledger
        self._user = user
        self._access = access
        self._tenant, self._choices = access.tenant, access.choices
        self._reserved = NOTHING
        """Prompt and output tokens."""
        self.reserved_cost = 0
        """Largest cost of the request in billionths, where the tenant's spend is limited; it must be recorded before
        the first token."""
        self._settled = False
        self.decision = decision
        self.namespace = keys.namespace
        self.group = keys.group
        self.user = keys.user
        self.grant = 0
        """Output tokens that the engine may give, for each choice."""

    @property
    def obligations(self) -> Obligations:
        """Obligations of the decision in force, which the gateway must honour when it serves the request."""
        assert self.decision.obligations is not None, "an allowance has obligations"
        return self.decision.obligations

    @property
    def keeps(self) -> bool:
        """Whether blocks and grammars of the request may serve later requests."""
        return self.obligations.retention is not Retention.NONE and self.user.keeps

    def reserve(self, input_tokens: int, asked: int | None, room: int, *, longest: int | None = None) -> None:
        """Reserve the exact prompt and the grants; ``room`` is what the model's context leaves for output, ``longest``
        the tokens of the longest of several texts.

        Raises:
            ApplianceError: the policy denies it, or would make it wait.
        """
        decision = self.try_reserve(input_tokens, asked, room, longest=longest)
        if not decision.allowed:
            raise denial(decision)

    def try_reserve(
        self,
        input_tokens: int,
        asked: int | None,
        room: int,
        *,
        longest: int | None = None,
        queued: int = 0,
        takes: bool = True,
    ) -> Decision:
        """Take the second decision as ``reserve`` does, beside so many waiting requests of the tenant; one that allows
        has reserved, unless nothing is to be taken.

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
        access = replace(
            self._access,
            input_tokens=input_tokens,
            max_output_tokens=asked,
            longest_input=longest,
            feature=None,
            content=None,
            asleep=False,  # It was when the request came; the request's wake, or its refusal, is over.
        )
        decision = self._ledger.reserve(access, queued, takes=takes, user=self._user)
        if not takes or not decision.allowed:
            return decision
        self.decision = _still_downgraded(self.decision, decision)
        most = self.obligations.max_output_tokens
        self.grant = min(room, most)
        self._reserved = input_tokens, self._choices * most
        if self.obligations.bounds_spend:
            self.reserved_cost = cost(self.obligations.price, input_tokens, 0, self._choices * most)
            self._ledger.spends.reserve(self._tenant, self.reserved_cost)
        return decision

    def cost(self, input_tokens: int, cached_tokens: int, output_tokens: int) -> int:
        """Return what so many tokens cost, in billionths of the currency's unit."""
        return cost(self.obligations.price, input_tokens, cached_tokens, output_tokens)

    def most_counted(self) -> int:
        """Return the tokens beyond which nobody counts those of a prompt of this tenant.

        Raises:
            UnauthenticatedError: it is no tenant any more.
        """
        return COUNTED_CONTEXTS * most_input(self._ledger.limits(self._tenant))

    def refuse_uncounted(self, least: int, asked: int | None) -> None:
        """Raise what the policy denies a prompt of so many tokens or more for, if it does.

        Raises:
            ApplianceError: the policy denies.
        """
        access = replace(self._access, input_tokens=least, max_output_tokens=asked, feature=None, content=None)
        access = replace(access, asleep=False, uncounted=True)
        self._ledger.refuse(access)

    def settle(self, input_tokens: int, output_tokens: int, refused_tokens: int = 0, cached_tokens: int = 0) -> None:
        """Charge what was used, and what a refused prompt took, and free the slot; the second and later calls do
        nothing. ``cached_tokens`` are part of the input and change its cost alone."""
        if not self._settled:
            self._settled = True
            price = self.cost(input_tokens, cached_tokens, output_tokens)
            if price or self.reserved_cost:
                self._ledger.spends.settle(self._tenant, self.reserved_cost, price)
            used = input_tokens, output_tokens
            if self._user is not None:
                self._ledger.end(self._user, self._reserved[1], output_tokens, self._choices)
            self._ledger.settle(self._tenant, self._reserved, used, self._choices, refused_tokens)


def _still_downgraded(first: Decision, second: Decision) -> Decision:
    """Return the second decision, with the low priority that the first may have given."""
    assert first.obligations is not None, "an allowance has obligations"
    assert second.obligations is not None, "an allowance has obligations"
    if not first.obligations.downgraded or second.obligations.downgraded:
        return second
    obligations = replace(second.obligations, priority=Priority.LOW, downgraded=first.obligations.downgraded)
    return replace(second, obligations=obligations)
