"""Two looks at a status become rates; odd pairs of looks do not become odd rates."""

from __future__ import annotations

from dataclasses import replace

from appliance.usage import Sample, measure
from tests.appliance.admin_server import STATUS

AT = STATUS.started_at + 100


def later(seconds: float = 2.0, **changes: object) -> Sample:
    """A second look in which tenant alpha has changed."""
    alpha = replace(STATUS.tenants[0], **changes)
    return Sample(AT + seconds, replace(STATUS, tenants=(alpha, *STATUS.tenants[1:])))


def test_rates_are_differences_over_time() -> None:
    """Tokens and requests of two seconds, halved; what nobody counts is not known, which is not zero."""
    usage = measure(Sample(AT, STATUS), later(tokens=51_234 + 500, requests=124, refused=3))
    alpha, beta = usage.tenants
    assert (alpha.id, alpha.tokens_per_s, alpha.requests_per_s, alpha.refused_per_s) == ("alpha", 250.0, 2.0, 0.5)
    assert (beta.tokens_per_s, beta.requests_per_s) == (None, None)
    assert usage.tokens_per_s == 250.0
    assert (usage.seconds, usage.up_s) == (2.0, 102.0)


def test_engines_are_as_last_seen() -> None:
    """Running, waiting and the share of KV blocks in use; without a pool there is no share."""
    model = measure(Sample(AT, STATUS), later()).models[0]
    assert (model.running, model.waiting, model.restarts) == (3, 1, 1)
    assert model.kv_used == 24 / 1_024
    engine = replace(STATUS.models[0].engine, num_blocks=0, free_blocks=0)
    status = replace(STATUS, models=(replace(STATUS.models[0], engine=engine),))
    assert measure(Sample(AT, status), Sample(AT, status)).models[0].kv_used is None


def test_no_time_a_restart_and_a_new_tenant() -> None:
    """No division by nothing, no negative rate after a restart, and a new tenant's past is not its present."""
    assert measure(Sample(AT, STATUS), later(0.0, tokens=99_999)).tokens_per_s == 0
    anew = Sample(AT + 2, replace(STATUS, started_at=AT))
    assert measure(Sample(AT, STATUS), anew).tokens_per_s == 0
    assert measure(Sample(AT, STATUS), later(tokens=5)).tokens_per_s == 0
    fewer = Sample(AT, replace(STATUS, tenants=STATUS.tenants[1:]))
    assert measure(fewer, later(tokens=400)).tokens_per_s == 0


def test_the_busiest_come_first() -> None:
    """Sorted by tokens a second, then by requests in flight, then by name."""
    flights = {"c": 0, "b": 0, "a": 2}
    names = [replace(STATUS.tenants[0], id=name, tokens=0, in_flight=flight) for name, flight in flights.items()]
    busy = [replace(tenant, tokens=100 if tenant.id == "c" else 0) for tenant in names]
    before, after = (replace(STATUS, tenants=tuple(one)) for one in (names, busy))
    assert [one.id for one in measure(Sample(AT, before), Sample(AT + 1, after)).tenants] == ["c", "a", "b"]
