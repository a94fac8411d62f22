"""The admin listener: one small HTTP server on loopback or on a Unix socket, for the operator alone. Operators on other
machines have its routes by ``remote_admin``."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from starlette.routing import Route

from appliance.common.operator_config import OperatorApiConfig, RemoteOperatorsConfig
from appliance.common.status import KeysStatus, ReloadOutcome
from appliance.gateway.console.routes import console_routes
from appliance.gateway.console.runbooks import runbooks_route
from appliance.gateway.sandboxes.sleep_commands import SleepCommands
from appliance.gateway.sandboxes.sleep_control import SleepControl
from appliance.gateway.telemetry.admin import AdminParts, admin_routes, loopback_app
from appliance.gateway.telemetry.operator_routes import OperatorParts, operator_routes
from appliance.gateway.telemetry.tracer import OtelTelemetry
from appliance.gateway.watch.gauges import Gauges
from appliance.gateway.watch.local_roles import LocalRoles
from appliance.gateway.watch.operator_server import ServerLimits, bind, serving
from appliance.gateway.watch.remote_admin import Observers, serving_remote_admin
from appliance.gateway.watch.state import ApplianceState

LIMITS = ServerLimits(connections=64)
"""Connections of dashboards, scrapers and commands. An answer has no deadline: a reload waits for its outcome."""


def routes_of(
    telemetry: OtelTelemetry,
    state: ApplianceState,
    gauges: Gauges,
    reload: Callable[[str], Awaitable[ReloadOutcome]],
    keys: Callable[[], KeysStatus],
    sleep: SleepControl,
) -> list[Route]:
    """Return the admin routes of a gateway."""
    commands = SleepCommands(sleep)
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
        sleep=commands.put_to_sleep,
        wake=commands.wake_up,
    )
    work = OperatorParts(
        requests=state.work.requests, cancel=state.work.cancel, drain=state.work.drain, called=telemetry.operator_call
    )
    console = console_routes(state.look, telemetry.store, state.usage, state.hosts)
    more = [*console, runbooks_route(), *operator_routes(work)]
    return admin_routes(parts, more)


@contextlib.asynccontextmanager
async def serve_admin(
    address: str,
    routes: Sequence[Route],
    observers: Observers,
    local: Callable[[], OperatorApiConfig | None],
    remote: Callable[[], RemoteOperatorsConfig | None],
) -> AsyncIterator[dict[str, str]]:
    """Serve the admin routes while the block runs, also for operators on other machines where ``remote`` gives them an
    address; ``local`` gives roles to users of this machine. Gives the addresses as URLs, or ``unix:PATH``, by ``admin``
    and ``remote_admin``.

    Raises:
        StartError: an address cannot be bound, or a certificate not be used.
    """
    bound = bind(address, "admin", LIMITS.connections, ", or --admin-port of a demo,")
    async with (
        serving(LocalRoles(loopback_app(routes), local), bound, LIMITS) as shown,
        serving_remote_admin(routes, remote, observers) as elsewhere,
    ):
        yield {"admin": shown, **elsewhere}
