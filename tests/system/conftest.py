"""The whole appliance, started as a newcomer starts it, on free ports and with a state directory of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

from appliance.operator import kernels
from isolation.gvisor.checkpoint import ACCOUNT
from tests.system.tool_models import make_models

if TYPE_CHECKING:
    from tests.system.many_models import Served

START_TIMEOUT_S = 90.0
PROXY = "127.0.0.2"
"""Address of the proxy that the shared demo trusts; nobody else calls from there."""
STOP_TIMEOUT_S = 60.0
ATHANOR = str(Path(sys.executable).parent / "athanor")
PLAIN = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""What clients of addresses without TLS verify with: reading the machine's authorities would take each of them longer
than its request."""


class PlainClient(openai.DefaultHttpxClient):
    """The official client's HTTP, without authorities; closed with it."""

    def __init__(self) -> None:
        super().__init__(verify=PLAIN)

    def __del__(self) -> None:
        if not self.is_closed:
            self.close()


class PlainAsyncClient(openai.DefaultAsyncHttpxClient):
    """The same, asynchronous."""

    def __init__(self) -> None:
        super().__init__(verify=PLAIN)

    def __del__(self) -> None:
        if not self.is_closed:
            with contextlib.suppress(RuntimeError):
                asyncio.get_running_loop().create_task(self.aclose())


HERE = Path(__file__).parent
SHARED = ("appliance", "batterable", "many", "tooled")
"""Fixtures of a whole session; each is a demo, the second that of ``battered``."""

LAST_USES = pytest.StashKey[list[str]]()
"""Those fixtures that no test after this one uses."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let files that share a demo follow each other, tests elsewhere that begin with its checkpoints behind them, and
    note the last test of each demo: an idle sandbox takes some percent of a core, beside all tests that come after."""
    of_file: dict[Path, set[str]] = {}
    for item in items:
        of_file.setdefault(item.path, set()).update(getattr(item, "fixturenames", ()))
    here = [place for place, item in enumerate(items) if item.path.parent == HERE]
    ordered = sorted((items[place] for place in here), key=lambda item: turn(of_file[item.path]))
    for place, item in zip(here, ordered, strict=True):
        items[place] = item
    sharing = [item for item in items if "demos_section" in getattr(item, "fixturenames", ())]
    elsewhere = [item for item in sharing if item.path.parent != HERE]
    demos = [item for item in ordered if "appliance" in getattr(item, "fixturenames", ())]
    if demos:
        for item in elsewhere:
            items.remove(item)
        place = items.index(demos[-1]) + 1
        items[place:place] = elsewhere
    for name in SHARED:
        used = [item for item in ordered if name in getattr(item, "fixturenames", ())]
        if used:
            used[-1].stash.setdefault(LAST_USES, []).append(name)


