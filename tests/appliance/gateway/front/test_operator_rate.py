"""How often an operator may call."""

from __future__ import annotations

import pytest

from appliance.common.errors import RateLimitedError
from appliance.gateway.front.allowance import Rate
from appliance.gateway.front.operator_rate import OperatorRates


def test_each_operator_has_a_rate_for_looking_and_one_for_changing() -> None:
    """After the burst a call is refused, with the time after which one is taken. Another operator's calls, and this
    one's that change something (controls), are taken meanwhile."""
    now = [100.0]
    rates = OperatorRates(Rate(burst=3, per_s=2), lambda: now[0])
    for _ in range(3):
        rates.spend("viewer", changes=False)
    with pytest.raises(RateLimitedError) as refused:
        rates.spend("viewer", changes=False)
    assert refused.value.retry_after_s == pytest.approx(0.5)
    rates.spend("another", changes=False)
    rates.spend("viewer", changes=True)
    now[0] += 0.5
    rates.spend("viewer", changes=False)
    with pytest.raises(RateLimitedError):
        rates.spend("viewer", changes=False)
