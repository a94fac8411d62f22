"""Routes whose first model sleeps: the fallback serves while it cannot be woken."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from appliance.common.control import Control
from appliance.common.control_models import ModelRest, WakeModel
from appliance.common.errors import ApplianceError
from appliance.common.sleep_rules import MOST_WAKES_OF_TENANT
from appliance.gateway.sandboxes.sleep_control import FAILED_S, TENANT_WAITING, SleepControl
from appliance.gateway.sandboxes.sleep_decisions import SleepDecisions
from tests.appliance.gateway.request.test_routing import BY_ALIAS, CALL, House, request, served


@pytest.fixture
async def house() -> AsyncIterator[House]:
    """Models of which none is there."""
    made = House()
    made.telemetry.metrics.know(models=made.models)
    yield made
    made.close()


async def test_the_fallback_serves_while_a_model_sleeps_and_cannot_be_woken(house: House) -> None:
    """A sleeping model that can be woken is chosen (the control). Without a supervisor, woken too often, after a wake
    that failed just now and without memory it is not; one that waits for memory is as good as busy, and half a minute
    after the failure it is tried again."""
    model, now, attached = house.models["mini"], [1_000.0], [True]
    control = SleepControl(
        SleepDecisions(house.models, lambda: attached[0], clock=lambda: now[0]), lambda _: None, lambda _: 0
    )
    house.service.routing.asleep = control.route_state
    free = [8 << 30]
    control.decisions.available = lambda: free[0]
    for name, one in house.models.items():
        control.take(ModelRest(name, "asleep", "", 1 << 30, 0, "while_used", 60_000))
        assert one.sleep_state.asleep
    house.boot("next")
    control.take(ModelRest("next", "awake", "", 1 << 30, 0, "while_used", 60_000))

    def chosen() -> str:
        return house.service.routed(BY_ALIAS, request()).model

    assert chosen() == "mini"
    attached[0] = False
    assert chosen() == "next"
    attached[0] = True
    assert chosen() == "mini"
    for _ in range(MOST_WAKES_OF_TENANT):
        control.decisions.guard.note("other", "by-alias", now[0])
    assert chosen() == "next"
    now[0] += 60
    assert chosen() == "mini"
    model.sleep_state.fall_asleep("its engine did not start", now[0])
    assert chosen() == "next"
    now[0] += FAILED_S
    assert chosen() == "mini"
    free[0] = 1 << 20
    control.decisions.live = lambda: {house.models["next"]: 1}
    assert chosen() == "next", "it waits for the memory of the model in use"
    house.models["next"].sleep_state.keep = "always"
    assert chosen() == "next", "there is no memory for it"
    free[0] = 8 << 30
    model.sleep_state.waiting["by-alias"] = TENANT_WAITING
    assert chosen() == "next"


async def test_a_tenant_that_may_not_wake_a_model_gets_the_fallback(house: House) -> None:
    """The first model sleeps and can be woken: one that may (the control) gets it, one that may not the next."""
    control = SleepControl(
        SleepDecisions(house.models, lambda: True, available=lambda: 8 << 30), lambda _: None, lambda _: 0
    )
    house.service.routing.asleep = control.route_state
    control.take(ModelRest("mini", "asleep", "", 1 << 30, 0, "while_used", 60_000))
    house.boot("next")
    assert house.service.routed(BY_ALIAS, request()).model == "mini"
    house.reload('"half"]}', '"half"], features: {wake: false}}')
    assert house.service.routed(BY_ALIAS, request()).model == "next"


PASSES_OVER = "fall_back_when: [unready, busy, asleep]}"


async def test_a_route_that_passes_sleeping_models_over_wakes_them_behind_a_request(house: House) -> None:
    """The fallback answers at once and the sleeping model is told to wake, once and after the policy has allowed a
    request: not for one that the policy refuses. While it wakes the fallback goes on serving; awake, it is chosen."""
    told: list[Control] = []
    control = SleepControl(
        SleepDecisions(house.models, lambda: True, available=lambda: 8 << 30), told.append, lambda _: 0
    )
    house.service.routing.asleep, house.service.dependencies.sleep = control.route_state, control
    for name in house.models:
        control.take(ModelRest(name, "asleep", "", 1 << 30, 0, "while_used", 60_000))
    house.boot("next")
    control.take(ModelRest("next", "awake", "", 1 << 30, 0, "while_used", 60_000))
    house.reload("fall_back_when: [unready, busy]}", PASSES_OVER)
    assert house.service.routed(BY_ALIAS, request()).passed_over == "mini"
    refused = replace(house.service.routed(BY_ALIAS, request()), max_tokens=1 << 20)
    with pytest.raises(ApplianceError, match="output tokens were asked for"):
        await anext(house.service.generate(BY_ALIAS, refused, CALL))
    assert told == [] and control.decisions.uses.of("next") == 0
    await served(house, "next", BY_ALIAS, house.service.routed(BY_ALIAS, request()))
    assert [control.decisions.uses.of(name) for name in ("next", "mini")] == [pytest.approx(1.0), 0]
    assert told == [WakeModel("mini", "request", "by-alias")]
    assert house.models["mini"].sleep_state.waking
    await served(house, "next", BY_ALIAS, house.service.routed(BY_ALIAS, request()))
    assert len(told) == 1
    assert house.choices()["fast", "next", "asleep"] >= 2
    house.boot("mini")
    control.take(ModelRest("mini", "awake", "", 1 << 30, 0, "while_used", 60_000))
    assert house.service.routed(BY_ALIAS, request()).model == "mini"


async def test_no_model_sleeps_and_nothing_wakes_for_who_may_not(house: House) -> None:
    """Without memory for both no model is ended for the one that is passed over; a tenant without the feature gets the
    fallback by the older condition, and wakes nothing. Where nothing else is there (control) the model is chosen."""
    told: list[Control] = []
    free = [1 << 20]
    control = SleepControl(
        SleepDecisions(house.models, lambda: True, available=lambda: free[0]), told.append, lambda _: 0
    )
    house.service.routing.asleep, house.service.dependencies.sleep = control.route_state, control
    control.take(ModelRest("mini", "asleep", "", 1 << 30, 0, "while_used", 60_000))
    house.reload("fall_back_when: [unready, busy]}", PASSES_OVER)
    house.boot("next")
    control.take(ModelRest("next", "awake", "", 1 << 30, 0, "while_used", 60_000))
    await served(house, "next", BY_ALIAS, house.service.routed(BY_ALIAS, request()))
    assert told == []
    free[0] = 8 << 30
    house.reload('"half"]}', '"half"], features: {wake: false}}')
    assert house.service.routed(BY_ALIAS, request()).model == "next"
    control.wake_behind("mini", "by-alias")
    assert [type(one) for one in told] == [WakeModel], "the control itself would"
