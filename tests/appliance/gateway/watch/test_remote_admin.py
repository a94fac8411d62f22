"""The admin listener's routes over TLS: every route by each role, and every proof that does not hold."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography import x509
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from appliance.common.audit.entry import Entry, from_wire
from appliance.common.control import Audited
from appliance.common.operator_roles import LOCAL_ONLY, NEEDED, OperatorRole
from appliance.gateway.console.routes import console_routes
from appliance.gateway.console.runbooks import runbooks_route
from appliance.gateway.front import issuer_keys, operator_door
from appliance.gateway.front.allowance import Rate
from appliance.gateway.front.operator_access import OperatorResolver
from appliance.gateway.front.operator_rate import OperatorRates
from appliance.gateway.front.tokens import TokenVerifier
from appliance.gateway.request.audit_feed import AuditFeed
from appliance.gateway.telemetry.admin import admin_routes
from appliance.gateway.telemetry.operator_routes import operator_routes
from appliance.gateway.watch import remote_admin
from appliance.gateway.watch.remote_admin import Observers, RolesOnly, serving_remote_admin
from tests.appliance.admin_server import LIVE, FakeAppliance
from tests.appliance.gateway.console.pictures import FakeGateway
from tests.appliance.gateway.front.issuers import encoded, make_key
from tests.appliance.gateway.front.operators import SPIFFE, Elsewhere, elsewhere
from tests.appliance.gateway.front.pki import Authority

ROUTES = sorted(name for name in NEEDED if not name.startswith("/"))


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are looked at often, and an unknown key is fetched at once."""
    monkeypatch.setattr(operator_door, "TICK_S", 0.05)
    monkeypatch.setattr(issuer_keys, "UNKNOWN_S", 0.1)


@dataclass
class Listening:
    """A listener for operators elsewhere, in front of an appliance on paper."""

    url: str
    fake: FakeAppliance
    known: Elsewhere
    feed: AuditFeed
    sent: list[Entry]

    async def ask(
        self, method: str, path: str, shown: tuple[bytes, bytes] | None = None, token: str = "", **headers: str
    ) -> httpx.Response:
        """One request over a connection of its own."""
        if token:
            headers["authorization"] = f"Bearer {token}"
        async with httpx.AsyncClient(base_url=self.url, verify=self.known.context(shown), timeout=30) as client:
            return await client.request(method, path, headers=headers)

    def told(self) -> list[dict[str, Any]]:
        """The entries about operators so far."""
        self.feed.flush()
        found = [{"kind": one.kind, **one.fields} for one in self.sent]
        self.sent.clear()
        return found


def all_routes(fake: FakeAppliance) -> list[Route]:
    """Every route that a gateway's admin listener has."""
    gateway = FakeGateway()
    more = [
        *console_routes(gateway.look, gateway.traces, gateway.usage, gateway.fleet),
        runbooks_route(),
        *operator_routes(fake.operator_parts()),
    ]
    return admin_routes(fake.parts(), more)


@contextlib.asynccontextmanager
async def listening(folder: Path) -> AsyncIterator[Listening]:
    """Serve; the provider's keys are in force."""
    async with elsewhere(folder, admin="127.0.0.1:0") as known:
        sent: list[Entry] = []

        def take(message: Audited) -> bool:
            sent.extend(map(from_wire, message.entries))
            return True

        fake, feed = FakeAppliance(), AuditFeed(take)
        observers = Observers(feed, fake.telemetry)
        async with serving_remote_admin(all_routes(fake), lambda: known.section, observers) as shown:
            found = Listening(shown["remote_admin"], fake, known, feed, sent)
            await until(lambda: known.address.fetched > 0)
            async with asyncio.timeout(10):
                while (await found.ask("GET", "/status", token=known.token("viewer"))).status_code != 200:
                    await asyncio.sleep(0.05)
            found.told()
            yield found


async def until(holds: Callable[[], bool]) -> None:
    """Wait for what comes soon."""
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.02)


def path_of(route: str) -> tuple[str, str]:
    """Method and path of a request for a route of the table."""
    method, _, path = route.partition(" ")
    return method, path.replace("{wanted}", "req_none").replace("{name}", "app.js").replace("{order}", "sleep")


