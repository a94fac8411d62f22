"""The admin listener: one small HTTP server on loopback or on a Unix socket, for the operator alone."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from appliance.common.status import KeysStatus, ReloadOutcome
from appliance.gateway.console.routes import console_routes
from appliance.gateway.console.runbooks import runbooks_route
from appliance.gateway.sandboxes.sleep_control import SleepControl
from appliance.gateway.telemetry.admin import AdminParts, admin_app
from appliance.gateway.telemetry.operator_routes import OperatorParts, operator_routes
from appliance.gateway.telemetry.tracer import OtelTelemetry
from appliance.gateway.watch.gauges import Gauges
from appliance.gateway.watch.operator_server import ServerLimits, bind, serving
from appliance.gateway.watch.state import ApplianceState

LIMITS = ServerLimits(connections=64)
"""Connections of dashboards, scrapers and commands. An answer has no deadline: a reload waits for its outcome."""


@contextlib.asynccontextmanager
async def serve_admin(
    address: str,
    telemetry: OtelTelemetry,
    state: ApplianceState,
    gauges: Gauges,
    reload: Callable[[str], Awaitable[ReloadOutcome]],
    keys: Callable[[], KeysStatus],
    sleep: SleepControl,
) -> AsyncIterator[str]:
    """Serve the admin routes while the block runs; gives the address as a URL, or ``unix:PATH``.

    Raises:
        StartError: the address cannot be bound.
    """
    bound = bind(address, "admin", LIMITS.connections, ", or --admin-port of a demo,")
    parts = AdminParts(
        traces=telemetry.store,
        metrics=telemetry.metrics.render,
        refresh=gauges.refresh,
        status=state.status,
        tenants=telemetry.metrics.tenants,
        keys=keys,
        ready=state.readiness,
        reload=reload,
        shadow=state.shadow,
        sleep=sleep.put_to_sleep,
        wake=sleep.wake_up,
    )
    work = OperatorParts(
        requests=state.work.requests, cancel=state.work.cancel, drain=state.work.drain, called=telemetry.operator_call
    )
    routes = [*console_routes(state.look, telemetry.store), runbooks_route(), *operator_routes(work)]
    app = admin_app(parts, routes)
    async with serving(app, bound, LIMITS) as shown:
        yield shown
