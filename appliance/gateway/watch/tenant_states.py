"""Tenants as status and console show them: counts since the start, rates by the history's marks, limits."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from appliance.common.status import TenantStatus
from appliance.gateway.console.look import MAX_TENANT_ROWS, Question, Tenants, TenantView
from appliance.gateway.request.ledger import Ledger
from appliance.gateway.request.tenant_counts import TenantCounts
from appliance.gateway.watch.engine_states import EngineStates
from appliance.gateway.watch.history import NOTHING, Counts, History
from policy.model import WHOLE_POOL, Tenant


class TenantStates:
    """States of tenants. A page costs what is on it: tenants that have not called lately are not walked over."""

    def __init__(self, ledger: Ledger, counts: TenantCounts, history: History, engines: EngineStates) -> None:
        self._ledger, self._counts, self._history, self._engines = ledger, counts, history, engines
        self._order: tuple[str, list[str]] = ("", [])

    def mark(self, now: float) -> None:
        """Keep the tenants' counts for their rates, unless that was done a moment ago."""
        self._history.mark(now, self._all_counts)

    def status(self, tenant: Tenant, now: float) -> TenantStatus:
        """Return what one tenant uses."""
        count = self._counts.of(tenant.id)
        rates = self._history.rates(tenant.id, (count.requests, count.tokens, count.refused), now)
        return TenantStatus(
            id=tenant.id,
            isolation_class=tenant.isolation_class.value,
            in_flight=self._ledger.concurrency(tenant.id),
            max_in_flight=tenant.limits.concurrency,
            requests=count.requests,
            tokens=count.tokens,
            refused=count.refused,
            requests_per_s=rates[0],
            tokens_per_s=rates[1],
            refused_per_s=rates[2],
        )

    def page(self, question: Question, now: float) -> Tenants:
        """Return one page of tenants, or of those whose names contain a text: those at work first, then by name."""
        known = self._ledger.policy.tenants
        first = self._at_work()
        if question.find:
            matching = [tenant for tenant in (*first, *self._others(first)) if question.find in tenant.casefold()]
            num_matching = len(matching)
            offset = question.offset if question.offset < num_matching else 0
            page = matching[offset : offset + MAX_TENANT_ROWS]
        else:
            num_matching = len(known)
            offset = question.offset if question.offset < num_matching else 0
            page = first[offset : offset + MAX_TENANT_ROWS]
            if len(page) < MAX_TENANT_ROWS:
                begin = max(0, offset - len(first))
                page += islice(self._others(first), begin, begin + MAX_TENANT_ROWS - len(page))
        blocks = self._engines.blocks_by_account() if page else {}
        rows = tuple(self._view(known[tenant], now, blocks.get(tenant, 0)) for tenant in page)
        return Tenants(total=len(known), matching=num_matching, offset=offset, active=len(first), rows=rows)

    def _view(self, tenant: Tenant, now: float, blocks: int) -> TenantView:
        status, limits, left = self.status(tenant, now), tenant.limits, self._ledger.left(tenant.id)
        return TenantView(
            **{name: getattr(status, name) for name in TenantStatus.__dataclass_fields__},
            priority=tenant.priority.value,
            weight=tenant.weight,
            retention=tenant.retention.value,
            group=tenant.group,
            concurrency=limits.concurrency,
            requests_per_minute=limits.requests_per_minute,
            tokens_per_minute=limits.tokens_per_minute,
            requests_left=None if left is None else left.remaining_requests,
            tokens_left=None if left is None else left.remaining_tokens,
            max_context_tokens=limits.max_context_tokens,
            max_output_tokens=limits.max_output_tokens,
            kv_reserved=tenant.kv.reservation / WHOLE_POOL,
            kv_cap=tenant.kv.cap / WHOLE_POOL,
            kv_blocks=blocks,
        )

    def _at_work(self) -> list[str]:
        """Return the tenants with a request in flight, or one that ended since the oldest mark; those with the most
        tokens first."""
        before, known = self._history.marked, self._ledger.policy.tenants
        ranked = {tenant: -self._ledger.concurrency(tenant) for tenant in self._ledger.at_work if tenant in known}
        if before is not None:
            for tenant, count in self._counts.latest:
                then = before.get(tenant, NOTHING)
                if then[0] == count.requests:
                    break
                if tenant in known:
                    ranked[tenant] = ranked.get(tenant, 0) - count.tokens + then[1]
        return [tenant for _, tenant in sorted(zip(ranked.values(), ranked, strict=True))]

    def _others(self, first: list[str]) -> Iterator[str]:
        """Yield all other tenants by name; sorted once for each policy."""
        policy, at_work = self._ledger.policy, set(first)
        if self._order[0] != policy.digest:
            self._order = policy.digest, sorted(policy.tenants)
        return (tenant for tenant in self._order[1] if tenant not in at_work)

    def _all_counts(self) -> Iterator[tuple[str, Counts]]:
        for tenant, count in self._counts.seen:
            yield tenant, (count.requests, count.tokens, count.refused)
