"""Replay of logged requests under another policy: how many would have been refused, and by which rule. Pure.

Each request is decided by ``policy.evaluate.evaluate`` under both policies, with buckets that fill by the times of the
log. What counts is the difference: requests that the new policy refuses and the old one does not. The log is not the
traffic. It has a request's time at its end, the tokens that were produced and not those that were asked for, and no
number of choices: counts of rates are estimates. Spend before the first entry is not known: its counts are the least.
Rules in ``NOT_REPLAYED`` are named instead of replayed. A request by a route's alias is replayed with the model that
served it, for as long as the route leads there, and else with the likeliest; a route that is gone refuses it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import inf

from policy.adapters import granting_rule, is_adapter, served_by, split
from policy.changes import Change
from policy.decision import Decision, Effect, Reason
from policy.evaluate import evaluate, principal
from policy.feature import Feature
from policy.limits import Bucket, Rate, full, refill
from policy.model import FREE, Exceeded, Limits, PolicySet, Tenant
from policy.prices import cost, find_price
from policy.rates import BURSTS, TREATMENTS, effective, filled, input_rate, output_rate, request_rate, token_rate
from policy.request import AccessRequest, Spend, Usage
from policy.routes import likeliest, visible_route
from policy.told import Direction
from policy.wording import counted

_ALONE: Mapping[str, Feature] = {
    "tokenize": Feature.TOKENIZE,
    "detokenize": Feature.TOKENIZE,
    "attest": Feature.ATTESTATION,
}
"""Operations without an answer of a model, a first decision and no tokens, with the feature that they need."""

_VECTORS: Mapping[str, Feature] = {
    "embeddings": Feature.EMBEDDINGS,
    **dict.fromkeys(("rerank", "score", "classify"), Feature.RERANK),
}
"""Operations that need vectors of texts, with the feature that they need."""

POOLED = frozenset(_VECTORS)
"""Operations on several texts, without output: the log has their sum, not the longest."""

CUT_CREDENTIAL = 256
"""Characters after which the log cuts a credential; of a longer one only the tenant is known."""

REPLAYED = frozenset(
    {
        "limits.requests_per_minute",
        "limits.tokens_per_minute",
        "limits.max_context_tokens",
        "limits.max_output_tokens",
        "limits.input_tokens_per_minute",
        "limits.output_tokens_per_minute",
        *(f"limits.{rate}.{what}" for rate in BURSTS.values() for what in ("burst", "exceeded")),
        "limits.max_queue_s",
        "limits.spend_per_day",
        "limits.spend_per_month",
        "features.tokenize",
        "features.attestation",
        "features.embeddings",
        "features.rerank",
        "features.batches",
        "hours",
    }
)
"""Keys of limits and features that the replay decides by."""

NOT_REPLAYED: Mapping[str, str] = {
    "limits.concurrency": "entries do not say how many requests ran at once",
    "limits.concurrency.exceeded": "entries do not say how many requests ran at once",
    "limits.kv_tokens": "entries do not say how many requests ran at once",
    "limits.kv_tokens.exceeded": "entries do not say how many requests ran at once",
    "limits.max_queued_requests": "entries do not say how many requests waited at once",
    "features.structured_output": "entries do not say which requests had a grammar",
    "features.tools": "entries do not say which requests offered tools",
    "features.wake": "entries do not say which models slept",
    "features.stored_responses": "entries do not say which requests asked that their response is kept",
    "content.max_request_bytes": "entries do not say how many bytes requests had",
    "content.denied_fields": "entries do not say which fields requests used",
    "content.roles": "entries do not say which roles messages had",
    "end_users.requests_per_minute": "entries do not say for which end user requests were",
    "end_users.output_tokens_per_minute": "entries do not say for which end user requests were",
    "end_users.concurrency": "entries do not say for which end user requests were",
    "external": "entries of older releases do not say which models were computed outside of the appliance",
    "regions": "entries do not say in which region the appliance was",
    "model_regions": "entries do not say in which region the appliance was",
    "networks": "entries do not say where requests came from",
}
"""Keys of limits and features that refuse requests and cannot be replayed, with the reason."""

NEVER_REFUSES = frozenset({"features.reasoning", "limits.max_stored_bytes"})
"""Keys of limits and features that refuse no request; a limit of files refuses uploads."""

_CUTTING = frozenset({Reason.CONTEXT_TOO_LONG, Reason.OUTPUT_TOO_LONG})
"""Reasons that cut an answer short where no number of output tokens was asked for."""

UNKNOWN_KEY = "the replay does not know this rule"


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowedEntry:
    """Request that was allowed, as logged at its end."""

    time_s: float
    tenant: str
    credential: str
    model: str
    operation: str
    policy: str
    """Digest of the policy that decided."""
    input_tokens: int
    """Prompt tokens; 0 where the request ended before they were counted."""
    cached_tokens: int
    """Prompt tokens whose KV was found in the cache."""
    output_tokens: int
    day: int
    """Number of the day (UTC) to which its cost belongs; any numbering that grows."""
    month: int
    """Number of its month."""
    alias: str = ""
    """Route by which ``model`` was asked for, or name of an adapter; empty: by its own name."""
    adapter: str = ""
    """Whole name of the adapter with which ``model`` served it; empty: without one."""
    batch: bool = False
    """Whether it was a line of a batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeniedEntry:
    """Requests of one tenant that one rule denied within a moment."""

    tenant: str
    credential: str
    model: str
    """Empty for a model that is not served."""
    rule: str
    count: int
    alias: str = ""
    """As in ``AllowedEntry``."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Number of a tenant's requests that one rule would have decided otherwise."""

    tenant: str
    rule: str
    requests: int
    sure: bool = True
    """Whether the log shows it; if not, it is the most that may be."""


