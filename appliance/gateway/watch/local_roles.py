"""Roles of callers on this machine at the admin listener: what shows end users needs one here too.

Every other route is open to who can reach the listener. Users are known at a Unix socket alone; over an address nobody
is, and so nobody has a role.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog
from starlette.types import ASGIApp, Receive, Scope, Send

from appliance.common.account_roles import Caller, Roles
from appliance.common.errors import ConfigError
from appliance.common.operator_config import OperatorApiConfig
from appliance.common.operator_roles import OperatorRole
from appliance.gateway.console.headers import ROLES
from appliance.gateway.watch.operator_server import CALLER

log = structlog.get_logger()


class LocalRoles:
    """ASGI application that tells the routes below it which roles a caller of this machine has, when they ask."""

    def __init__(self, app: ASGIApp, config: Callable[[], OperatorApiConfig | None]) -> None:
        """``config`` gives the section ``operator_api`` in force; without one, root and this process's user have every
        role and nobody else has any."""
        self._app = app
        self._config = config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "http":
            state = scope.setdefault("state", {})
            state[ROLES] = lambda: self._roles(state.get(CALLER))
        await self._app(scope, receive, send)

    def _roles(self, caller: Caller | None) -> frozenset[OperatorRole]:
        if caller is None:
            return frozenset()
        try:
            roles = Roles.of(self._config() or OperatorApiConfig())
        except ConfigError as error:
            log.error("nobody but root has a role at the admin listener", problem=error.message)
            roles = Roles.of(OperatorApiConfig())
        return roles.of_caller(caller)
