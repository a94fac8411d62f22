"""Models that come and go on a whole appliance, while requests to another model run on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from typer.testing import CliRunner

from appliance.common.catalog import embedded_model
from appliance.common.served_models import DRAIN_S
from appliance.common.sleep_rules import STAY_S
from appliance.operator.cli.app import app
from tests.system.conftest import PLAIN, Appliance
from tests.system.test_deaths import host_pid

pytestmark = [pytest.mark.runsc, pytest.mark.timeout(180)]

MODEL = "athanor-mini"
NEW = "newcomer"
KV_BYTES = 32 << 20
RUNNING = 12
"""Streams of 8,000 tokens: together more than an engine gives within a drain."""
PAUSE_S = 0.2
"""Between a stream's end and the next one's beginning: half of the time is enough to see what a change does to it."""
WAIT_S = 60.0
"""Within which a sandbox boots on a busy machine."""


@dataclass
class Changing:
    """An appliance whose models.d the test owns."""

    appliance: Appliance

    @property
    def folder(self) -> Path:
        """The folder of entries."""
        return self.appliance.state / "models.d"

    @property
    def config(self) -> Path:
        """The configuration."""
        return self.appliance.state / "athanor.yaml"

    def write(self, text: str, name: str = NEW) -> Path:
        """Write a file of entries."""
        self.folder.mkdir(exist_ok=True)
        path = self.folder / f"{name}.yaml"
        path.write_text(text)
        return path

    def entry(self, **keys: Any) -> Path:
        """Write the entry of the new model, with these keys."""
        entry = {"name": NEW, "path": str(embedded_model()), "kv_bytes": KV_BYTES, **keys}
        return self.write(json.dumps({"models": [entry]}))

    def clear(self) -> None:
        """Have no entries."""
        for path in self.folder.glob("*"):
            path.unlink()

    def reload(self) -> httpx.Response:
        """Reload by the admin listener, as the command does."""
        return httpx.post(self.appliance.ready["admin"] + "/reload", timeout=WAIT_S, verify=PLAIN)

    def states(self) -> dict[str, str]:
        """State by model."""
        return {one["name"]: one["state"] for one in self.appliance.status()["models"]}

    def wait(self, state: str | None, timeout_s: float = WAIT_S) -> None:
        """Until the new model is in this state; None: until it is gone."""
        deadline = time.monotonic() + timeout_s
        while (found := self.states().get(NEW)) != state:
            assert time.monotonic() < deadline, (found, self.appliance.status(), self.appliance.tail())
            time.sleep(0.05)

    def ask(self, model: str = NEW, **keys: Any) -> int:
        """Status of a small request."""
        try:
            self.appliance.openai().completions.create(model=model, prompt="hello", max_tokens=2, **keys)
        except openai.APIStatusError as error:
            return error.status_code
        return 200

    def left(self) -> dict[str, Any]:
        """All that a model may leave behind, as it is now."""
        run_dir = Path(json.loads(self.config.read_text().partition("\n")[2])["run_dir"])
        metrics = httpx.get(self.appliance.ready["admin"] + "/metrics", verify=PLAIN).text
        pids = [host_pid(self.appliance, role) for role in ("supervisor", "gateway")]
        return {
            "folders": sorted(str(path) for part in ("ipc", "sandboxes") for path in (run_dir / part).glob(f"*{NEW}*")),
            "groups": sorted(str(path) for path in _groups(pids[0]) if NEW in path.name),
            "processes": _processes(NEW),
            "series": [line for line in metrics.splitlines() if f'"{NEW}"' in line],
            "descriptors": [_descriptors(pid) for pid in pids],
        }


def _descriptors(pid: int) -> dict[str, int]:
    """Numbers of a process's descriptors of the kinds that sandboxes take: shared memory, doorbells, processes."""
    targets = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            targets.append(os.readlink(path))
    return {kind: sum(kind in target for target in targets) for kind in ("memfd:", "pipe:", "[pidfd]")}