@dataclass(slots=True)
class Replay:
    """Result of a replay."""

    requests: Counter[str] = field(default_factory=Counter)
    """Allowed requests in the log, by tenant."""
    foreign: int = 0
    """Allowed requests that a policy with another digest than the old one decided."""
    inexact: int = 0
    """Allowed requests that the replay refuses under the old policy too: they count nowhere."""
    _refused: Counter[tuple[str, str]] = field(default_factory=Counter)
    _shortened: Counter[tuple[str, str]] = field(default_factory=Counter)
    _lifted: Counter[tuple[str, str, bool]] = field(default_factory=Counter)

    @property
    def refused(self) -> list[Finding]:
        """Requests that would have been refused."""
        return [Finding(tenant, rule, number) for (tenant, rule), number in sorted(self._refused.items())]

    @property
    def shortened(self) -> list[Finding]:
        """Requests that would have been refused if they asked for what they got, and cut short otherwise."""
        return [Finding(tenant, rule, number, False) for (tenant, rule), number in sorted(self._shortened.items())]

    @property
    def lifted(self) -> list[Finding]:
        """Denied requests that the rule which denied them would have let pass."""
        return [Finding(tenant, rule, number, sure) for (tenant, rule, sure), number in sorted(self._lifted.items())]

    def count(self, entry: AllowedEntry, before: Verdict | None, after: Verdict | None) -> None:
        """Count one allowed request, with what the old and the new policy say against it."""
        self.requests[entry.tenant] += 1
        if before is not None:
            self.inexact += 1
        elif after is not None:
            counter = self._shortened if after.cut else self._refused
            counter[entry.tenant, after.rule] += 1

    def count_lifted(self, entry: DeniedEntry, *, sure: bool) -> None:
        """Count denied requests that their rule would have let pass."""
        self._lifted[entry.tenant, entry.rule, sure] += entry.count


@dataclass(frozen=True, slots=True)
class Verdict:
    """Rule that a policy has against a logged request."""

    rule: str
    cut: bool = False
    """Whether a request that asked for no number of output tokens is served with fewer, not refused."""


def replay(old: PolicySet, new: PolicySet, entries: Iterable[AllowedEntry | DeniedEntry]) -> Replay:
    """Decide logged requests, in the order of their times, under both policies."""
    result, before, after = Replay(), _Meter(old), _Meter(new)
    for entry in entries:
        if isinstance(entry, AllowedEntry):
            result.foreign += entry.policy != old.digest
            result.count(entry, before.judge(entry), after.judge(entry))
        else:
            then, now = _permits(old, entry), _permits(new, entry)
            if now and not then:
                result.count_lifted(entry, sure=True)
            elif now is None and _limit(new, entry) > _limit(old, entry):
                result.count_lifted(entry, sure=False)
    return result


