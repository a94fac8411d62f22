"""Routes of the operator's API: the route decides what is done, not the text of the request's URL."""

from __future__ import annotations

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from appliance.common.live_requests import DrainStatus, LiveRequests
from appliance.common.operator_calls import OperatorCall
from appliance.gateway.telemetry.operator_routes import OperatorParts, operator_routes


@pytest.mark.parametrize("prefix", ["", "/behind"])
async def test_a_drain_is_ordered_by_its_route(prefix: str) -> None:
    """Drain and resume mean the same where the routes are served under a prefix; a GET orders nothing."""
    orders: list[bool | None] = []

    def drain(draining: bool | None) -> DrainStatus:
        orders.append(draining)
        return DrainStatus(draining=bool(draining), running=0)

    def unused(_asked: str) -> LiveRequests:
        raise AssertionError("a drain asks for nothing else")

    calls: list[OperatorCall] = []
    parts = OperatorParts(requests=unused, cancel=unused, drain=drain, called=calls.append)
    routes = operator_routes(parts)
    app = Starlette(routes=[Mount(prefix, routes=routes)] if prefix else routes)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://admin") as client:
        for method, path in (("POST", "/drain"), ("POST", "/resume"), ("GET", "/drain")):
            assert (await client.request(method, prefix + path)).status_code == 200
    assert orders == [True, False, None] and not calls
