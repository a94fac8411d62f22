"""A shadow policy: decides beside the policy in force on every request, and what it decides has no effect.

It has a ledger of its own, which admits, reserves and settles what it would have served, so its rates and numbers of
requests are its own; what is spent is the tenants' real spend. Each request counts once, under the first decision on
which both policies differ.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from enum import StrEnum

from appliance.common.errors import ApplianceError
from appliance.common.shadow_status import ShadowRow, ShadowStatus
from appliance.gateway.generate_request import AnyRequest, CallContext, Principal
from appliance.gateway.request.ledger import Ledger, Reservation, first_access
from appliance.gateway.request.spend import SpendAccounts, SpendParts
from appliance.gateway.telemetry import names
from policy.decision import Decision, Effect
from policy.evaluate import principal as find_tenant
from policy.model import PolicySet
from policy.networks import admits
from policy.request import AccessRequest, Spend

MAX_ROWS = 1_000
"""Rows of differences that are counted apart; of further ones only the sums are."""

NO_CREDENTIAL = "credentials"
"""Rule of a refusal because the shadow policy gives the credential to no tenant."""


class Verdict(StrEnum):
    """What a shadow policy would have done about a request, against what was done."""

    AGREES = "agrees"
    REFUSES = "refuses"
    """It was served, and would be refused."""
    SERVES = "serves"
    """It was refused, and would be served."""
    WAITS = "waits"
    """It was served, and would wait first."""
    OTHER_MODEL = "other_model"
    """It would be led to another model."""


class SeenSpends:
    """The tenants' real spend, which a shadow policy reads and does not change."""

    def __init__(self, real: SpendAccounts) -> None:
        self._real = real

    @property
    def now(self) -> float:
        """Unix time of the real account."""
        return self._real.now

    def of(self, tenant: str) -> Spend:
        """Return a tenant's spend now."""
        return self._real.of(tenant)

    def parts(self, tenant: str) -> SpendParts:
        """Return a tenant's spend now, with its reservations apart."""
        return self._real.parts(tenant)

    def reserve(self, tenant: str, cost: int) -> None:
        """Take nothing."""

    def settle(self, tenant: str, reserved: int, cost: int) -> None:
        """Replace nothing."""


class Shadow:
    """One shadow policy and its counts; all methods run in one event loop."""

    def __init__(
        self, policy: PolicySet, spends: SpendAccounts, count: Callable[[Verdict], None], region: str = ""
    ) -> None:
        """``count`` counts a request in the metrics; ``region`` is the appliance's."""
        self.policy = policy
        self.ledger = Ledger(policy, _NoKeys(), spends=SeenSpends(spends), region=region)
        self._count = count
        self._since = time.time()
        self._verdicts: Counter[Verdict] = Counter()
        self._rows: Counter[tuple[str, Verdict, str]] = Counter()

    def request(self, principal: Principal, address: str) -> ShadowRequest:
        """Return the shadow of a request of a caller at an address."""
        return ShadowRequest(self, principal, address)

    def add(self, tenant: str, verdict: Verdict, rule: str) -> None:
        """Count a request of a tenant."""
        self._count(verdict)
        self._verdicts[verdict] += 1
        row = tenant, verdict, rule
        if verdict is not Verdict.AGREES and (row in self._rows or len(self._rows) < MAX_ROWS):
            self._rows[row] += 1

    def status(self, file: str) -> ShadowStatus:
        """Return the counts, the most frequent difference first."""
        rows = [ShadowRow(tenant, verdict.value, rule, count) for (tenant, verdict, rule), count in self._rows.items()]
        return ShadowStatus(
            file=file,
            digest=self.policy.digest,
            since=self._since,
            verdicts={one.value: self._verdicts[one] for one in Verdict},
            rows=tuple(sorted(rows, key=lambda row: (-row.requests, row.tenant, row.verdict, row.rule))),
        )


