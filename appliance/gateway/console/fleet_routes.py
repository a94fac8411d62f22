"""Route of the console's page of the fleet on the admin listener.

==============================  ===========================================================
GET  /console/fleet             ``FleetLook``
==============================  ===========================================================
"""

from __future__ import annotations

from typing import Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from appliance.common.json_codec import encode
from appliance.gateway.console.fleet_look import FleetLook
from appliance.gateway.console.headers import HEADERS, foreign, problem


class FleetSource(Protocol):
    """Answers the page of the fleet."""

    async def look(self, page: str) -> FleetLook:
        """Return what the page shows."""
        ...


def fleet_routes(fleet: FleetSource, page: str) -> list[Route]:
    """Return the route; ``page`` is the digest of the console's files."""

    async def look(request: Request) -> Response:
        if foreign(request):
            return problem(403, "the console answers its own page only")
        return JSONResponse(encode(await fleet.look(page)), headers={**HEADERS, "cache-control": "no-store"})

    return [Route("/console/fleet", look)]
