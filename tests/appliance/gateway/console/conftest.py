"""A console on a real listener, and a real browser."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from appliance.common.operator_roles import EVERY
from appliance.gateway.console.headers import ROLES
from appliance.gateway.console.routes import console_routes
from appliance.gateway.telemetry.admin import admin_app
from tests.appliance.admin_server import FakeAppliance
from tests.appliance.gateway.console.browser import Browser, Page, find_browser
from tests.appliance.gateway.console.pictures import FakeGateway

STOP_S = 10.0
"""How long a server may take to end; its thread does not hold up the tests' end."""


def _owned(app: ASGIApp) -> ASGIApp:
    """A listener whose callers have every role (``test_local_roles`` shows what others get)."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})[ROLES] = lambda: EVERY
        await app(scope, receive, send)

    return serve


@dataclass
class Console:
    """A listener around a gateway that exists on paper only; it can be stopped and started on the same port."""

    gateway: FakeGateway
    port: int

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.port}"

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Answer for the time of the block."""
        listener = socket.create_server(("127.0.0.1", self.port))
        self.port = listener.getsockname()[1]
        routes = console_routes(self.gateway.look, self.gateway.traces, self.gateway.usage, self.gateway.fleet)
        app = _owned(admin_app(FakeAppliance().parts(), routes))
        config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", loop="asyncio")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        try:
            yield
        finally:
            server.should_exit = server.force_exit = True
            thread.join(STOP_S)
            listener.close()


@pytest.fixture(scope="session")
def _console() -> Iterator[Console]:
    console = Console(FakeGateway(), 0)
    with console.serving():
        yield console


@pytest.fixture
def console(_console: Console) -> Console:
    """The console, well again."""
    _console.gateway.reset()
    return _console


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A Chromium of this machine; tests that need one are skipped where there is none."""
    path = find_browser()
    if path is None:
        pytest.skip("no Chromium here: `make setup-dev` gets Debian's, or have one on PATH")
    browser = Browser(path, tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def open_page(browser: Browser, console: Console) -> Iterator[Callable[..., Page]]:
    """Opens the console in a page of some size and media features, and closes it after the test; ``name`` is another
    page's file, and ``words`` are what it shows once it has something."""
    pages: list[Page] = []

    def opened(
        width: int = 1280, height: int = 900, name: str = "", words: str = "since the start", **features: str
    ) -> Page:
        page = browser.open(width, height, **features)
        pages.append(page)
        page.goto(f"{console.url}/console/{name}")
        page.wait_text(words)
        return page

    yield opened
    for page in pages:
        browser.call("Target.closeTarget", targetId=page.target)
