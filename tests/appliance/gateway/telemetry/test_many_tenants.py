"""More tenants than may have series: bounded series, exact sums, an exact table, and no counter that goes back."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.resources import Resource
from prometheus_client.parser import text_string_to_metric_families

from appliance.common.outcomes import OUTCOMES
from appliance.gateway.telemetry import names
from appliance.gateway.telemetry.metrics import MAX_LATE_TENANTS, MAX_TENANTS, FinishedRequest, Level, Metrics
from appliance.gateway.telemetry.series_names import OTHER, SeriesNames
from appliance.gateway.telemetry.store import StoredTrace, TraceSummary

NUM_TENANTS = 200
NUM_REQUESTS = 3_000
NUM_HEAVY = 5
TENANTS = [f"t{number:03d}" for number in range(NUM_TENANTS)]
KINDS = ("input", "cached", "output")
LOOKED_AT = 8
"""Requests between which all series are read, which takes most of a test's time; some of them bring a place."""

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]
"""Name and labels to value."""


def finished(
    tenant: str | None, outcome: str = "ok", *, tokens: tuple[int, int, int], operation: str | None = None
) -> FinishedRequest:
    """A request of a tenant that has ended; tokens are input, cached, output. Without an operation it is in no
    histogram, which saves the tests most of their time."""
    errors = {"ok": None, "refused": "rate_limited", "invalid": "invalid_value", "failed": "internal"}
    summary = TraceSummary(
        trace_id="0" * 32,
        request_id="req_0",
        route="POST /v1/completions",
        tenant=tenant,
        model="mini",
        outcome=outcome,
        error=errors.get(outcome, "cancelled"),
        started_ns=0,
        duration_s=0.1,
        ttft_s=0.05,
        token_s=0.01,
        input_tokens=tokens[0],
        cached_tokens=tokens[1],
        output_tokens=tokens[2],
    )
    return FinishedRequest(trace=StoredTrace(summary, ()), front_end="http", operation=operation, replays=0)


def record(metrics: Metrics, one: FinishedRequest) -> None:
    """Count a request's tokens, as they are delivered, and then the request that has ended."""
    summary = one.trace.summary
    for kind in KINDS:
        if amount := getattr(summary, f"{kind}_tokens"):
            metrics.count(names.TOKENS, amount, token_type=kind, tenant=summary.tenant or "", model="mini")
    metrics.record(one)


def scrape(metrics: Metrics) -> Samples:
    """All samples of the appliance's own metrics, without buckets: reading them would take most of a test's time."""
    text = b"\n".join(line for line in metrics.render()[1].split(b"\n") if b"_bucket{" not in line).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith(("athanor_", "gen_ai_"))
    }


def total(samples: Samples, name: str, **wanted: str) -> float:
    """Sum over the series with these labels."""
    return sum(
        value for (found, labels), value in samples.items() if found == name and wanted.items() <= dict(labels).items()
    )


def labels_of_tenants(samples: Samples) -> set[str]:
    """Values of the tenant's label."""
    return {dict(labels)["athanor_tenant_id"] for _, labels in samples if "athanor_tenant_id" in dict(labels)}


@pytest.fixture
def metrics() -> Metrics:
    """Metrics that know all tenants."""
    found = Metrics(Resource.create({}))
    found.know(tenants=TENANTS, models=["mini"])
    return found