def not_replayed(found: Collection[Change]) -> list[tuple[str, str]]:
    """Return path and reason of each rule that may refuse more requests than before and was not replayed."""
    told = []
    for change in found:
        if change.direction is Direction.WIDER:
            continue
        key = ".".join(change.path.split(".")[2:])
        if (key in NOT_REPLAYED or key.startswith(("limits.", "features."))) and key not in REPLAYED | NEVER_REFUSES:
            told.append((change.path, NOT_REPLAYED.get(key, UNKNOWN_KEY)))
    return told


def sentences(result: Replay) -> list[str]:
    """Return the findings as sentences, those that take something away first."""
    lines = []
    for one in result.refused:
        total = counted(result.requests[one.tenant], "request")
        lines.append(f"{one.requests:,} of {total} of {one.tenant} would have been refused, by {one.rule}")
    for one in result.shortened:
        total = counted(result.requests[one.tenant], "request")
        lines.append(f"{one.requests:,} of {total} of {one.tenant} might have been refused or cut short, by {one.rule}")
    for one in result.lifted:
        denied = counted(one.requests, "denied request")
        lines.append(f"{denied} of {one.tenant} {'would' if one.sure else 'might'} have passed {one.rule}")
    return lines


class _Meter:
    """Decides the requests of a log under one policy; keeps the buckets between two of them."""

    def __init__(self, policy: PolicySet) -> None:
        self._policy = policy
        self._buckets: dict[str, _Buckets] = {}
        self._spent: Counter[tuple[str, str, int]] = Counter()
        """Billionths by tenant, kind of period and number of the period."""

    def judge(self, entry: AllowedEntry) -> Verdict | None:
        """Return the rule against a request; None when it is served, and then its tokens are taken."""
        tenant = _owner(self._policy, entry)
        if tenant is None:
            known = entry.tenant in self._policy.tenants
            return Verdict(f"tenants.{entry.tenant}{'.credentials' if known else ''}")
        if is_adapter(entry.alias) and entry.alias not in tenant.adapters:
            return Verdict(f"tenants.{tenant.id}.adapters")
        if entry.alias and not is_adapter(entry.alias) and entry.alias not in self._policy.routes:
            return Verdict(f"routes.{entry.alias}")
        entry = _led(self._policy, tenant, entry)
        now, limits = entry.time_s, tenant.limits
        buckets = self._buckets.get(tenant.id) or _Buckets(
            full(request_rate(limits), now), full(token_rate(limits), now), None, None
        )
        usage = Usage(
            concurrency=0,
            request_bucket=buckets.requests,
            token_bucket=buckets.tokens,
            input_bucket=buckets.input,
            output_bucket=buckets.output,
            spend=self._spend(tenant.id, entry),
        )
        first = evaluate(self._policy, _first_access(tenant, entry), usage, now)
        if first.effect is Effect.DENY:
            return Verdict(first.rule)
        verdict = self._counted(tenant, entry, usage)
        if verdict is None:
            self._pay(tenant, entry)
        # A request that waits is taken here at once, below zero: the next one then waits longer.
        self._buckets[tenant.id] = buckets.less(limits, None if verdict else entry, now)
        return verdict

    def _spend(self, tenant: str, entry: AllowedEntry) -> Spend:
        day, month = self._spent[tenant, "day", entry.day], self._spent[tenant, "month", entry.month]
        return Spend(day=day, month=month, day_left_s=0.0, month_left_s=0.0)

    def _pay(self, tenant: Tenant, entry: AllowedEntry) -> None:
        price = find_price(self._policy, entry.model, tenant.isolation_class, batch=entry.batch) or FREE
        paid = cost(price, entry.input_tokens, entry.cached_tokens, entry.output_tokens)
        if paid:
            self._spent[tenant.id, "day", entry.day] += paid
            self._spent[tenant.id, "month", entry.month] += paid

    def _counted(self, tenant: Tenant, entry: AllowedEntry, usage: Usage) -> Verdict | None:
        """Return the rule against a request with its counts. The request asked for one token at least, and for no fewer
        than it got or for no number at all: then it would have been cut short."""
        if entry.operation in _ALONE or not entry.input_tokens:
            return None
        asked = 0 if entry.operation in POOLED else max(1, entry.output_tokens)
        whole = self._second(tenant, entry, usage, asked)
        if whole.effect is not Effect.DENY:
            return None
        least = self._second(tenant, entry, usage, min(1, asked))
        passes = least.effect is not Effect.DENY
        return Verdict(whole.rule, cut=whole.reason in _CUTTING) if passes else Verdict(least.rule)

    def _second(self, tenant: Tenant, entry: AllowedEntry, usage: Usage, output: int) -> Decision:
        access = AccessRequest(
            tenant=tenant.id,
            model=entry.model,
            adapter=entry.adapter,
            alias=entry.alias,
            input_tokens=entry.input_tokens,
            max_output_tokens=output,
            longest_input=1 if entry.operation in POOLED else None,
            batch=entry.batch,
        )
        return evaluate(self._policy, access, usage, entry.time_s)


