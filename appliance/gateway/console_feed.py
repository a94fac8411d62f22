"""The gateway's state as the operator's console shows it. Reads, never changes; what it keeps is bounded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from itertools import islice

from appliance.console.alerts import Facts, alerts
from appliance.console.history import NOTHING, Counts, History
from appliance.console.latency import latency
from appliance.console.picture import (
    MAX_ACCOUNTS,
    MAX_OWN_SANDBOXES,
    MAX_TENANT_ROWS,
    MAX_TRACE_ROWS,
    AccountView,
    KvView,
    Latency,
    ModelView,
    Picture,
    Point,
    Question,
    Requests,
    SandboxView,
    Tenants,
    TenantView,
)
from appliance.gateway.engine_counts import TokenCount, running, waiting
from appliance.gateway.engine_link import EngineLink
from appliance.gateway.policy_file import PolicyFile
from appliance.gateway.records import SandboxRecord
from appliance.gateway.rooms import ModelRooms
from appliance.gateway.sandboxes import Sandboxes
from appliance.gateway.service import GatewayService
from appliance.status import Alert
from appliance.telemetry.store import MAX_TRACES, TraceList, TraceStore, TraceSummary
from appliance.version import VERSION
from policy.evaluate import visible_models
from policy.model import WHOLE_POOL, PolicySet, Tenant

PERIOD_S = 2.0
"""Between two points of the history: the gateway looks at its engines so often in any case."""


class ConsoleFeed:
    """``note`` is called every ``PERIOD_S``; ``look`` answers one question of the page."""

    def __init__(
        self,
        service: GatewayService,
        sandboxes: Sandboxes,
        policy: PolicyFile,
        traces: TraceStore,
        clock: Callable[[], float] = time.time,
        certificate: tuple[float, float] | None = None,
    ) -> None:
        """``certificate``: Unix times between which the one that is served with is valid."""
        self._service, self._sandboxes, self._policy, self._traces = service, sandboxes, policy, traces
        self._clock, self._certificate = clock, certificate
        self._started_at = clock()
        self._history = History()
        self._tokens = TokenCount()
        self._names: tuple[Mapping[str, bytes], dict[bytes, str]] = ({}, {})
        self._users: tuple[str, dict[str, int]] = ("", {})
        self._order: tuple[str, list[str]] = ("", [])

    def note(self) -> None:
        """Keep a point of the history, and now and then the tenants' counts."""
        now = self._clock()
        for rooms in self._all_rooms():
            self._tokens.look(rooms)
        engines = [rooms.engine for rooms in self._all_rooms() if rooms.engine is not None]
        blocks = sum(engine.ready.num_blocks for engine in engines)
        held = blocks - sum(engine.stats.free_blocks for engine in engines)
        self._history.add(
            Point(
                at=now, tokens=self._tokens.total, running=sum(map(running, engines)),
                waiting=sum(map(waiting, engines)), kv_held=held / blocks if blocks else 0.0,
                restarts=sum(record.restarts for record in self._sandboxes.records.values()),
            )
        )
        self._history.mark(now, self._counts)

    def look(self, question: Question, page: str) -> Picture:
        """One look; ``page`` is the digest of the page's files."""
        now = self._clock()
        service, sandboxes = self._service, self._sandboxes
        newest = self._traces.newest(MAX_TRACES)
        times = latency(newest.traces, now)
        models, own = self._views()
        own_rooms = service.house.rooms
        mark = f"{newest.recorded}/{question.outcome}"
        return Picture(
            now=now, version=VERSION, page=page, started_at=self._started_at,
            ready=all(rooms.ready for rooms in service.rooms.values()),
            sandbox=sandboxes.attachment.sandbox, limits=sandboxes.attachment.limits,
            tokens=self._tokens.total,
            alerts=alerts(self._facts(now, models, own, times, newest.traces)), models=models, own=own,
            own_total=len(own_rooms), tenants=self._tenants(question, now), latency=times,
            policy=self._policy.status(service.ledger.policy), period_s=PERIOD_S,
            points=self._history.after(question.after),
            requests=None if mark == question.seen else _requests(mark, newest, question.outcome),
        )  # fmt: skip

    def alerts(self) -> tuple[Alert, ...]:
        """What the operator should know now, for those who do not look at the page."""
        now, newest = self._clock(), self._traces.newest(MAX_TRACES).traces
        return alerts(self._facts(now, *self._views(), latency(newest, now), newest))

    def _views(self) -> tuple[tuple[ModelView, ...], tuple[ModelView, ...]]:
        """The models' shared sandboxes, and some of single tenants."""
        shared = tuple(self._model(rooms) for rooms in self._service.rooms.values())
        return shared, tuple(self._model(rooms) for rooms in self._service.house.rooms[:MAX_OWN_SANDBOXES])

    def _all_rooms(self) -> tuple[ModelRooms, ...]:
        return (*self._service.rooms.values(), *self._service.house.rooms)

    def _facts(
        self, now: float, models: tuple[ModelView, ...], own: tuple[ModelView, ...], times: Latency,
        newest: tuple[TraceSummary, ...],
    ) -> Facts:  # fmt: skip
        service, attachment, audit = self._service, self._sandboxes.attachment, self._sandboxes.audit
        policy = service.ledger.policy
        engines = [rooms.engine for rooms in self._all_rooms() if rooms.engine is not None]
        return Facts(
            now=now, attached=attachment.attached, draining=any(rooms.draining for rooms in service.rooms.values()),
            sandbox=attachment.sandbox if attachment.attached else "", models=models, own=own,
            users=self._num_users(policy), num_tenants=len(policy.tenants), policy=self._policy.status(policy),
            audit_problem=audit.problem, audit_refuses=audit.refuses, integrity_failures=service.integrity_failures,
            silence_s={rooms.name: rooms.engine.silence_s for rooms in self._all_rooms() if rooms.engine is not None},
            defects=sum(engine.stats.defects for engine in engines), points=self._history.points, latency=times,
            newest=newest, certificate=self._certificate,
        )  # fmt: skip

    def _num_users(self, policy: PolicySet) -> dict[str, int]:
        """Of each model how many tenants may use it; counted once for each policy."""
        if self._users[0] != policy.digest:
            counts = dict.fromkeys(self._service.rooms, 0)
            for tenant in policy.tenants:
                for model in visible_models(policy, tenant, self._service.rooms):
                    counts[model] += 1
            self._users = policy.digest, counts
        return self._users[1]

    def _model(self, rooms: ModelRooms) -> ModelView:
        engine = rooms.engine
        views = [
            _sandbox(role, record, self._sandboxes.attachment.sandbox)
            for role in ("engine", "text")
            if (record := self._sandboxes.record_of(rooms, role)) is not None
        ]
        there = rooms.ready if any(view.role == "engine" for view in views) else rooms.text is not None
        return ModelView(
            name=rooms.name, runner=rooms.runner, tenant=rooms.tenant,
            state="draining" if rooms.draining else "ready" if there else "starting",
            tokens=self._tokens.look(rooms), running=running(engine), waiting=waiting(engine),
            sandboxes=tuple(views), kv=None if engine is None else self._kv(engine),
        )  # fmt: skip

    def _kv(self, engine: EngineLink) -> KvView:
        uses = sorted(engine.kv.uses, key=lambda use: use.resident, reverse=True)
        names = self._account_names()
        views = [
            AccountView(
                name=name, kind=_account_kind(name), held=use.held, cached=max(0, use.resident - use.held),
                reserved=use.reserved, cap=use.cap, lost=use.lost, preempted=use.preempted,
            )
            for use in uses[:MAX_ACCOUNTS]
            if (name := names.get(use.namespace)) is not None
        ]  # fmt: skip
        shown = {view.name for view in views}
        rest = [use for use in uses if use.resident and names.get(use.namespace) not in shown]
        return KvView(
            blocks=engine.ready.num_blocks, available=engine.stats.free_blocks,
            block_tokens=engine.ready.block_size, accounts=tuple(views), other_accounts=len(rest),
            other_held=sum(use.held for use in rest),
            other_cached=sum(max(0, use.resident - use.held) for use in rest),
        )  # fmt: skip

    def _account_names(self) -> dict[bytes, str]:
        """Names by namespace key; turned round once for each table of keys."""
        keys = self._service.ledger.namespaces
        if self._names[0] is not keys:
            self._names = keys, {key: name for name, key in keys.items()}
        return self._names[1]

    def _counts(self) -> Iterator[tuple[str, Counts]]:
        for tenant, tally in self._service.tally.seen:
            yield tenant, (tally.requests, tally.tokens, tally.refused)

    def _tenants(self, question: Question, now: float) -> Tenants:
        known = self._service.ledger.policy.tenants
        first = self._at_work()
        if question.find:
            at_work = set(first)
            rest = (tenant for tenant in self._sorted_names() if tenant not in at_work)
            matching = [tenant for tenant in (*first, *rest) if question.find in tenant.casefold()]
            num_matching = len(matching)
            offset = question.offset if question.offset < num_matching else 0
            page = matching[offset : offset + MAX_TENANT_ROWS]
        else:
            num_matching = len(known)
            offset = question.offset if question.offset < num_matching else 0
            page = first[offset : offset + MAX_TENANT_ROWS]
            if len(page) < MAX_TENANT_ROWS:
                at_work = set(first)
                rest = (tenant for tenant in self._sorted_names() if tenant not in at_work)
                begin = max(0, offset - len(first))
                page += islice(rest, begin, begin + MAX_TENANT_ROWS - len(page))
        blocks = self._blocks_by_account() if page else {}
        return Tenants(
            total=len(known), matching=num_matching, offset=offset, active=len(first),
            rows=tuple(self._tenant(known[tenant], now, blocks.get(tenant, 0)) for tenant in page),
        )  # fmt: skip

    def _at_work(self) -> list[str]:
        """Tenants with a request in flight, or one that ended since the oldest mark; those with the most tokens first.
        Who has not called since then is not looked at."""
        ledger, before = self._service.ledger, self._history.marked
        known = ledger.policy.tenants
        ranked = {tenant: -ledger.concurrency(tenant) for tenant in ledger.at_work if tenant in known}
        if before is not None:
            for tenant, tally in self._service.tally.latest:
                then = before.get(tenant, NOTHING)
                if then[0] == tally.requests:
                    break
                if tenant in known:
                    ranked[tenant] = ranked.get(tenant, 0) - tally.tokens + then[1]
        return [tenant for _, tenant in sorted(zip(ranked.values(), ranked, strict=True))]

    def _sorted_names(self) -> list[str]:
        """All tenants by name; sorted once for each policy."""
        policy = self._service.ledger.policy
        if self._order[0] != policy.digest:
            self._order = policy.digest, sorted(policy.tenants)
        return self._order[1]

    def _blocks_by_account(self) -> dict[str, int]:
        found: dict[str, int] = {}
        names = self._account_names()
        for rooms in self._all_rooms():
            for use in rooms.engine.kv.uses if rooms.engine is not None else ():
                name = names.get(use.namespace, "")
                found[name] = found.get(name, 0) + use.resident
        return found

    def _tenant(self, tenant: Tenant, now: float, blocks: int) -> TenantView:
        ledger, limits = self._service.ledger, tenant.limits
        tally = self._service.tally.of(tenant.id)
        counts = tally.requests, tally.tokens, tally.refused
        requests_per_s, tokens_per_s, refused_per_s = self._history.rates(tenant.id, counts, now)
        left = ledger.left(tenant.id)
        return TenantView(
            id=tenant.id, isolation_class=tenant.isolation_class.value, priority=tenant.priority.value,
            weight=tenant.weight, retention=tenant.retention.value, group=tenant.group,
            in_flight=ledger.concurrency(tenant.id), concurrency=limits.concurrency,
            requests=tally.requests, tokens=tally.tokens, refused=tally.refused,
            tokens_per_s=tokens_per_s, requests_per_s=requests_per_s, refused_per_s=refused_per_s,
            requests_per_minute=limits.requests_per_minute, tokens_per_minute=limits.tokens_per_minute,
            requests_left=None if left is None else left.remaining_requests,
            tokens_left=None if left is None else left.remaining_tokens,
            max_context_tokens=limits.max_context_tokens, max_output_tokens=limits.max_output_tokens,
            kv_reserved=tenant.kv.reservation / WHOLE_POOL, kv_cap=tenant.kv.cap / WHOLE_POOL, kv_blocks=blocks,
        )  # fmt: skip


def _sandbox(role: str, record: SandboxRecord, kind: str) -> SandboxView:
    return SandboxView(
        role=role, state=record.state, kind=kind, pid=record.pid or None, generation=record.generation,
        restarts=record.restarts, since=record.since, cause="" if record.state == "ready" else record.cause,
    )


def _account_kind(name: str) -> str:
    prefix, slash, _ = name.partition("/")
    return prefix if slash and prefix in ("group", "public") else "tenant"


def _requests(mark: str, newest: TraceList, outcome: str) -> Requests:
    wanted = [one for one in newest.traces if not outcome or one.outcome == outcome]
    rows = tuple(wanted[:MAX_TRACE_ROWS])
    return Requests(mark=mark, recorded=newest.recorded, kept=len(newest.traces), rows=rows)