def turn(used: set[str]) -> int:
    """When a file with these fixtures runs: first those with the one demo, then those with both, with the other, that
    which stops it, those with none, with that of models with tools, and with that of models of every kind."""
    if "tooled" in used or "many" in used:
        return 5 + ("many" in used)
    if "ending" in used:
        return 3
    return {(True, False): 0, (True, True): 1, (False, True): 2, (False, False): 4}[
        ("appliance" in used, "batterable" in used)
    ]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Stop a demo after its last test, when all that the test has to put back is put back."""
    done = [getattr(item, "funcargs", {}).get(name) for name in item.stash.get(LAST_USES, [])]
    yield
    for demo in done:
        if demo is not None:
            demo.stop()


@dataclass
class Appliance:
    """A running demo."""

    process: subprocess.Popen[bytes]
    ready: dict[str, Any]
    state: Path
    log: Path

    def key(self, tenant: str) -> str:
        """The tenant's API key."""
        return str(self.ready["tenants"][tenant]["api_key"])

    def openai(self, tenant: str = "alpha", **options: Any) -> openai.OpenAI:
        """The official client as this tenant; it does not retry unless told to."""
        settings = {"max_retries": 0, "timeout": 60.0, "http_client": PlainClient(), **options}
        return openai.OpenAI(base_url=self.ready["http"] + "/v1", api_key=self.key(tenant), **settings)

    def async_openai(self, tenant: str = "alpha", **options: Any) -> openai.AsyncOpenAI:
        """The same, asynchronous."""
        settings = {"max_retries": 0, "timeout": 60.0, "http_client": PlainAsyncClient(), **options}
        return openai.AsyncOpenAI(base_url=self.ready["http"] + "/v1", api_key=self.key(tenant), **settings)

    def sandbox_pid(self, role: str, model: str = "athanor-mini") -> int:
        """The sandbox process of one role."""
        for entry in self.status()["models"]:
            if entry["name"] == model:
                return int(entry[role]["pid"])
        raise LookupError(model)

    def status(self) -> dict[str, Any]:
        """What the admin listener says."""
        return dict(httpx.get(self.ready["admin"] + "/status", timeout=10, verify=PLAIN).json())

    def wait_generation(self, role: str, above: int, timeout_s: float = 30.0) -> None:
        """Until a later life of a sandbox is ready."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            entry = self.status()["models"][0]
            if entry[role]["generation"] > above and entry["state"] == "ready":
                return
            time.sleep(0.2)  # each look makes the appliance compute its status
        raise AssertionError(f"the {role} sandbox did not come back: {self.status()}\n{self.tail()}")

    def wait_checkpoints(self) -> None:
        """Until there are checkpoints of both sandboxes, by which they come back faster; a minute at most."""
        deadline = time.monotonic() + 60
        while len(list(checkpoints().glob(f"[0-9a-f]*/{ACCOUNT}"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.2)

    def tail(self, lines: int = 40) -> str:
        """The end of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self) -> int:
        """End it as an operator does; gives the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_TIMEOUT_S)


Start = Callable[..., Appliance]


def checkpoints() -> Path:
    """Where all demos of this run save sandboxes for each other, before they have seen anything; gone with the
    session's temporary directory."""
    return Path(tempfile.gettempdir()) / f"checkpoints-{os.geteuid()}"


def forms() -> Path:
    """Where all demos of this run remember the form in which engines compute, so that each does not try all again."""
    return Path(tempfile.gettempdir()) / f"forms-{os.geteuid()}.json"


def as_demos() -> dict[str, Any]:
    """Section ``sandbox`` of an appliance whose sandboxes begin with the demos' checkpoints, whatever its models. Empty
    before a demo has made both, since the appliance would make them beside its test."""
    return {} if len(list(checkpoints().glob(f"[0-9a-f]*/{ACCOUNT}"))) < 2 else saved_as_demos()


def begun() -> tuple[str, ...]:
    """Words for a demo of other models: it begins with the base of the demos before it, and makes none beside its test
    where there is none yet."""
    return () if as_demos() else ("--checkpoints", "off")


def begun_section() -> dict[str, Any]:
    """Section ``sandbox`` of an appliance without compiled kernels that begins with the demos' base, where there is
    one."""
    return {"checkpoints": str(checkpoints())} if as_demos() else {}


def saved_as_demos() -> dict[str, Any]:
    """Section ``sandbox`` of an appliance whose sandboxes come back often: it makes the demos' checkpoints where there
    are none yet."""
    compiled = kernels.installed()
    installed = None if compiled is None else str(compiled.resolve())
    return {"checkpoints": str(checkpoints()), "kernels": installed, "form_cache": str(forms())}


def start_demo(
    state: Path, *arguments: str, env: dict[str, str] | None = None, command: tuple[str, ...] = (ATHANOR,), **popen: Any
) -> Appliance:
    """Start ``athanor demo --json`` and wait for its one line."""
    log = state.parent / f"{state.name}.log"
    argv = [
        *command,
        "demo",
        "--json",
        "--checkpoints",
        str(checkpoints()),
        "--set",
        f"sandbox.form_cache={forms()}",
        "--http-port",
        "0",
        "--grpc-port",
        "0",
        "--admin-port",
        "0",
        "--state-dir",
        str(state),
        *arguments,
    ]
    with log.open("ab") as stderr:
        process = subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=stderr, env={**os.environ, **(env or {})}, **popen
        )
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], START_TIMEOUT_S)
    line = process.stdout.readline() if readable else b""
    if not line:
        process.kill()
        process.wait()
        raise AssertionError("the demo did not get ready:\n" + log.read_text(errors="replace")[-6000:])
    return Appliance(process, json.loads(line), state, log)