def more(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What there is now and was not before. A checkpoint that was being made then may have taken descriptors."""
    found = [f"{name}: {after[name]}" for name in after if name != "descriptors" and after[name] != before[name]]
    for then, now in zip(before["descriptors"], after["descriptors"], strict=True):
        found += [f"{kind} {then[kind]} -> {count}" for kind, count in now.items() if count > then[kind]]
    return found


def _groups(pid: int) -> list[Path]:
    """Cgroups below that of a process, of all hierarchies."""
    found: list[Path] = []
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, names, place = line.split(":", 2)
        for root in (Path("/sys/fs/cgroup", names), Path("/sys/fs/cgroup", names.removeprefix("name="))):
            folder = root / place.lstrip("/")
            # Not by glob: groups of other appliances come and go meanwhile.
            found += [Path(above, name) for above, names_below, _ in os.walk(folder) for name in names_below]
    return found


def _processes(word: str) -> list[str]:
    done = subprocess.run(["pgrep", "-af", f"(engine|text)-{word}"], capture_output=True, text=True, check=False)
    return done.stdout.splitlines()


@pytest.fixture
def changing(appliance: Appliance) -> Iterator[Changing]:
    """The shared demo, which afterwards serves what it served."""
    found = Changing(appliance)
    found.clear()
    yield found
    found.clear()
    assert found.reload().status_code == 200
    found.wait(None)


@dataclass
class Streams:
    """One stream after the other on the demo's own model, until told to stop."""

    appliance: Appliance
    done: int = 0
    tokens: int = 0
    longest_s: float = 0.0
    """Longest time between two chunks."""
    problems: list[str] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Ask and read; each error is kept."""
        client = self.appliance.openai()
        while not self._stop.is_set():
            try:
                stream = client.completions.create(
                    model=MODEL, prompt="Count:", max_tokens=200, stream=True, extra_body={"ignore_eos": True}
                )
                last = time.monotonic()
                for _ in stream:
                    now = time.monotonic()
                    self.longest_s, last = max(self.longest_s, now - last), now
                    self.tokens += 1
                self.done += 1
                self._stop.wait(PAUSE_S)
            except openai.OpenAIError as error:
                self.problems.append(repr(error))

    @contextlib.contextmanager
    def going(self) -> Iterator[None]:
        """Ask during the block."""
        thread = threading.Thread(target=self.run)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join(WAIT_S)


def test_a_model_comes_and_goes_while_others_stream(changing: Changing) -> None:
    """Added by the command, changed by an edit, stopped by the command: each is served, or refused with a typed error;
    streams on another model have no error and go on; health stays ready; nothing is left behind."""
    appliance, config = changing.appliance, ("-c", str(changing.config))
    health, streams = appliance.ready["http"] + "/health/ready", Streams(appliance)
    assert changing.ask(MODEL) == 200
    before = changing.left()
    assert changing.ask() == 404
    with streams.going():
        words = ("--path", str(embedded_model()), "--set", f"kv_bytes={KV_BYTES}", "--wait", "0")
        added = CliRunner().invoke(app, ["model", "add", NEW, *words, *config])
        assert added.exit_code == 0, added.output
        assert "memory  about" in added.stdout and f"model {NEW}: added" in added.stderr
        assert httpx.get(health, verify=PLAIN).status_code == 200
        changing.wait("ready")
        assert changing.ask() == 200
        assert changing.left()["series"] and changing.left()["folders"], "control: it leaves traces while it serves"

        changing.entry(kv_bytes=2 * KV_BYTES)
        outcome = changing.reload().json()
        assert outcome["applied"] == [f"model {NEW}: kv_bytes ({KV_BYTES} -> {2 * KV_BYTES}), started anew"]
        assert changing.ask() in (200, 503)
        assert httpx.get(health, verify=PLAIN).status_code == 200
        changing.wait("ready")
        assert changing.ask() == 200

        stopped = CliRunner().invoke(app, ["model", "stop", NEW, *config])
        assert stopped.exit_code == 0, stopped.output
        assert changing.ask() == 404
    assert streams.problems == [] and streams.done > 0
    deadline = time.monotonic() + WAIT_S
    while found := more(before, changing.left()):
        assert time.monotonic() < deadline, found
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('models: [{name: "%(new)s", pat: "%(path)s"}]', ":1:29: models[0].pat: unknown key"),
        ("models: [{name: %(served)s, path: %(path)s}]", ":1:17: models[0].name: athanor-mini is the name of a model"),
        ("models: [{name: %(new)s, path: /nowhere}]", ":1:27: model newcomer: /nowhere is not a directory"),
        ("models: [{name: %(new)s, path: %(path)s, digest: %(wrong)s}]", ": model newcomer: its files have"),
        ("models: [{name: %(new)s, path: %(path)s, kv_bytes: 99000000000}]", "needs at least 92 GiB"),
        ("models: [{name: %(new)s, path: %(path)s, gpu: [7]}]", "cannot have its GPU"),
        ("models: [", ":1:10: not YAML"),
    ],
)
def test_what_cannot_be_served_changes_nothing(changing: Changing, text: str, said: str) -> None:
    """Each is refused with its file and line, and the model that is served goes on. Control: the test before."""
    words = {"new": NEW, "served": MODEL, "path": embedded_model(), "wrong": "ab" * 32}
    path = changing.write(text % words)
    before = changing.states()
    answer = changing.reload()
    problems = answer.json()["problems"]
    assert answer.status_code == 409 and len(problems) == 1
    assert problems[0].startswith(f"{path}:") and said in problems[0]
    assert changing.states() == before and changing.ask(MODEL) == 200


@pytest.mark.full
def test_running_requests_are_cut_after_the_drain(changing: Changing) -> None:
    """Streams that outlast the drain end with the typed error, not before; new requests meet it at once."""
    changing.entry()
    assert changing.reload().status_code == 200
    changing.wait("ready")
    client, began, ended = changing.appliance.openai(timeout=120.0), threading.Barrier(RUNNING + 1), dict[int, str]()

    def follow(number: int) -> None:
        stream = client.completions.create(
            model=NEW, prompt="Count:", max_tokens=3_000, stream=True, extra_body={"ignore_eos": True}
        )
        chunks = iter(stream)
        next(chunks)
        began.wait(WAIT_S)
        try:
            for _ in chunks:
                pass
        except openai.APIError as error:
            ended[number] = f"{time.monotonic():.1f} {error.message}"

    threads = [threading.Thread(target=follow, args=(number,)) for number in range(RUNNING)]
    for thread in threads:
        thread.start()
    began.wait(WAIT_S)
    # Its engine stands still, so that no answer ends by itself.
    os.kill(changing.appliance.sandbox_pid("engine", NEW), signal.SIGSTOP)
    changing.clear()
    assert changing.reload().status_code == 200
    left = time.monotonic()
    assert changing.ask() == 404
    for thread in threads:
        thread.join(WAIT_S)
    assert len(ended) == RUNNING
    for said in ended.values():
        at, _, message = said.partition(" ")
        assert "is being taken away; the request was stopped" in message
        assert DRAIN_S - 2 < float(at) - left < DRAIN_S + 5
    changing.wait(None)


@pytest.mark.full
@pytest.mark.parametrize("role", ["supervisor", "engine"])
def test_a_death_while_a_model_comes(battered: Appliance, role: str) -> None:
    """Killed while the new model boots: after the restart both models are served, since the entry is written."""
    changing = Changing(battered)
    try:
        changing.entry()
        assert changing.reload().status_code == 200
        if role == "supervisor":
            os.kill(host_pid(battered, role), signal.SIGKILL)
        else:
            deadline = time.monotonic() + WAIT_S
            while not (found := _processes(NEW)):
                assert time.monotonic() < deadline
            for line in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(line.split()[0]), signal.SIGKILL)
        deadline = time.monotonic() + WAIT_S
        while changing.states() != {MODEL: "ready", NEW: "ready"}:
            assert time.monotonic() < deadline, battered.tail()
            time.sleep(0.1)
        assert changing.ask() == changing.ask(MODEL) == 200
    finally:
        changing.clear()
        deadline = time.monotonic() + WAIT_S
        while changing.reload().status_code != 200:
            assert time.monotonic() < deadline, battered.tail()
        changing.wait(None)
    assert changing.ask(MODEL) == 200


def _came_anew(appliance: Appliance, before: int) -> bool:
    """Whether there is another supervisor than this one."""
    with contextlib.suppress(subprocess.CalledProcessError):
        return host_pid(appliance, "supervisor") != before
    return False


@pytest.mark.full
def test_a_model_falls_asleep_by_idleness_and_sleeps_on_under_a_new_supervisor(battered: Appliance) -> None:
    """A model with ``keep: while_used`` begins asleep, wakes for a request, and sleeps again once nobody has used it
    for its ``idle_s``, with nothing left of its sandboxes. A supervisor that is killed then and comes anew leaves it
    asleep, boots the model that is always kept, and the next request wakes the sleeper."""
    changing = Changing(battered)
    try:
        changing.entry(keep="while_used", idle_s=1)
        assert changing.reload().status_code == 200
        changing.wait("asleep")
        assert _processes(NEW) == []
        assert changing.ask() == 200
        assert changing.states()[NEW] == "ready"
        assert _processes(NEW), "the control"
        changing.wait("asleep", STAY_S + WAIT_S)
        metrics = httpx.get(battered.ready["admin"] + "/metrics", verify=PLAIN).text
        counts = [line for line in metrics.splitlines() if line.startswith("athanor_model_sleeps_total{")]
        slept = [line for line in counts if NEW in line]
        assert any('"idle"' in line and line.endswith(" 1.0") for line in slept), slept
        supervisor = host_pid(battered, "supervisor")
        os.kill(supervisor, signal.SIGKILL)
        deadline = time.monotonic() + 2 * WAIT_S
        while not _came_anew(battered, supervisor) or changing.states() != {MODEL: "ready", NEW: "asleep"}:
            assert time.monotonic() < deadline, battered.tail()
            time.sleep(0.1)
        assert _processes(NEW) == []
        assert changing.ask() == changing.ask(MODEL) == 200
    finally:
        changing.clear()
        deadline = time.monotonic() + WAIT_S
        while changing.reload().status_code != 200:
            assert time.monotonic() < deadline, battered.tail()
        changing.wait(None)