def traffic(seed: int, requests: int, operation: str | None = None) -> Iterator[FinishedRequest]:
    """Requests of all tenants in a random order, with outcomes and sizes of all kinds. A few tenants come late, when
    others have all places, and use much more."""
    chance = random.Random(seed)
    for number in range(requests):
        heavy = number >= 2 * MAX_TENANTS and chance.random() < 0.3
        tenant = chance.choice(TENANTS[-NUM_HEAVY:] if heavy else TENANTS[:-NUM_HEAVY])
        size = 2_000 if heavy else 40
        tokens = chance.randrange(size), chance.randrange(size // 4), chance.randrange(size)
        outcome = chance.choice(("ok", "ok", "ok", "refused", "invalid", "cancelled", "failed"))
        yield finished(tenant, outcome, tokens=tokens, operation=operation)


def test_sums_are_exact_and_series_bounded(metrics: Metrics) -> None:
    """With 200 tenants the sums over all series are those of the requests, for each outcome and kind of token; the
    table has every tenant's own; labels stay within the bound, and the heaviest tenants are among them. Control: some
    tenants do count as other."""
    requests: Counter[tuple[str, str]] = Counter()
    tokens: Counter[tuple[str, str]] = Counter()
    for one in traffic(1, NUM_REQUESTS, "chat"):
        summary = one.trace.summary
        tenant = str(summary.tenant)
        requests[tenant, summary.outcome] += 1
        for kind in KINDS:
            tokens[tenant, kind] += getattr(summary, f"{kind}_tokens")
        record(metrics, one)
    samples = scrape(metrics)
    for outcome in OUTCOMES:
        wanted = sum(count for (_, found), count in requests.items() if found == outcome)
        assert total(samples, "athanor_requests_total", athanor_outcome=outcome) == wanted
    for kind in KINDS:
        wanted = sum(count for (_, found), count in tokens.items() if found == kind)
        assert total(samples, "athanor_tokens_total", athanor_token_type=kind) == wanted
    assert total(samples, "gen_ai_server_request_duration_seconds_count") == NUM_REQUESTS
    table = {one.tenant: one for one in metrics.tenants().tenants}
    assert set(table) == set(TENANTS)
    for tenant, row in table.items():
        assert {name: getattr(row, name) for name in OUTCOMES} == {name: requests[tenant, name] for name in OUTCOMES}
        assert {kind: getattr(row, f"{kind}_tokens") for kind in KINDS} == {
            kind: tokens[tenant, kind] for kind in KINDS
        }
    labels = labels_of_tenants(samples)
    assert OTHER in labels
    assert MAX_TENANTS < len(labels) <= MAX_TENANTS + MAX_LATE_TENANTS + 1
    assert set(TENANTS[-NUM_HEAVY:]) <= labels
    assert {row.series for row in table.values()} == labels


def test_no_counter_goes_back(metrics: Metrics) -> None:
    """Between any two scrapes no series falls or disappears, and the increase over all series is that of the requests
    between them: rate() over the sum is exact while tenants get places. Control: places were given meanwhile."""
    before, placed = scrape(metrics), 0
    requests = list(traffic(2, 600))
    for start in range(0, len(requests), 20):
        batch = requests[start : start + 20]
        for one in batch:
            record(metrics, one)
        after = scrape(metrics)
        assert {series for series, value in before.items() if after.get(series, -1.0) < value} == set()
        for kind in KINDS:
            grown = [total(one, "athanor_tokens_total", athanor_token_type=kind) for one in (before, after)]
            wanted = sum(getattr(one.trace.summary, f"{kind}_tokens") for one in batch)
            assert grown[1] - grown[0] == wanted
        labels = labels_of_tenants(after)
        if OTHER in labels_of_tenants(before):
            placed += len(labels - labels_of_tenants(before))
        before = after
    assert placed > 0


def test_a_request_counts_under_one_label(metrics: Metrics) -> None:
    """Every figure of a request is added to the series of one tenant or of the others, also of the request that brings
    its tenant a place. Control: some request does."""
    requests = list(traffic(3, 2 * MAX_TENANTS + LOOKED_AT, "chat"))
    for one in requests[:-LOOKED_AT]:
        record(metrics, one)
    seen, placed = scrape(metrics), 0
    for one in requests[-LOOKED_AT:]:
        record(metrics, one)
        now = scrape(metrics)
        grown = [dict(labels) for name, labels in now if now[name, labels] != seen.get((name, labels), 0)]
        (label,) = {labels["athanor_tenant_id"] for labels in grown if "athanor_tenant_id" in labels}
        tenant = one.trace.summary.tenant
        assert label in (tenant, OTHER)
        placed += label == OTHER and tenant in labels_of_tenants(now)
        seen = now
    assert placed > 0


def test_up_to_the_bound_every_tenant_has_a_series() -> None:
    """As many tenants as there are places are named from the start, in gauges too, whoever calls."""
    metrics = Metrics(Resource.create({}))
    metrics.know(tenants=TENANTS[:MAX_TENANTS], models=["m"])
    metrics.levels(Level(names.KV_RESIDENT, 1, {"tenant": tenant, "model": "m"}) for tenant in TENANTS)
    assert labels_of_tenants(scrape(metrics)) == {*TENANTS[:MAX_TENANTS], OTHER}
    metrics.know(tenants=TENANTS)
    for tenant in reversed(TENANTS):
        record(metrics, finished(tenant, tokens=(0, 0, 0)))
    assert labels_of_tenants(scrape(metrics)) == {*TENANTS[:MAX_TENANTS], OTHER}


def test_a_tenant_with_much_use_gets_a_place_and_keeps_it() -> None:
    """A name that comes too late counts as other until it has its share; then by itself, and what it counted before
    stays where it was. One below the share has none, however long it goes on; a stranger never has one."""
    found = SeriesNames(places=4, late_places=1)
    found.know("abcdefgh")
    for name in "abcd":
        found.place(name)
        assert not found.weigh(name, 100)
    found.place("e")
    assert found.label("e") == OTHER
    assert not found.weigh("e", 100)
    assert found.weigh("e", 40), "140 of 540 are more than a fourth"
    assert found.label("e") == "e"
    for _ in range(10):
        for name in "abcd":
            found.weigh(name, 100)
    assert found.label("e") == "e", "no place is taken back"
    assert not found.weigh("f", 10_000), "the late places are taken"
    assert not found.weigh("stranger", 1_000_000)
    assert found.label("stranger") == OTHER
    even = SeriesNames(places=4, late_places=4)
    even.know("abcdefgh")
    for name in "abcd":
        even.place(name)
    assert not any(even.weigh(name, 1) for _ in range(100) for name in "abcdefgh")


def test_a_late_series_begins_at_nothing(metrics: Metrics) -> None:
    """The series of a tenant that gets a place late are there with 0 before its next request: that one is seen as an
    increase, from the first token on."""
    for tenant in TENANTS[:MAX_TENANTS]:
        record(metrics, finished(tenant, tokens=(1, 0, 0)))
    heavy = TENANTS[-1]
    record(metrics, finished(heavy, tokens=(1_000, 0, 1_000)))
    begun = scrape(metrics)
    assert total(begun, "athanor_tokens_total", athanor_tenant_id=OTHER) == 2_000
    mine = {series: value for series, value in begun.items() if ("athanor_tenant_id", heavy) in series[1]}
    assert {name for name, _ in mine} == {"athanor_requests_total", "athanor_tokens_total"}
    assert set(mine.values()) == {0}
    record(metrics, finished(heavy, tokens=(5, 0, 7)))
    assert total(scrape(metrics), "athanor_tokens_total", athanor_tenant_id=heavy) == 12
    assert total(scrape(metrics), "athanor_tokens_total", athanor_tenant_id=OTHER) == 2_000


def test_a_sum_of_an_engine_keeps_its_label(metrics: Metrics) -> None:
    """A gauge that is a sum (lost blocks) stays under the label that the tenant had when it was more than nothing, or
    its old series would fall; a level (resident blocks) follows the tenant."""
    for tenant in TENANTS[:MAX_TENANTS]:
        record(metrics, finished(tenant, tokens=(1, 0, 0)))
    heavy, late = TENANTS[-1], TENANTS[-2]

    def tell(lost: dict[str, int]) -> Samples:
        rows = [(names.KV_LOST, tenant, count) for tenant, count in lost.items()]
        rows += [(names.KV_RESIDENT, tenant, 1) for tenant in lost]
        metrics.levels(Level(name, count, {"tenant": tenant, "model": "mini"}) for name, tenant, count in rows)
        return scrape(metrics)

    assert total(tell({heavy: 7, late: 0}), "athanor_kv_lost_blocks", athanor_tenant_id=OTHER) == 7
    for tenant in (heavy, late):
        record(metrics, finished(tenant, tokens=(1_000, 0, 1_000)))
    told = tell({heavy: 9, late: 3})
    assert total(told, "athanor_kv_lost_blocks", athanor_tenant_id=OTHER) == 9
    assert total(told, "athanor_kv_lost_blocks", athanor_tenant_id=late) == 3
    assert total(told, "athanor_kv_resident_blocks", athanor_tenant_id=heavy) == 1


def test_calls_without_a_tenant_have_a_row(metrics: Metrics) -> None:
    """Refusals before a tenant is known count in the row without a name, those of names that no policy knows in the row
    of the others: nothing is lost from the sums."""
    record(metrics, finished(None, "refused", tokens=(0, 0, 0)))
    record(metrics, finished("stranger", tokens=(3, 0, 0)))
    rows = {one.tenant: (one.refused, one.input_tokens, one.series) for one in metrics.tenants().tenants}
    assert rows == {"": (1, 0, ""), OTHER: (0, 3, OTHER)}