async def test_each_role_reaches_its_routes_alone(tmp_path: Path) -> None:
    """By certificate, every route of the listener: with the role, or one that may read, it answers; without it the
    answer is a 403 that names the role needed. Routes of this machine alone are no routes here."""
    async with listening(tmp_path) as found:
        assert {f"{method} {route.path}" for route in all_routes(found.fake) for method in route.methods or ()} == {
            *ROUTES,
            *(f"HEAD {route.removeprefix('GET ')}" for route in ROUTES if route.startswith("GET ")),
            *LOCAL_ONLY,
        }
        for role in OperatorRole:
            context = found.known.context(found.known.of_role(role))
            async with httpx.AsyncClient(base_url=found.url, verify=context, timeout=30) as client:
                for route in ROUTES:
                    answer = await client.request(*path_of(route))
                    if NEEDED[route] in (role, OperatorRole.VIEWER):
                        assert answer.status_code not in (401, 403), (role, route)
                        continue
                    error = answer.json()["error"]
                    assert (answer.status_code, error["code"], error["role"]) == (403, "role_needed", NEEDED[route])
                    assert f"needs the role {NEEDED[route]}" in error["message"]
                for method, path in (("POST", "/operator/calls"), ("GET", "/nothing"), ("DELETE", "/status")):
                    assert (await client.request(method, path)).status_code in (404, 405)
        assert found.fake.reloads == 1 and not found.fake.called
        assert found.fake.asked == [f"operator {SPIFFE}security"]


