"""Every route and method asks for a scope, and refuses a credential that is limited to others, expired or revoked."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import grpc
import httpx
import pytest

from appliance.common.keys import KeyRecord, KeyTable, issue
from appliance.common.scopes import Scope
from appliance.gateway.front.auth import Auth
from appliance.gateway.grpc.servicer import GrpcFrontEnd
from appliance.gateway.http.app import ROUTES, Route
from tests.appliance.gateway.front.support import PEPPER, Running

NOW = datetime.now(UTC)
TENANT_ROUTES = [route for route in ROUTES if route.auth is Auth.TENANT]


@dataclass(frozen=True)
class Limited:
    """The served pair, with further keys of its tenant."""

    running: Running
    keys: dict[str, str]

    def headers(self, name: str) -> dict[str, str]:
        """Authorization by the key of this name."""
        return {"authorization": f"Bearer {self.keys[name]}"}


@pytest.fixture
def limited(running: Running) -> Limited:
    """One key for each scope, one for all but each, one without any, an expired and a revoked one."""
    records: dict[str, KeyRecord] = dict(running.keys.records)
    found = {}

    def add(name: str, **changes: Any) -> None:
        found[name], digest = issue(name, PEPPER)
        records[name] = KeyRecord(digest, NOW - timedelta(days=9), **changes)
        running.service.tenants[f"key:{name}"] = "acme"

    for scope in Scope:
        add(f"only-{scope}", scopes=frozenset({scope}))
        add(f"not-{scope}", scopes=frozenset(Scope) - {scope})
    add("nothing", scopes=frozenset())
    add("expired", expires=NOW - timedelta(seconds=1))
    add("revoked", revoked=True)
    add("whole")
    running.use_keys(KeyTable(PEPPER, records))
    return Limited(running, found)


def path_of(route: Route) -> str:
    """A path that the route takes."""
    path = route.path.replace("{model:path}", "athanor-mini").replace("{file_id}", f"file-{'0' * 32}")
    return path.replace("{batch_id}", f"batch_{'0' * 32}")


def test_every_route_and_method_asks_for_a_scope(running: Running) -> None:
    """A row for tenants without one would be open to every credential; public ones have none."""
    methods = running.front_ends._grpc._table
    for row in (*ROUTES, *methods.values()):
        assert (row.scope is None) == (row.auth is Auth.PUBLIC)
    assert {row.scope for row in ROUTES} == {None, *Scope}
    assert isinstance(running.front_ends._grpc, GrpcFrontEnd)


@pytest.mark.parametrize("route", TENANT_ROUTES, ids=lambda route: route.path)
async def test_a_route_refuses_what_is_out_of_scope(limited: Limited, route: Route) -> None:
    """Keys for all but its scope, and for none, get a 403 that names what they are limited to, before the body is read;
    an expired and a revoked one a 401. A key for its scope alone, and one without scopes (controls), pass."""
    assert route.scope is not None
    async with httpx.AsyncClient(base_url=limited.running.base_url) as client:

        async def ask(key: str) -> httpx.Response:
            return await client.request(route.method, path_of(route), headers=limited.headers(key), content=b"not json")

        for key in (f"not-{route.scope}", "nothing"):
            refused = await ask(key)
            assert refused.status_code == 403, key
            error = refused.json()["error"]
            assert error.get("code", "insufficient_scope") == "insufficient_scope" and route.scope in error["message"]
        for key in ("expired", "revoked"):
            assert (await ask(key)).status_code == 401, key
        for key in (f"only-{route.scope}", "whole"):
            passed = await ask(key)
            # Here nothing is kept, so what keeps is a feature that is off; its refusal comes after the scope's.
            off = passed.status_code == 403 and passed.json()["error"]["code"] != "insufficient_scope"
            assert passed.status_code in (200, 400) or (off and route.scope in (Scope.BATCHES, Scope.RESPONSES)), key
    assert limited.running.service.requests == []
    assert {
        tenant for _, error, tenant in limited.running.service.refusals if getattr(error, "refusal", "") == "scope"
    } == {"acme"}


async def test_every_method_refuses_what_is_out_of_scope(limited: Limited, channel: grpc.aio.Channel) -> None:
    """As the routes of HTTP do."""
    methods = {name: row for name, row in limited.running.front_ends._grpc._table.items() if row.auth is Auth.TENANT}
    assert len(methods) >= 8

    async def code(name: str, key: str) -> grpc.StatusCode:
        call = channel.unary_stream(name)(b"\xff", metadata=tuple(limited.headers(key).items()), timeout=5)
        try:
            async for _ in call:
                call.cancel()
        except grpc.aio.AioRpcError as error:
            return error.code()
        except asyncio.CancelledError:
            return grpc.StatusCode.OK
        return await call.code()

    for name, row in methods.items():
        for key in (f"not-{row.scope}", "nothing"):
            assert await code(name, key) is grpc.StatusCode.PERMISSION_DENIED, (name, key)
        for key in ("expired", "revoked"):
            assert await code(name, key) is grpc.StatusCode.UNAUTHENTICATED, (name, key)
        for key in (f"only-{row.scope}", "whole"):
            passed = await code(name, key)
            # Here nothing is kept, so files and batches are a feature that is off.
            off = row.scope is Scope.BATCHES and passed is grpc.StatusCode.PERMISSION_DENIED
            assert off or passed not in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED), (
                name,
                key,
            )


async def test_an_unknown_path_needs_no_scope(limited: Limited) -> None:
    """It is a 404 to any credential that holds, and a 401 to others: what exists is not told by scopes."""
    async with httpx.AsyncClient(base_url=limited.running.base_url) as client:
        answers = [await client.get("/v1/nothing", headers=limited.headers(key)) for key in ("nothing", "expired")]
    assert [answer.status_code for answer in answers] == [404, 401]
    assert json.loads(answers[0].text)["error"]["code"] == "unknown_url"