@dataclass(frozen=True, slots=True)
class _Buckets:
    """Buckets of one tenant; None where nothing was taken yet, or there is no rate."""

    requests: Bucket
    tokens: Bucket
    input: Bucket | None
    output: Bucket | None

    def less(self, limits: Limits, served: AllowedEntry | None, now: float) -> _Buckets:
        """Return the buckets after a request; None: one whose tokens are not taken."""
        prompt, output = (served.input_tokens, served.output_tokens) if served is not None else (0, 0)
        own = input_rate(limits), output_rate(limits)
        return _Buckets(
            _take(self.requests, request_rate(limits), 1, now),
            _take(self.tokens, token_rate(limits), prompt + output, now),
            None if own[0] is None else _take(filled(self.input, own[0], now), own[0], prompt, now),
            None if own[1] is None else _take(filled(self.output, own[1], now), own[1], output, now),
        )


def _led(policy: PolicySet, tenant: Tenant, entry: AllowedEntry) -> AllowedEntry:
    """Return the request as a policy would serve it: by the model that did, where its name still leads to that, and
    else by the likeliest model of the route that has its name now."""
    name = entry.alias or entry.model
    route = visible_route(policy, tenant, name)
    if route is None:
        model, adapter, alias = served_by(tenant, name)
        return replace(entry, model=model, adapter=adapter, alias=alias)
    kept = entry.adapter or entry.model
    if not entry.alias or kept not in route.models:
        kept = likeliest(policy, route, tenant.isolation_class)
    model, adapter = split(kept)
    return replace(entry, model=model, adapter=adapter, alias=name)


def _take(bucket: Bucket, rate: Rate, amount: int, now: float) -> Bucket:
    current = refill(bucket, rate, now)
    return Bucket(current.level - amount, current.updated_at)


def _first_access(tenant: Tenant, entry: AllowedEntry) -> AccessRequest:
    alone = _ALONE.get(entry.operation)
    return AccessRequest(
        tenant=tenant.id,
        model=entry.model,
        adapter=entry.adapter,
        alias=entry.alias,
        input_tokens=None,
        max_output_tokens=0 if alone or entry.operation in POOLED else None,
        feature=alone or _VECTORS.get(entry.operation),
        unix_s=entry.time_s,
        batch=entry.batch,
    )


def _owner(policy: PolicySet, entry: AllowedEntry | DeniedEntry) -> Tenant | None:
    if len(entry.credential) >= CUT_CREDENTIAL:
        return policy.tenants.get(entry.tenant)
    return policy.tenants.get(principal(policy, entry.credential) or "")


def _permits(policy: PolicySet, entry: DeniedEntry) -> bool | None:
    """Return whether a policy lets the requests pass the rule that denied them; None where the log does not show it."""
    tenant = _owner(policy, entry)
    if tenant is None or not entry.rule:
        return False
    section, _, name = entry.rule.rpartition(".")
    if name == "models":
        name = entry.alias or entry.model
        return bool(name) and granting_rule(policy, tenant, name) is not None
    if section.endswith(".features"):
        return name in _FEATURES and tenant.features.grants(Feature(name))
    return None


def _limit(policy: PolicySet, entry: DeniedEntry) -> float:
    """Return the limit by which requests were denied, with its burst; 0 where there is none of its name, and no bound
    where requests beyond it are not refused."""
    tenant, name = _owner(policy, entry), entry.rule.rpartition(".")[2]
    value = None if tenant is None else getattr(tenant.limits, name, None)
    if tenant is None or not isinstance(value, int | float):
        return 0
    parts = [effective(tenant.limits, key) for key, limit in (*BURSTS.items(), *TREATMENTS.items()) if limit == name]
    if any(part in (Exceeded.QUEUE, Exceeded.DOWNGRADE) for part in parts):
        return inf
    return value + sum(part for part in parts if isinstance(part, int))


_FEATURES = frozenset(one.value for one in Feature)
