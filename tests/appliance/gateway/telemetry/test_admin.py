"""The admin listener over real sockets: routes, and who may not use them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from starlette.requests import Request

from appliance.common.json_codec import decode
from appliance.common.status import ApplianceStatus, ReloadOutcome
from appliance.gateway.telemetry.loopback import is_loopback
from appliance.gateway.telemetry.scrape import asks_for_openmetrics
from appliance.gateway.telemetry.store import StoredTrace, TraceList
from tests.appliance.admin_server import FakeAppliance, serve_admin
from tests.appliance.gateway.telemetry import samples


@pytest.fixture(scope="module")
def appliance() -> Iterator[FakeAppliance]:
    """A running admin listener on loopback."""
    fake = FakeAppliance()
    with serve_admin(fake):
        yield fake


@pytest.fixture(autouse=True)
def _fresh(appliance: FakeAppliance) -> None:
    """Each test begins with the sample traces and a healthy appliance."""
    appliance.reset()


def test_metrics_are_prometheus_text(appliance: FakeAppliance) -> None:
    """GET /metrics answers with the scrape and its content type."""
    answer = httpx.get(f"{appliance.url}/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert b"athanor_policy_reloads_total" in answer.content


@pytest.mark.parametrize(
    ("accept", "taken"),
    [
        ("application/openmetrics-text; version=1.0.0;q=0.5, text/plain;q=0.3", True),
        ("Application/OpenMetrics-Text", True),
        ("application/openmetrics-text;q=0, text/plain", False),
        ("text/plain, application/openmetrics-text; version=1.0.0; Q = 0.000", False),
        ("text/plain, */*", False),
        ("", False),
    ],
)
def test_openmetrics_is_for_scrapers_that_take_it(accept: str, taken: bool) -> None:
    """Those that name it, but not with the weight 0, by which a client says that it takes none."""
    request = Request({"type": "http", "headers": [(b"accept", accept.encode())]})
    assert asks_for_openmetrics(request) is taken


def test_status_is_the_callables_answer(appliance: FakeAppliance) -> None:
    """GET /status gives the whole status, which reads back as the same value."""
    answer = httpx.get(f"{appliance.url}/status")
    assert answer.status_code == 200
    assert decode(ApplianceStatus, answer.json()) == appliance.status


def test_traces_are_listed_newest_first(appliance: FakeAppliance) -> None:
    """GET /traces lists as many as asked for."""
    listed = decode(TraceList, httpx.get(f"{appliance.url}/traces").json())
    assert [one.request_id for one in listed.traces] == [
        samples.failed().summary.request_id,
        samples.refused().summary.request_id,
        samples.answered().summary.request_id,
    ]
    assert len(httpx.get(f"{appliance.url}/traces?limit=2").json()["traces"]) == 2


@pytest.mark.parametrize("limit", ["x", "-1", "1.5", "", "9999999", "\u0663"])
def test_an_odd_limit_is_refused(appliance: FakeAppliance, limit: str) -> None:
    """A limit that is no small whole number is a 400 with a reason."""
    answer = httpx.get(f"{appliance.url}/traces", params={"limit": limit})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "limit must be a whole number"


def test_one_trace_by_prefix(appliance: FakeAppliance) -> None:
    """GET /traces/ID gives the trace that the prefix names."""
    answer = httpx.get(f"{appliance.url}/traces/7f3a9c")
    assert answer.status_code == 200
    assert decode(StoredTrace, answer.json()) == samples.answered()


def test_an_id_of_several_lists_them(appliance: FakeAppliance) -> None:
    """The samples share a trace id; asking for it gives 300 and the list."""
    answer = httpx.get(f"{appliance.url}/traces/{samples.SUMMARY.trace_id}")
    assert answer.status_code == 300
    assert len(decode(TraceList, answer.json()).traces) == 3


@pytest.mark.parametrize("wanted", ["ffffff", "7f3a", "x" * 500])
def test_an_unknown_id_is_404(appliance: FakeAppliance, wanted: str) -> None:
    """An id of nobody, one too short and one too long are not found."""
    assert httpx.get(f"{appliance.url}/traces/{wanted}").status_code == 404


def test_health(appliance: FakeAppliance) -> None:
    """Live while it answers; ready only when the appliance says so, with the reason."""
    assert httpx.get(f"{appliance.url}/health/live").status_code == 200
    assert httpx.get(f"{appliance.url}/health/ready").status_code == 200
    appliance.not_ready = "no engine is ready"
    answer = httpx.get(f"{appliance.url}/health/ready")
    assert (answer.status_code, answer.json()["reason"]) == (503, "no engine is ready")


@pytest.mark.parametrize(("ok", "status"), [(True, 200), (False, 409)])
def test_reload(appliance: FakeAppliance, ok: bool, status: int) -> None:
    """POST /reload waits for the outcome and says by its status whether anything changed."""
    appliance.outcome = ReloadOutcome(ok=ok, digest="d", message="m", problems=("f:1:1: x",))
    answer = httpx.post(f"{appliance.url}/reload")
    assert answer.status_code == status
    assert decode(ReloadOutcome, answer.json()) == appliance.outcome
    assert appliance.reloads == 1
    assert httpx.get(f"{appliance.url}/reload").status_code == 405


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://localhost:8082", ""])
def test_no_web_page_can_reload(appliance: FakeAppliance, origin: str) -> None:
    """A reload with any Origin header is refused, our own host's included, and nothing reloads."""
    answer = httpx.post(f"{appliance.url}/reload", headers={"origin": origin})
    assert answer.status_code == 403
    assert appliance.reloads == 0