class ShadowRequest:
    """What a shadow policy decides on one request."""

    __slots__ = ("_alias", "_choices", "_principal", "_reservation", "_rule", "_shadow", "_tenant", "_verdict")

    def __init__(self, shadow: Shadow, principal: Principal, address: str) -> None:
        self._shadow = shadow
        self._principal = principal
        self._reservation: Reservation | None = None
        self._verdict: Verdict | None = None
        self._rule = ""
        self._tenant = find_tenant(shadow.policy, principal.credential)
        if self._tenant is None:
            self._differ(Verdict.REFUSES, NO_CREDENTIAL)
        elif not admits(shadow.policy.tenants[self._tenant].networks, address):
            self._differ(Verdict.REFUSES, f"tenants.{self._tenant}.networks")

    @contextmanager
    def admission(self, access: AccessRequest) -> Iterator[None]:
        """Compare the first decision, which the block takes."""
        with self._comparing(lambda: self._admit(access)):
            yield

    @contextmanager
    def reserving(self, input_tokens: int, asked: int | None, room: int, longest: int | None) -> Iterator[None]:
        """Compare the second decision, which the block takes."""

        def reserve() -> Decision | None:
            one = self._reservation
            return None if one is None else one.try_reserve(input_tokens, asked, room, longest=longest)

        with self._comparing(reserve):
            yield

    def end(self, input_tokens: int, output_tokens: int, cached_tokens: int = 0) -> str:
        """Settle it with what the request used, and count it; returns how it differs, empty where it does not."""
        if self._reservation is not None:
            self._reservation.settle(input_tokens, output_tokens, 0, cached_tokens)
        if self._verdict is None:
            return ""
        self._shadow.add(self._principal.tenant, self._verdict, self._rule)
        return "" if self._verdict is Verdict.AGREES else f"{self._verdict.value} {self._rule}".rstrip()

    @contextmanager
    def _comparing(self, decide: Callable[[], Decision | None]) -> Iterator[None]:
        try:
            yield
        except ApplianceError as error:
            if error.rule:  # what no rule refused says nothing about policies
                self._compare(decide, refused=True)
            raise
        self._compare(decide, refused=False)

    def _compare(self, decide: Callable[[], Decision | None], *, refused: bool) -> None:
        if self._verdict not in (None, Verdict.AGREES):
            return
        try:
            decision = decide()
        except ApplianceError as error:
            if refused:
                self._verdict = Verdict.AGREES
            else:
                self._differ(Verdict.REFUSES, error.rule)
            return
        if self._verdict not in (None, Verdict.AGREES):
            return
        if refused:
            self._differ(Verdict.SERVES, "")
        elif decision is not None and decision.effect is Effect.WAIT:
            self._differ(Verdict.WAITS, decision.rule)
        else:
            self._verdict = Verdict.AGREES

    def _admit(self, access: AccessRequest) -> Decision | None:
        assert self._tenant is not None, "without a tenant nothing is compared any more"
        if access.alias:
            route = self._shadow.policy.routes.get(access.alias)
            if route is not None and (access.adapter or access.model) not in route.models:
                self._differ(Verdict.OTHER_MODEL, f"routes.{access.alias}")
                return None
        found = self._shadow.ledger.try_admit(replace(access, tenant=self._tenant))
        if isinstance(found, Decision):
            return found
        self._reservation = found
        return found.decision

    def _differ(self, verdict: Verdict, rule: str) -> None:
        self._verdict, self._rule = verdict, rule


class NoShadow:
    """Shadow of a request where no policy is tried."""

    def admission(self, _access: AccessRequest) -> AbstractContextManager[None]:
        """Compare nothing."""
        return _NOTHING

    def reserving(
        self, _input_tokens: int, _asked: int | None, _room: int, _longest: int | None
    ) -> AbstractContextManager[None]:
        """Compare nothing."""
        return _NOTHING

    def end(self, _input_tokens: int, _output_tokens: int, _cached_tokens: int = 0) -> str:
        """Count nothing."""
        return ""


NO_SHADOW = NoShadow()
_NOTHING: AbstractContextManager[None] = nullcontext()


class Shadows:
    """The policy that is tried, if any; one after the other."""

    def __init__(self, spends: SpendAccounts, count: Callable[..., None], region: str = "") -> None:
        """``count`` adds to a counter of ``names``; ``region`` is the appliance's."""
        self._spends = spends
        self._count = count
        self._region = region
        self.running: Shadow | None = None

    def use(self, policy: PolicySet | None) -> None:
        """Try this policy, or none; one of the same content goes on counting."""
        if policy is None:
            self.running = None
        elif self.running is None or self.running.policy.digest != policy.digest:
            self.running = Shadow(policy, self._spends, self._counted, self._region)

    def request(self, principal: Principal, context: CallContext) -> ShadowRequest | NoShadow:
        """Return the shadow of a request."""
        if self.running is None:
            return NO_SHADOW
        return self.running.request(principal, str(context.attributes.get("client.address", "")))

    def refused(self, principal: Principal, request: AnyRequest, context: CallContext, error: ApplianceError) -> None:
        """Compare on a request that was refused before the first decision: its model is none of the tenant's."""
        one = self.request(principal, context)
        access = first_access(principal.tenant, request.model, None, 1, None, request.alias)
        with suppress(ApplianceError), one.admission(access):
            raise error
        one.end(0, 0)

    def _counted(self, verdict: Verdict) -> None:
        self._count(names.SHADOW_DECISIONS, verdict=verdict.value)


class _NoKeys(Mapping[str, bytes]):
    """Namespace keys of a policy that computes nothing: there is one for each name, and it is empty."""

    def __getitem__(self, name: str) -> bytes:
        return b""

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0