@contextlib.contextmanager
def running(state: Path, *arguments: str, **options: Any) -> Iterator[Appliance]:
    """A demo for the time of a block; ended however the block ends."""
    appliance = start_demo(state, *arguments, **options)
    try:
        yield appliance
    finally:
        try:
            appliance.stop()
        except subprocess.TimeoutExpired:
            appliance.process.kill()
            appliance.process.wait()
            raise


class Batterable:
    """The demo that tests may do harm to: as long as its host process lives, the next test gets the same one."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders = folders
        self._running = contextlib.ExitStack()
        self._last: Appliance | None = None

    def whole(self) -> Appliance:
        """The demo with both sandboxes ready; a new one where there is none, or the last was stopped."""
        if self._last is None or self._last.process.poll() is not None:
            self._running.close()
            self._last = self._running.enter_context(running(self._folders.mktemp("battered") / "state"))
        for role in ("engine", "text"):
            self._last.wait_generation(role, 0)
        return self._last

    def stop(self) -> None:
        """Stop it."""
        self._running.close()


@pytest.fixture(scope="session")
def batterable(tmp_path_factory: pytest.TempPathFactory, runsc_path: Path) -> Iterator[Batterable]:
    """The demo for tests that kill and stop, as often as they ask for a whole one."""
    kept = Batterable(tmp_path_factory)
    yield kept
    kept.stop()


@pytest.fixture
def battered(batterable: Batterable) -> Appliance:
    """One demo shared by the tests that kill its processes: each finds it ready, and leaves its policy as it was.

    Counts since the start (generations, metrics, lines of the log) are not those of a fresh one.
    """
    return batterable.whole()


@pytest.fixture
def ending(batterable: Batterable) -> Appliance:
    """The battered demo, for a test that stops it: its file runs behind all others that use that one."""
    return batterable.whole()


@pytest.fixture(scope="session")
def appliance(tmp_path_factory: pytest.TempPathFactory, runsc_path: Path) -> Iterator[Appliance]:
    """One demo shared by the tests that leave it as they found it."""
    proxies = {"ATHANOR_LISTEN__TRUSTED_PROXIES": f"[{PROXY}]"}
    with running(tmp_path_factory.mktemp("shared") / "state", env=proxies) as started:
        yield started


@pytest.fixture
def governed(appliance: Appliance) -> Iterator[Appliance]:
    """The shared demo, for a test that puts other policies in force: afterwards it has the one that it had."""
    policy = appliance.state / "policy.yaml"
    good = policy.read_text()
    yield appliance
    policy.write_text(good)
    httpx.post(appliance.ready["admin"] + "/reload", timeout=30, verify=PLAIN).raise_for_status()


@pytest.fixture(scope="session")
def in_full(request: pytest.FixtureRequest) -> bool:
    """Whether this run has tests of the full count. Models that they alone ask for are not served otherwise: each
    begins without a checkpoint, in two sandboxes of some five seconds of processor."""
    return any(item.get_closest_marker("full") for item in request.session.items)


@pytest.fixture(scope="session")
def tooled(tmp_path_factory: pytest.TempPathFactory, runsc_path: Path, in_full: bool) -> Iterator[Appliance]:
    """One demo that serves a model with tools and one that reasons, in the full count also one with tools of another
    family; all but the first have random weights."""
    folder = tmp_path_factory.mktemp("tools")
    names = ("hermes", "thinking", *(("llama3",) if in_full else ()))
    models = make_models(folder, names, random=names[1:])
    served = [argument for model in models for argument in ("--model", str(model))]
    with running(folder / "state", *served, *begun()) as started:
        yield started


@pytest.fixture(scope="session")
def many(tmp_path_factory: pytest.TempPathFactory, runsc_path: Path, in_full: bool) -> Iterator[Served]:
    """One appliance with models of every kind; its tests leave it as they found it."""
    from tests.system.many_models import serving

    with serving(tmp_path_factory.mktemp("many"), runsc_path, whole=in_full) as started:
        yield started


@pytest.fixture
def own_appliance(tmp_path: Path, runsc_path: Path) -> Iterator[Appliance]:
    """A demo for one test that has to know all that ever happened to it."""
    with running(tmp_path / "state") as started:
        yield started
