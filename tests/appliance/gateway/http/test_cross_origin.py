"""Pages of other origins over a real socket, as the Fetch standard has it, and in a real browser."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from appliance.common.errors import OriginNotAllowedError, RateLimitedError
from appliance.gateway.front.starts import STRANGERS
from appliance.gateway.http.app import DOCUMENT, ROUTES
from appliance.gateway.http.cross_origin import ANSWER_HEADERS, METHODS, CrossOrigin
from tests.appliance.gateway.console.browser import Browser, Page, find_browser
from tests.appliance.gateway.front.support import MODEL, Running, post, serving, talk, text_script

FOUND = json.loads(DOCUMENT.read_bytes())
CHAT = "/v1/chat/completions"
GOOD = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}).encode()
STREAMED = GOOD[:-1] + b', "stream": true}'
APP, OTHER = "https://app.example", "https://other.example"
ASKS = "access-control-request-method: POST"


@contextlib.asynccontextmanager
async def open_to(*origins: str) -> AsyncIterator[Running]:
    """Front ends that pages of these origins may call."""
    async with serving(cross_origin=CrossOrigin(frozenset(origins))) as running:
        yield running


def request(method: str, path: str, *headers: str) -> bytes:
    """The bytes of one request without a body, and of the end of its connection."""
    return "\r\n".join([f"{method} {path} HTTP/1.1", "host: a", "connection: close", *headers, "", ""]).encode()


def heads(answer: bytes) -> tuple[int, dict[str, str]]:
    """Status and headers of an answer."""
    first, *lines = answer.partition(b"\r\n\r\n")[0].decode().split("\r\n")
    return int(first.split()[1]), dict(line.split(": ", 1) for line in lines)


def mentions(headers: dict[str, str]) -> list[str]:
    """Names of headers that speak of origins."""
    return sorted(name for name in headers if name == "vary" or name.startswith("access-control-"))


async def test_a_preflight_is_answered_without_a_credential() -> None:
    """A page of a listed origin is given leave, for ten minutes, on every path alike, there or not; nothing is
    recorded, and the connection goes on."""
    async with open_to(APP) as running:
        asked = [ASKS, f"origin: {APP}", "access-control-request-headers: authorization,content-type"]
        answers = [
            await talk(running.front_ends.http_port, request("OPTIONS", path, *asked))
            for path in (CHAT, "/v1/models", "/no-such-path", "/openapi.json", "*")
        ]
        status, headers = heads(answers[0])
        assert status == 204 and "content-length" not in headers
        assert headers["access-control-allow-origin"] == APP and headers["vary"] == "origin"
        assert headers["access-control-allow-methods"] == "GET, POST, DELETE"
        assert "authorization" in headers["access-control-allow-headers"].split(", ")
        assert headers["access-control-max-age"] == "600"
        assert "access-control-allow-credentials" not in headers
        plain = {re.sub(rb"(x-request-id|openai-processing-ms|date): [^\r]*", b"", one) for one in answers}
        assert len(plain) == 1 and running.service.refusals == []
        kept = request("OPTIONS", CHAT, *asked).replace(b"connection: close\r\n", b"")
        both = await talk(running.front_ends.http_port, kept + request("OPTIONS", CHAT, *asked))
        assert both.count(b"HTTP/1.1 204") == 2


@pytest.mark.parametrize(
    "origin", [OTHER, "null", "*", "https://app.example.evil", "https://APP.example", APP + "/", ""]
)
async def test_pages_of_other_origins_get_no_leave(origin: str) -> None:
    """Their preflight is a 403 that says who can change it, and carries no header of CORS; their requests are answered
    as any caller's, without the header that a browser needs to show the answer to the page. The preflight is recorded
    as a refusal, for metrics and audit log."""
    async with open_to(APP) as running:
        port, line = running.front_ends.http_port, f"origin: {origin}"
        answer = await talk(port, request("OPTIONS", CHAT, ASKS, line))
        assert heads(answer)[0] == 403 and mentions(heads(answer)[1]) == ["vary"]
        assert b'"code":"origin_not_allowed"' in answer
        ((_, error, tenant),) = running.service.refusals
        assert isinstance(error, OriginNotAllowedError) and tenant is None
        answer = await talk(port, post(CHAT, GOOD, running.authorization, line))
        assert heads(answer)[0] == 200 and mentions(heads(answer)[1]) == ["vary"]


async def test_two_origins_are_none() -> None:
    """A request that names two origins comes from no browser: no leave. Control: with one of them it has it."""
    async with open_to(APP, OTHER) as running:
        for origins, status in ((2, 403), (1, 204)):
            lines = [f"origin: {APP}", f"origin: {OTHER}"][:origins]
            found, _ = heads(await talk(running.front_ends.http_port, request("OPTIONS", CHAT, ASKS, *lines)))
            assert found == status


async def test_every_kind_of_answer_tells_the_browser() -> None:
    """Whole answers, streams, errors before and after the credential is known, and errors with a time to wait carry the
    page's origin and the names of headers that it may read; an answer to no page says only that answers differ."""
    async with open_to(APP) as running:
        port, key, origin = running.front_ends.http_port, running.authorization, f"origin: {APP}"
        answers = [
            await talk(port, post(CHAT, GOOD, key, origin)),
            await talk(port, post(CHAT, STREAMED, key, origin)),
            await talk(port, post(CHAT, b"{", key, origin)),
            await talk(port, post(CHAT, GOOD, {}, origin)),
            await talk(port, request("GET", "/health", origin)),
            await talk(port, request("DELETE", "/v1/models", origin, f"authorization: Bearer {running.key}")),
        ]
        running.service.script = [RateLimitedError("too many", retry_after_s=2.0)]
        answers.append(await talk(port, post(CHAT, GOOD, key, origin)))
        assert [heads(one)[0] for one in answers] == [200, 200, 400, 401, 200, 405, 429]
        for answer in answers:
            headers = heads(answer)[1]
            assert headers["access-control-allow-origin"] == APP and headers["vary"] == "origin"
            assert headers["access-control-expose-headers"] == ", ".join(ANSWER_HEADERS)
        assert mentions(heads(await talk(port, request("GET", "/health")))[1]) == ["vary"]