async def test_tokens_have_the_roles_of_their_claim(tmp_path: Path) -> None:
    """Each group gives its role; several add up; with a certificate beside it a role counts that both have."""
    async with listening(tmp_path) as found:
        known = found.known
        assert (await found.ask("POST", "/drain", token=known.token("operator"))).status_code == 200
        refused = await found.ask("POST", "/reload", token=known.token("operator"))
        assert (refused.status_code, refused.json()["error"]["role"]) == (403, "security")
        both = known.token("operator", "security")
        assert [(await found.ask("POST", path, token=both)).status_code for path in ("/resume", "/reload")] == [
            200,
            200,
        ]
        for shown, status in ((known.of_role("viewer"), 403), (known.of_role("operator"), 200)):
            assert (await found.ask("POST", "/resume", shown, both)).status_code == status
        nameless = known.shown()
        assert (await found.ask("POST", "/resume", nameless, both)).status_code == 200
        assert (await found.ask("GET", "/status", nameless)).status_code == 401
        nobody = await found.ask("GET", "/status", token=known.token("visitor"))
        assert (nobody.status_code, nobody.json()["error"]["role"]) == (403, "viewer")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        pytest.param({"iss": "https://other.example/"}, "jwt_issuer", id="issuer"),
        pytest.param({"aud": "another"}, "jwt_audience", id="audience"),
        pytest.param({"exp": 1_000_000_000}, "jwt_expired", id="expired"),
        pytest.param({"nbf": 4_000_000_000}, "jwt_early", id="early"),
        pytest.param({"sub": None}, "jwt_claims", id="nobody"),
    ],
)
async def test_claims_that_do_not_hold_are_refused(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    """With a 401 that does not say why; the audit log does. Control: the same claims without the change."""
    async with listening(tmp_path) as found:
        refused = await found.ask("POST", "/drain", token=found.known.token("operator", **changes))
        assert refused.status_code == 401 and reason not in refused.text and not found.fake.draining
        assert refused.headers["connection"] == "close"  # the next attempt costs a handshake, which has a rate
        assert [(one["kind"], one["reason"]) for one in found.told()] == [("refused", reason)]
        assert (await found.ask("POST", "/drain", token=found.known.token("operator"))).status_code == 200


async def test_signatures_that_do_not_hold_are_refused(tmp_path: Path) -> None:
    """An unknown key id, another's key under a known id, no algorithm, no credential, two, and one of another scheme. A
    key that the provider publishes anew is taken without a restart."""
    async with listening(tmp_path) as found:
        known = found.known
        known.provider.add("next")
        theirs = known.provider.keys["next"]
        head, body, signature = known.token("operator").split(".")
        unsigned = encoded(b'{"alg":"none","kid":"first"}') + f".{body}."
        forged = f"{head}.{body}.{known.token('operator', kid='next').split('.')[2]}"
        tokens = {"jwt_key": known.token("operator", kid="next"), "jwt_signature": forged}
        tokens |= {"jwt_malformed": unsigned, "jwt_algorithm": f"{unsigned}e"}
        for reason, token in tokens.items():
            assert (await found.ask("POST", "/drain", token=token)).status_code == 401
            assert [one["reason"] for one in found.told()] == [reason]
        for value in (f"Basic {head}", "Bearer", f"Bearer {head}.{body}.{signature} x"):
            assert (await found.ask("POST", "/drain", authorization=value)).status_code == 401
        assert (await found.ask("POST", "/drain")).status_code == 401 and not found.fake.draining
        known.address.publish(known.provider.published())
        token, fetched = known.token("operator", kid="next"), known.address.fetched
        await found.ask("GET", "/status", token=token)
        await until(lambda: known.address.fetched > fetched)
        await asyncio.sleep(0.1)
        assert (await found.ask("POST", "/drain", token=token)).status_code == 200
        del known.provider.keys["first"]
        known.provider.keys["next"] = theirs[0], make_key(theirs[0])
        assert (await found.ask("POST", "/drain", token=known.token("operator", kid="next"))).status_code == 401


async def test_certificates_that_name_nobody_are_refused(tmp_path: Path) -> None:
    """Two ids, an id that is no SPIFFE id, a name that is not listed, and one of another authority. Another kind of
    name counts where it is listed and the certificate has one alone."""
    uri, dns = x509.UniformResourceIdentifier, x509.DNSName
    async with listening(tmp_path) as found:
        known = found.known
        for names in ((uri(f"{SPIFFE}operator"), uri(f"{SPIFFE}viewer")), (uri("https://a/b"),), (dns("a"), dns("b"))):
            assert (await found.ask("GET", "/status", known.shown(*names))).status_code == 401
        ops = known.shown(dns("ops.corp.example"))
        unlisted = await found.ask("GET", "/status", ops)
        assert (unlisted.status_code, unlisted.json()["error"]["role"]) == (403, "viewer")
        known.section = known.section.model_copy(update={"operators": ("dns:ops.corp.example",)})
        assert (await found.ask("POST", "/drain", ops)).status_code == 200
        assert (await found.ask("POST", "/drain", known.of_role("operator"))).status_code == 403
        stranger = known.shown(uri(f"{SPIFFE}viewer"), authority=Authority.create("another"))
        with pytest.raises((httpx.TransportError, ssl.SSLError)):
            await found.ask("GET", "/status", stranger)


async def test_an_authority_that_is_taken_back_opens_nothing_any_more(tmp_path: Path) -> None:
    """Within a look at the files: a new connection does not come to be, and one that was open is closed. A certificate
    of the authority in its place (control) is served."""
    async with listening(tmp_path) as found:
        known, shown = found.known, found.known.of_role("viewer")
        async with httpx.AsyncClient(base_url=found.url, verify=known.context(shown), timeout=30) as open_one:
            assert (await open_one.get("/status")).status_code == 200
            other = Authority.create("the next authority")
            known.trust(other)
            await asyncio.sleep(0.4)
            with pytest.raises((httpx.TransportError, ssl.SSLError)):
                await open_one.get("/status")
        theirs = known.shown(x509.UniformResourceIdentifier(f"{SPIFFE}viewer"), authority=other)
        assert (await found.ask("GET", "/status", theirs)).status_code == 200


async def test_the_audit_log_has_who_changed_what(tmp_path: Path) -> None:
    """Before it begins and when it has ended, with the request's id; refusals by role too; reading has no entry. While
    the log takes nothing, nothing is changed, and reading goes on."""
    async with listening(tmp_path) as found:
        known = found.known
        done = await found.ask("POST", f"/requests/{LIVE.id}/cancel", known.of_role("operator"))
        late = await found.ask("POST", "/drain", token=known.token("viewer", sub="bob"))
        await found.ask("GET", "/status", token=known.token("viewer"))
        cancel = {"kind": "admin", "route": "POST /requests/{wanted}/cancel", "subject": LIVE.id}
        cancel |= {"caller": f"{SPIFFE}operator", "roles": "operator,viewer", "request": done.headers["x-request-id"]}
        drain = {"kind": "admin", "route": "POST /drain", "subject": "", "caller": "oidc:corp:bob", "roles": "viewer"}
        drain |= {"request": late.headers["x-request-id"], "outcome": "PERMISSION_DENIED"}
        assert found.told() == [{**cancel, "outcome": "BEGUN"}, {**cancel, "outcome": "OK"}, drain]
        found.feed.problem = "no space left on device"
        halted = await found.ask("POST", "/drain", known.of_role("operator"))
        assert halted.status_code == 503 and "no space left" in halted.json()["error"]["message"]
        assert not found.fake.draining
        assert (await found.ask("GET", "/drain", known.of_role("operator"))).status_code == 200
        text = found.fake.telemetry.metrics.render(False)[1].decode()
        counted = [line for line in text.splitlines() if "POST /drain" in line and "operator_calls_total{" in line]
        assert len(counted) == 2 and all(line.endswith(" 1.0") for line in counted)


async def test_a_flood_without_a_role_is_counted_and_hides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is known and has no role pays a handshake for each request; the first are in the audit log one by one,
    the others as a number. What an operator tries who has another role is there with its name all the same."""
    monkeypatch.setattr(remote_admin, "REFUSED", Rate(2, 0.001))
    async with listening(tmp_path) as found:
        known = found.known
        visitor = known.shown(x509.UniformResourceIdentifier(f"{SPIFFE}visitor"))
        for _ in range(5):
            assert (await found.ask("GET", "/status", visitor)).headers["connection"] == "close"
        assert "connection" not in (await found.ask("POST", "/reload", known.of_role("viewer"))).headers
        told = found.told()
        listed = [(one["caller"], one["route"]) for one in told if one["kind"] == "admin"]
        assert listed == [*[(f"{SPIFFE}visitor", "GET /status")] * 2, (f"{SPIFFE}viewer", "POST /reload")]
        counted = [(one["outcome"], one["reason"], one["count"]) for one in told if one["kind"] == "refused"]
        assert counted == [("PERMISSION_DENIED", "scope", 3)]


async def test_a_viewer_that_asks_without_pause_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over one connection: the requests beyond the burst are answered 429 with the time, and reach no route; metrics
    count them and the audit log does not list them. Another operator (control) is served meanwhile."""
    monkeypatch.setattr(remote_admin, "OperatorRates", lambda: OperatorRates(Rate(5, 0.001)))
    async with listening(tmp_path) as found:
        context = found.known.context(found.known.of_role("viewer"))
        async with httpx.AsyncClient(base_url=found.url, verify=context, timeout=30) as client:
            answers = [await client.get("/status") for _ in range(8)]
        assert [one.status_code for one in answers] == [200] * 5 + [429] * 3
        assert int(answers[-1].headers["retry-after"]) > 0
        assert (await found.ask("GET", "/status", found.known.of_role("operator"))).status_code == 200
        assert found.told() == []


async def test_pages_of_other_origins_are_refused(tmp_path: Path) -> None:
    """A browser that has an operator's certificate would show it for any page."""
    async with listening(tmp_path) as found:
        shown = found.known.of_role("operator")
        for headers in ({"origin": "https://evil.example"}, {"sec-fetch-site": "cross-site"}):
            assert (await found.ask("POST", "/drain", shown, **headers)).status_code == 403
            assert (await found.ask("GET", "/status", shown, **headers)).status_code == 403
        assert not found.fake.draining
        assert (await found.ask("GET", "/status", shown, **{"sec-fetch-site": "same-origin"})).status_code == 200


def test_a_route_without_a_role_is_an_error_of_the_start() -> None:
    """Nobody can add one and leave it open. Control: the routes as they are."""

    async def answer(_: Request) -> Response:
        return Response()

    fake = FakeAppliance()
    resolver = OperatorResolver(TokenVerifier(()), lambda: None)
    observers = Observers(AuditFeed(lambda _: True), fake.telemetry)
    RolesOnly(all_routes(fake), resolver, observers)
    with pytest.raises(KeyError, match="GET /new"):
        RolesOnly([*all_routes(fake), Route("/new", answer)], resolver, observers)


async def test_a_listener_whose_work_dies_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at the certificates that fails with a defect ends no listener in silence: the gateway is told why. While
    it looks without one (control) it is told nothing."""
    why: list[str] = []
    monkeypatch.setattr(operator_door, "TICK_S", 0.02)
    async with elsewhere(tmp_path, admin="127.0.0.1:0") as known:
        fake = FakeAppliance()
        observers = Observers(AuditFeed(lambda _: True), fake.telemetry, why.append)
        async with serving_remote_admin(all_routes(fake), lambda: known.section, observers):
            await asyncio.sleep(0.1)
            assert why == []

            async def renew(_door: operator_door.OperatorDoor) -> None:
                raise ValueError("a defect")

            monkeypatch.setattr(operator_door.OperatorDoor, "renew", renew)
            await until(lambda: why != [])
    assert why == ["listener of operators elsewhere failed: ValueError('a defect')"]
