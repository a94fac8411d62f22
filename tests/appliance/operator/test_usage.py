"""What ``athanor top`` shows of a status."""

from __future__ import annotations

from dataclasses import replace

from appliance.operator.usage import usage
from tests.appliance.admin_server import STATUS


def test_rates_are_the_gateway_s_own() -> None:
    """Rates, and the time that the appliance has been up, come from the status, not from this machine's clock; what is
    not counted is not known, which is not zero."""
    alpha = replace(STATUS.tenants[0], output_tokens_per_s=250.0, requests_per_s=2.0)
    found = usage(replace(STATUS, tenants=(STATUS.tenants[1], alpha)))
    first, second = found.tenants
    assert (first.id, first.output_tokens_per_s, first.requests_per_s) == ("alpha", 250.0, 2.0)
    assert (second.id, second.output_tokens_per_s) == ("beta", None)
    assert found.load == STATUS.load


def test_engines_are_as_last_seen() -> None:
    """Running, waiting and the share of KV blocks in use; without a pool there is no share."""
    model = usage(STATUS).models[0]
    assert (model.running, model.waiting, model.restarts) == (3, 1, 1)
    assert model.kv_used == 24 / 1_024
    engine = replace(STATUS.models[0].engine, num_blocks=0, free_blocks=0)
    status = replace(STATUS, models=(replace(STATUS.models[0], engine=engine),))
    assert usage(status).models[0].kv_used is None


def test_the_busiest_come_first() -> None:
    """Those at work before all others; sorted by output tokens a second, then by requests in flight, then by name."""
    flights = {"c": 0, "b": 0, "a": 2, "r": 0}
    idle = replace(STATUS.tenants[0], output_tokens_per_s=0.0, requests_per_s=0.0)
    names = [replace(idle, id=name, in_flight=flight) for name, flight in flights.items()]
    rates = {"c": {"output_tokens_per_s": 100.0}, "r": {"requests_per_s": 3.0}}
    busy = [replace(tenant, **rates.get(tenant.id, {})) for tenant in names]
    assert [one.id for one in usage(replace(STATUS, tenants=tuple(busy))).tenants] == ["c", "a", "r", "b"]
