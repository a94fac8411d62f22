"""A real Chromium, spoken to by its own DevTools protocol over a pair of pipes: no driver, no port, no package.

Each command is a JSON object that ends with a zero byte (Chromium's ``--remote-debugging-pipe``). Everything is
synchronous: what the browser tells of itself is kept in ``Page.events`` and read by the tests.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "chrome-headless-shell", "google-chrome-stable", "google-chrome")
"""What a Chromium may be called on PATH; Debian's package is ``chromium``."""

PATIENCE_S = 30.0
"""Longest wait for an answer or a state: a browser that starts on a crowded machine takes seconds."""

FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--disable-default-apps",
    "--mute-audio",
    "--hide-scrollbars",
    "--disable-dev-shm-usage",
    # It runs here as whoever runs the tests, root included, and sees pages of this repository only.
    "--no-sandbox",
)

KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32}


def find_browser() -> str | None:
    """The path of a Chromium, beside the interpreter (``requirements/observers.py``) or on PATH; or None."""
    own = shutil.which("chromium", path=str(Path(sys.executable).parent))
    return own or next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One browser process with a profile of its own."""

    def __init__(self, path: str, profile: Path) -> None:
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        # The protocol's descriptors are 3 and 4; others are put in their places by the shell.
        script = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", script, path, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._left = b""
        self._next = 0
        self._answers: dict[int, dict[str, Any]] = {}
        self.pages: dict[str, Page] = {}

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """One command and its result."""
        self._next += 1
        number = self._next
        message = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + PATIENCE_S
        while number not in self._answers:
            if not self.take(deadline - time.monotonic()):
                raise AssertionError(f"the browser did not answer {method}")
        answer = self._answers.pop(number)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return dict(answer["result"])

    def take(self, timeout_s: float) -> bool:
        """Take what the browser says, waiting for the first of it; False when it says nothing in time."""
        if not select.select([self._in], [], [], max(0.0, timeout_s))[0]:
            return False
        data = os.read(self._in, 1 << 20)
        assert data, "the browser is gone"
        *messages, self._left = (self._left + data).split(b"\0")
        for raw in messages:
            message = json.loads(raw)
            if "id" in message:
                self._answers[message["id"]] = message
            elif message.get("sessionId") in self.pages:
                self.pages[message["sessionId"]].events.append((message["method"], message["params"]))
        return True

    def open(self, width: int = 1280, height: int = 900, **features: str) -> Page:
        """A new page of this size; ``features`` are media features with underscores (``prefers_color_scheme``)."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        where = {"browserContextId": context, "newWindow": True}
        target = self.call("Target.createTarget", url="about:blank", **where)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self.pages[session] = Page(self, target, session, context)
        for domain in ("Page", "Runtime", "Log", "Network", "Audits"):
            page.call(f"{domain}.enable")
        page.resize(width, height)
        page.media(**features)
        return page

    def close(self) -> None:
        """End it."""
        try:
            self.call("Browser.close")
        except (AssertionError, OSError):
            self._process.kill()
        self._process.wait(PATIENCE_S)
        os.close(self._out)
        os.close(self._in)


class Page:
    """One page: what is in it, and what went wrong in it."""

    def __init__(self, browser: Browser, target: str, session: str, context: str) -> None:
        self._browser, self.target, self._session, self._context = browser, target, session, context
        self.events: list[tuple[str, dict[str, Any]]] = []

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command to this page."""
        return self._browser.call(method, self._session, **params)

    def resize(self, width: int, height: int) -> None:
        """The page's size in CSS pixels."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def media(self, **features: str) -> None:
        """Media features, their underscores dashes."""
        listed = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", features=listed)

    def goto(self, url: str) -> None:
        """Load an address, and wait until it is loaded."""
        before = len(self.events)
        self.call("Page.navigate", url=url)
        self.wait(lambda: any(name == "Page.loadEventFired" for name, _ in self.events[before:]), f"{url} to load")

    def run(self, script: str) -> Any:
        """The value of an expression in the page; a promise is waited for."""
        options = {"awaitPromise": True, "returnByValue": True, "allowUnsafeEvalBlockedByCSP": False}
        answer = self.call("Runtime.evaluate", expression=script, **options)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, holds: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S) -> Any:
        """Until something holds; what it gives."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if found := holds():
                return found
            self._browser.take(0.05)
        raise AssertionError(f"waited in vain for {what}; the page says: {self.text()[:2000]}")

    def wait_text(self, text: str, timeout_s: float = PATIENCE_S) -> None:
        """Until the page shows a text."""
        self.wait(lambda: text in self.text(), f"the text {text!r}", timeout_s)

    def text(self) -> str:
        """What a reader sees."""
        return str(self.run("document.body?.innerText ?? ''"))

    def pause(self, seconds: float) -> None:
        """Let time pass, and take what is told meanwhile."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self._browser.take(left)

    def press(self, key: str, shift: bool = False) -> None:
        """One key, as from a keyboard."""
        text = {"Enter": "\r", " ": " "}.get(key, key if len(key) == 1 else "")
        code = KEYS.get(key, ord(key.upper()) if len(key) == 1 else 0)
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key if len(key) > 1 else "",
                text=text if kind == "keyDown" else "",
                windowsVirtualKeyCode=code,
                modifiers=8 if shift else 0,
            )

    def hide(self) -> str:
        """Put another tab in front of it, as a person does; gives that tab."""
        made = self._browser.call("Target.createTarget", url="about:blank", browserContextId=self._context)
        tab = str(made["targetId"])
        self._browser.call("Target.activateTarget", targetId=tab)
        return tab

    def show(self, tab: str) -> None:
        """Bring it back in front, and close the other tab."""
        self._browser.call("Target.activateTarget", targetId=self.target)
        self._browser.call("Target.closeTarget", targetId=tab)

    def picture(self, path: Path, whole: bool = True) -> None:
        """A screenshot as PNG."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        if whole:
            height = int(self.run("document.documentElement.scrollHeight"))
            width = int(self.run("innerWidth"))
            clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
            answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(answer["data"]))

    def requests(self) -> list[str]:
        """Addresses that the page has asked for."""
        return [event["request"]["url"] for name, event in self.events if name == "Network.requestWillBeSent"]

    def complaints(self) -> list[str]:
        """Errors and warnings: exceptions, the console's, the log's (a refused request among them), broken policies."""
        found = []
        for name, event in self.events:
            if name == "Runtime.exceptionThrown":
                found.append(str(event["exceptionDetails"]))
            elif name == "Runtime.consoleAPICalled" and event["type"] in ("error", "warning", "assert"):
                found.append(str(event["args"]))
            elif name == "Log.entryAdded" and event["entry"]["level"] in ("error", "warning"):
                found.append(str(event["entry"]))
            elif name == "Audits.issueAdded":
                found.append(str(event["issue"]))
        return found