async def test_it_is_off_by_default(running: Running) -> None:
    """Without listed origins no byte of an answer depends on a page's: a preflight is refused as any request without a
    credential is, and with a key the method is one that the route does not take."""
    port, key = running.front_ends.http_port, running.authorization
    changing = rb"(?m)^(x-request-id|openai-processing-ms|date): [^\r]*\r$|chatcmpl-[0-9a-f]+|\"created\":[0-9]+"
    for make in (
        lambda *more: post(CHAT, GOOD, key, *more),
        lambda *more: post(CHAT, STREAMED, key, *more),
        lambda *more: post(CHAT, b"{", key, *more),
        lambda *more: request("GET", "/health", *more),
        lambda *more: request("OPTIONS", CHAT, ASKS, *more),
        lambda *more: request("OPTIONS", CHAT, ASKS, f"authorization: Bearer {running.key}", *more),
    ):
        lines: tuple[tuple[str, ...], ...] = ((), (f"origin: {APP}",))
        plain, with_origin = [re.sub(changing, b"", await talk(port, make(*more))) for more in lines]
        assert plain == with_origin and mentions(heads(plain)[1]) == []
    assert heads(plain)[0] == 405


async def test_preflights_are_counted_as_strangers_requests_are() -> None:
    """A network that floods preflights gets no more of them answered in a second than of other requests without a
    credential: both share one rate."""
    async with open_to(APP) as running:
        asked = request("OPTIONS", CHAT, ASKS, f"origin: {APP}").replace(b"connection: close\r\n", b"")
        last = request("OPTIONS", CHAT, ASKS, f"origin: {APP}")
        loop = asyncio.get_running_loop()
        began = loop.time()
        answer = await talk(running.front_ends.http_port, asked * 199 + last, timeout_s=20)
        assert answer.count(b"HTTP/1.1 204") == 200
        assert loop.time() - began > 0.9 * (200 - STRANGERS.burst) / STRANGERS.per_s


def test_names_are_those_of_routes_and_answers() -> None:
    """Every method of the routes may be used, and every header that the document lists may be read, but for those that
    are for proxies and other clients alone."""
    assert {route.method for route in ROUTES} == set(METHODS)
    others = {"x-athanor-padding", "x-accel-buffering", "www-authenticate", "allow"}
    assert set(FOUND["components"]["headers"]) - others == set(ANSWER_HEADERS)


class PageServer(ThreadingHTTPServer):
    """Serves an empty page at an origin of its own."""

    daemon_threads = True

    class Handler(BaseHTTPRequestHandler):
        """Answers with the page."""

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>page</title><link rel=icon href=data:,>")

        def log_message(self, *_: Any) -> None:
            pass

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), self.Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def origin(self) -> str:
        """The page's origin."""
        return f"http://127.0.0.1:{self.server_address[1]}"


SCRIPT = """
(() => {
  window.text = "";
  window.found = (async () => {
    try {
      const answer = await fetch(%s, {method: "POST", body: JSON.stringify(%s), headers: {
        "authorization": "Bearer " + %s, "content-type": "application/json", "x-stainless-lang": "js"}});
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      for (;;) { const {done, value} = await reader.read(); if (done) break; window.text += value; }
      return {status: answer.status, id: answer.headers.get("x-request-id"),
        left: answer.headers.get("x-ratelimit-remaining-requests"), text: window.text};
    } catch (error) { return {error: String(error)}; }
  })();
})()
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Page, PageServer, PageServer]]:
    """A page in a real browser, and two servers that it can come from."""
    path = find_browser()
    if path is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    browser, servers = Browser(path, tmp_path_factory.mktemp("profile")), (PageServer(), PageServer())
    yield browser.open(), *servers
    browser.close()
    for one in servers:
        one.shutdown()
        one.server_close()


async def test_a_real_browser(pages: tuple[Page, PageServer, PageServer]) -> None:
    """fetch() from a page of a listed origin reads a stream while it comes, its headers, and an error with its status;
    from a page of another origin the same call fails in the browser, and no request with a key ever arrives."""
    page, listed, other = pages
    async with open_to(listed.origin) as running:
        gate = asyncio.Event()
        first, *rest = text_script("Hel", "lo")
        running.service.script = [first, rest[0], gate, *rest[1:]]
        in_thread = asyncio.to_thread
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True}

        async def fetch(key: str, seen: str = "") -> dict[str, Any]:
            await in_thread(page.run, SCRIPT % tuple(map(json.dumps, (running.base_url + CHAT, body, key))))
            if seen:
                await in_thread(page.wait, lambda: seen in page.run("window.text"), "the first piece")
                gate.set()
            return dict(await in_thread(page.run, "window.found"))

        await in_thread(page.goto, listed.origin)
        found = await fetch(running.key, "Hel")
        assert found["status"] == 200 and found["id"].startswith("req_") and found["left"] == "59", found
        assert found["text"].endswith("data: [DONE]\n\n") and '"lo"' in found["text"]
        refused = await fetch("ath_wrong")
        assert refused["status"] == 401 and "invalid_api_key" in refused["text"], refused
        served = len(running.service.requests)
        await in_thread(page.goto, other.origin)
        for key in (running.key, "ath_wrong"):
            assert "Failed to fetch" in (await fetch(key))["error"]
        assert len(running.service.requests) == served == 1
