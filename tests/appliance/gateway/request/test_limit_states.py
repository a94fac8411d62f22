"""Limits as a tenant sees them: what is left follows what it uses, in every limit that the policy sets."""

from __future__ import annotations

import pytest

from appliance.common.errors import PermissionDeniedError, RateLimitedError, UnauthenticatedError
from appliance.gateway.request.ledger import Ledger
from appliance.gateway.request.spend import Spends
from appliance.gateway.tenant_account import LimitState, LimitUnit, TenantLimits
from policy.loader import Source, load_policy

POLICY = """
version: 1
tenants:
  alpha:
    credentials: ["key:a"]
    models: ["*"]
    limits:
      requests_per_minute: {rate: 60, burst: 90}
      tokens_per_minute: 6000
      output_tokens_per_minute: {rate: 1200, exceeded: queue}
      concurrency: 4
      spend_per_day: 10
      max_context_tokens: 4096
      max_output_tokens: 1024
  beta: {credentials: ["key:b"], models: ["*"]}
prices:
  currency: EUR
  rules:
    - {models: ["*"], input: 1000, output: 2000}
"""


KV_POLICY = """
version: 1
tenants:
  alpha: {credentials: ["key:a"], models: ["*"], limits: {kv_tokens: 200}}
"""


class Clock:
    """Seconds that the test sets."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


def opened(clock: Clock) -> Ledger:
    """A ledger under the policy."""
    policy = load_policy((Source("policy.yaml", POLICY),))
    return Ledger(policy, {"alpha": b"a" * 32, "beta": b"b" * 32}, clock, Spends(clock))


def row(found: TenantLimits, name: str) -> LimitState:
    """The limit of this name."""
    return next(one for one in found.limits if one.name == name)


def test_an_unused_account_is_full() -> None:
    """Each limit that the policy sets is there with its burst, its treatment and all of it left; no other is."""
    found = opened(Clock()).limits_now("alpha")
    assert [one.name for one in found.limits] == [
        "requests_per_minute",
        "tokens_per_minute",
        "output_tokens_per_minute",
        "concurrency",
        "spend_per_day",
    ]
    assert row(found, "requests_per_minute") == LimitState(
        "requests_per_minute", LimitUnit.REQUESTS, 60, 90, 90, 0.0, "refuse"
    )
    assert row(found, "output_tokens_per_minute").exceeded == "queue"
    assert row(found, "spend_per_day").left == row(found, "spend_per_day").most == 10 * 10**9
    assert (found.running, found.waiting, found.currency) == (0, 0, "EUR")
    assert (found.max_context_tokens, found.max_output_tokens) == (4_096, 1_024)


def test_what_a_request_takes_is_missing_until_it_is_settled() -> None:
    """Reserved tokens, slots and costs are gone at once; what was not used comes back, and time brings the rest."""
    clock = Clock()
    ledger = opened(clock)
    reservation = ledger.admit("alpha", "m", 200, 2)
    reservation.reserve(100, 200, 4_000)
    found = ledger.limits_now("alpha")
    assert row(found, "requests_per_minute").left == 89
    assert row(found, "requests_per_minute").full_in_s == pytest.approx(1.0)
    assert row(found, "tokens_per_minute").left == 6_000 - 100 - 2 * 200
    assert row(found, "output_tokens_per_minute").left == 1_200 - 2 * 200
    assert (row(found, "concurrency").left, row(found, "concurrency").full_in_s, found.running) == (2, None, 2)
    reserved = 10 * 10**9 - row(found, "spend_per_day").left
    assert reserved == (100 * 1_000 + 400 * 2_000) * 1_000
    reservation.settle(100, 30)
    found = ledger.limits_now("alpha")
    assert row(found, "tokens_per_minute").left == 6_000 - 130
    assert row(found, "concurrency").left == 4
    assert 10 * 10**9 - row(found, "spend_per_day").left == (100 * 1_000 + 30 * 2_000) * 1_000
    clock.now += 60.0
    assert row(ledger.limits_now("alpha"), "tokens_per_minute").left == 6_000


def test_a_tenant_sees_itself_alone() -> None:
    """What one uses changes nothing that another sees; who is no tenant sees nothing."""
    ledger = opened(Clock())
    before = ledger.limits_now("beta")
    ledger.admit("alpha", "m", 200, 2).reserve(100, 200, 4_000)
    assert ledger.limits_now("beta") == before
    with pytest.raises(UnauthenticatedError):
        ledger.limits_now("gamma")


def test_kv_tokens_are_held_from_the_count_to_the_end() -> None:
    """What is left of ``kv_tokens`` is less by prompt and grant from the second decision until the request settles,
    whatever it used; a second request that does not fit is refused for now, and fits once the first has ended."""
    policy = load_policy((Source("policy.yaml", KV_POLICY),))
    ledger = Ledger(policy, {"alpha": b"a" * 32}, Clock())
    first, second = (ledger.admit("alpha", "m", 40, 2) for _ in range(2))
    assert row(ledger.limits_now("alpha"), "kv_tokens").left == 200
    first.reserve(60, 40, 1_000)
    state = row(ledger.limits_now("alpha"), "kv_tokens")
    assert (state.left, state.most, state.unit, state.full_in_s, state.exceeded) == (
        200 - 60 - 2 * 40,
        200,
        LimitUnit.TOKENS,
        None,
        "refuse",
    )
    with pytest.raises(RateLimitedError) as refused:
        second.reserve(60, 40, 1_000)
    assert refused.value.rule == "tenants.alpha.limits.kv_tokens"
    told = {"rule": "limits.kv_tokens", "policy": ledger.policy.digest}
    assert refused.value.details == {"limit": "200", "actual": "280", **told}
    first.settle(60, 1)
    second.reserve(60, 40, 1_000)
    second.settle(60, 1)
    assert row(ledger.limits_now("alpha"), "kv_tokens").left == 200


def test_a_ledger_knows_the_region_of_its_appliance() -> None:
    """A tenant with regions is admitted where the appliance is in one of them; elsewhere, and where the appliance has
    none, the denial names both."""
    policy = load_policy((Source("policy.yaml", KV_POLICY.replace("limits: {kv_tokens: 200}", "regions: [eu, us]")),))
    keys = {"alpha": b"a" * 32}
    assert Ledger(policy, keys, Clock(), region="us").admit("alpha", "m", 1).decision.allowed
    for region, name in (("asia", "asia"), ("", "no region")):
        with pytest.raises(PermissionDeniedError) as refused:
            Ledger(policy, keys, Clock(), region=region).admit("alpha", "m", 1)
        assert refused.value.rule == "tenants.alpha.regions"
        assert refused.value.message == f"this tenant is served in eu and us, and this appliance is in {name}"


def test_a_model_may_have_regions_of_its_own() -> None:
    """A tenant whose model has regions is admitted there; elsewhere the denial names the entry, and another model is
    served."""
    terms = 'model_regions: [{models: ["m"], regions: [eu]}]'
    policy = load_policy((Source("policy.yaml", KV_POLICY.replace("limits: {kv_tokens: 200}", terms)),))
    keys = {"alpha": b"a" * 32}
    assert Ledger(policy, keys, Clock(), region="eu").admit("alpha", "m", 1).decision.allowed
    with pytest.raises(PermissionDeniedError) as refused:
        Ledger(policy, keys, Clock(), region="us").admit("alpha", "m", 1)
    assert refused.value.rule == "tenants.alpha.model_regions[0]"
    assert refused.value.message == "this model is served to this tenant in eu, and this appliance is in us"
