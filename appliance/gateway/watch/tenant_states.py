"""Tenants as status, top and console show them: counts since the start, rates, limits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice

from appliance.common.status import Counts, TenantStatus
from appliance.gateway.console.look import MAX_TENANT_ROWS, Question, Tenants, TenantView
from appliance.gateway.request.ledger import Ledger
from appliance.gateway.request.tenant_counts import TenantCounts
from appliance.gateway.watch.engine_states import EngineStates
from appliance.gateway.watch.history import NOTHING, Samples
from policy.model import WHOLE_POOL, Tenant


class TenantStates:
    """States of tenants. A page costs what is on it: tenants that have not called lately are not walked over."""

    def __init__(self, ledger: Ledger, counts: TenantCounts, samples: Samples, engines: EngineStates) -> None:
        self._ledger, self._counts, self._samples, self._engines = ledger, counts, samples, engines
        self._order: tuple[str, list[str]] = ("", [])

    @property
    def in_flight(self) -> int:
        """Outputs in flight of all tenants."""
        return sum(map(self._ledger.concurrency, self._ledger.at_work))

    def all(self) -> tuple[TenantStatus, ...]:
        """Return what each tenant of the policy uses, in the policy's order."""
        counts, _ = self._counts.now()
        return tuple(self._status(tenant, counts) for tenant in self._ledger.policy.tenants.values())

    def _status(self, tenant: Tenant, counts: Mapping[str, Counts]) -> TenantStatus:
        count, rates = counts.get(tenant.id, NOTHING), self._samples.rates_of(tenant.id)
        return TenantStatus(
            id=tenant.id,
            isolation_class=tenant.isolation_class.value,
            in_flight=self._ledger.concurrency(tenant.id),
            max_in_flight=tenant.limits.concurrency,
            requests=count.requests,
            tokens=count.tokens,
            refused=count.refused,
            requests_per_s=rates.requests,
            output_tokens_per_s=rates.output_tokens,
            refused_per_s=rates.refused,
        )

    def page(self, question: Question) -> Tenants:
        """Return one page of tenants, or of those whose names contain a text: those at work first, the busiest on top,
        then all others by name."""
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
        counts, _ = self._counts.now()
        rows = tuple(self._view(known[tenant], counts, blocks.get(tenant, 0)) for tenant in page)
        return Tenants(total=len(known), matching=num_matching, offset=offset, active=len(first), rows=rows)

    def _view(self, tenant: Tenant, counts: Mapping[str, Counts], blocks: int) -> TenantView:
        status, limits, left = self._status(tenant, counts), tenant.limits, self._ledger.left(tenant.id)
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
        """Return the tenants with a request in flight, or one that ended in the seconds that rates are of, in the order
        of ``busiest_first``."""
        before, known, samples = self._samples.since, self._ledger.policy.tenants, self._samples
        if before is None:
            return sorted(known.keys() & self._ledger.at_work)
        found = set(self._ledger.at_work)
        for tenant, count in self._counts.latest:
            if before.get(tenant, NOTHING).requests == count.requests:
                break
            found.add(tenant)
        ranks = ((-samples.output_of(one), -self._ledger.concurrency(one), one) for one in found if one in known)
        return [tenant for _, _, tenant in sorted(ranks)]

    def _others(self, first: list[str]) -> Iterator[str]:
        """Yield all other tenants by name; sorted once for each policy."""
        policy, at_work = self._ledger.policy, set(first)
        if self._order[0] != policy.digest:
            self._order = policy.digest, sorted(policy.tenants)
        return (tenant for tenant in self._order[1] if tenant not in at_work)
