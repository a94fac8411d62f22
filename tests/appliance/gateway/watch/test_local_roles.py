"""Roles of callers on this machine: end users are shown to those with the role, on the Unix socket alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from appliance.common.account_roles import Caller
from appliance.common.operator_config import OperatorApiConfig
from appliance.gateway.console.usage_routes import usage_routes
from appliance.gateway.telemetry.admin import loopback_app
from appliance.gateway.watch import operator_server
from appliance.gateway.watch.local_roles import LocalRoles
from appliance.gateway.watch.operator_server import ServerLimits, bind, serving
from tests.appliance.gateway.console.usage_pictures import FakeUsage

USERS, MODELS = "/console/usage/users?tenant=a", "/console/usage/models?tenant=a"
STRANGER = Caller(40_001, frozenset({40_002}))


def app(config: OperatorApiConfig | None) -> LocalRoles:
    """The routes of usage, with this section in force."""
    return LocalRoles(loopback_app(usage_routes(FakeUsage(), "p")), lambda: config)


async def statuses(address: str, config: OperatorApiConfig | None) -> tuple[int, int]:
    """Answers for end users and for models over a real socket."""
    bound = bind(address, "admin", 4)
    async with serving(app(config), bound, ServerLimits(connections=4)) as shown:
        unix = shown.startswith("unix:")
        transport = httpx.AsyncHTTPTransport(uds=shown.removeprefix("unix:") if unix else None)
        url = "http://localhost" if unix else shown
        async with httpx.AsyncClient(base_url=url, transport=transport) as client:
            users, models = [await client.get(path) for path in (USERS, MODELS)]
    if users.status_code == 403:
        assert "needs the role security" in users.json()["error"]["message"]
    return users.status_code, models.status_code


@pytest.mark.parametrize(
    ("config", "status"),
    [
        pytest.param(None, 403, id="no-section"),
        pytest.param({"viewers": ("40001",), "operators": ("@40002",)}, 403, id="another-role"),
        pytest.param({"security": ("40001",)}, 200, id="user"),
        pytest.param({"security": ("@40002",)}, 200, id="group"),
        pytest.param({"security": ("40002", "@40001")}, 403, id="another-account"),
        pytest.param({"security": ("40001", "no-such-user")}, 403, id="unknown-name"),
    ],
)
async def test_a_user_of_the_socket_needs_the_role(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any] | None, status: int
) -> None:
    """Somebody who can open the socket sees models, and end users with the role alone."""
    monkeypatch.setattr(operator_server, "caller_of", lambda _sock: STRANGER)
    section = None if config is None else OperatorApiConfig(**config)
    assert await statuses(f"unix:{tmp_path}/s", section) == (status, 200)


async def test_the_owner_has_the_role_and_an_address_has_none(tmp_path: Path) -> None:
    """By the kernel's word this process's user is at the other end of the socket; over an address nobody is known."""
    assert await statuses(f"unix:{tmp_path}/s", None) == (200, 200)
    listed = OperatorApiConfig(security=(str(os.geteuid()),))
    assert await statuses("127.0.0.1:0", listed) == (403, 200)