WRITING = ("/reload", "/models/m/sleep", "/models/m/wake", "/requests/r/cancel", "/drain", "/operator/calls", "/resume")
"""Paths that change something or count it."""


@pytest.mark.parametrize("refused", [{"origin": "null"}, {"origin": "http://localhost:8082"}, {"host": "evil.example"}])
def test_no_web_page_changes_anything(appliance: FakeAppliance, refused: dict[str, str]) -> None:
    """Each is refused with any Origin header and under a rebound name; without these it is taken, also over loopback's
    TCP, where nobody knows which user of the machine asks."""
    for path in WRITING:
        assert httpx.post(f"{appliance.url}{path}", headers=refused).status_code == 403
    assert (appliance.reloads, appliance.draining, appliance.called) == (0, False, [])
    for path in WRITING:
        assert httpx.post(f"{appliance.url}{path}").status_code in (200, 400, 404)
        assert appliance.draining is (path in ("/drain", "/operator/calls"))
    assert appliance.reloads == 1


@pytest.mark.parametrize("path", ["/metrics", "/status", "/traces", "/health/live", "/nothing"])
@pytest.mark.parametrize("host", ["evil.example", "evil.example:8082", "127.0.0.1.evil.example", "10.0.0.1"])
def test_a_rebound_name_reaches_nothing(appliance: FakeAppliance, path: str, host: str) -> None:
    """A browser that was tricked by DNS sends its page's host, and gets 403 from every path."""
    answer = httpx.get(f"{appliance.url}{path}", headers={"host": host})
    assert answer.status_code == 403
    assert "loopback" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("localhost", True),
        ("LOCALHOST:8082", True),
        ("127.0.0.1", True),
        ("127.0.0.1:8082", True),
        ("127.8.9.1:80", True),
        ("[::1]", True),
        ("[::1]:8082", True),
        ("", False),
        (":80", False),
        ("0.0.0.0:80", False),
        ("[::]:80", False),
        ("localhost.evil.example", False),
        ("127.1", False),
        ("2130706433", False),
        ("[fe80::1]:80", False),
        ("localhost:80:80", False),
    ],
)
def test_loopback_hosts(host: str, allowed: bool) -> None:
    """Only localhost and literal loopback addresses are taken for this machine."""
    assert is_loopback(host) is allowed


def test_over_a_unix_socket(tmp_path: Path) -> None:
    """The same app answers on a Unix socket."""
    fake = FakeAppliance()
    path = tmp_path / "admin.sock"
    with serve_admin(fake, path):
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport) as client:
            assert client.get("http://localhost/health/live").json() == {"live": True}
