"""One program of a sandbox, started without a sandbox, under load: its calls collected, or its lists enforced.

Outside of gVisor on purpose: the kernel that judges there has no reports, and a program makes the same calls. So this
is for the operator's own model, in an account that may run it, and nothing here serves anybody.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from appliance.operator.calls.engine_load import EngineLoad
from appliance.operator.calls.spill_host import SpillHost
from appliance.operator.calls.text_load import TextLoad
from engine.config import EngineConfig, TextConfig
from isolation.gvisor.environment import guest_environment
from isolation.host.process import MINIMAL_ENVIRONMENT, Child, start
from isolation.ipc.channel import Channel
from isolation.ipc.codec import Message
from isolation.ipc.errors import AttachError, PeerGoneError, ProtocolError
from isolation.ipc.listener import Listener
from isolation.ipc.messages import Configure, EngineReady, Hello, Role, TextReady
from isolation.ipc.segment import standard_layout

ATTACH_TIMEOUT_S = 120.0
"""Seconds until a program has imported everything and connects."""

READY_TIMEOUT_S = 1_800.0
"""Seconds until a model is loaded and warm, where kernels may be compiled meanwhile."""

END_TIMEOUT_S = 60.0
"""Seconds between the drain and the end."""

FORGETS = 0.000_5
"""How likely it is at each turn of a load, of which some fifty are in a second, that a tenant is to be forgotten."""

ROOT = Path(__file__).resolve().parents[3]

OBSERVED = ("-m", "appliance.operator.calls.observed")

TAIL_CHARS = 2_000
"""Characters of what a program printed that are kept: the last."""

REPORT_S = 12.0
"""Seconds for a collector to end what it looks at and to write its report."""


class Mode(StrEnum):
    """What holds after the program's lock-down."""

    COLLECT = "collect"
    """Nothing: every call is reported, which makes each some 30 us longer."""
    OUTSIDE = "outside"
    """Nothing: calls outside of the lists are reported, all others keep their speed."""
    ENFORCE = "enforce"
    """The lists."""


class Watch(Protocol):
    """What is told of a trial while it runs."""

    def started(self, pid: int) -> None:
        """The process is there: the program's own where no collector stands before it."""
        ...

    def serving(self, load: EngineLoad | TextLoad) -> None:
        """The program is ready, and this load is about to be put on it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One program and how it is tried."""

    config: EngineConfig | TextConfig
    mode: Mode
    seconds: float
    added: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    """Calls to be allowed beside the lists, by program; with ``ENFORCE`` only."""
    environment: Mapping[str, str] = field(default_factory=lambda: MINIMAL_ENVIRONMENT)
    """What the program's own environment is put on."""
    observed: Sequence[str] = OBSERVED
    """Arguments of Python before those of ``appliance.operator.calls.observed``."""
    ready_timeout_s: float = READY_TIMEOUT_S
    seed: int = 0
    watch: Watch | None = None


@dataclass(slots=True)
class TrialOutcome:
    """What came of it."""

    status: int | None = None
    """Exit status, minus a signal; None: it had to be ended."""
    ready_s: float = 0.0
    """Seconds from the start until it was ready; 0: it was never."""
    loaded_s: float = 0.0
    """Seconds from there until it was drained or had ended."""
    ended: dict[str, int] = field(default_factory=dict)
    """Requests by how they ended."""
    tokens: int = 0
    spilled: dict[str, int] = field(default_factory=dict)
    """Blocks that left the engine, came back, were absent, or came twice with other bytes; namespaces forgotten."""
    problem: str = ""
    """Why the load came to no end."""
    programs: list[dict[str, Any]] = field(default_factory=list)
    """The collector's report."""
    said: str = ""
    """The end of what the program printed."""

    @property
    def killed(self) -> bool:
        """Whether a call beyond a list ended it."""
        return self.status == -signal.SIGSYS

    @property
    def lived(self) -> bool:
        """Whether it served the whole load and ended in order."""
        return self.status == 0 and self.ready_s > 0 and not self.problem

    @property
    def outside(self) -> dict[str, list[dict[str, Any]]]:
        """Calls outside of the lists, by program, where there are some."""
        return {one["program"]: one["outside"] for one in self.programs if one["outside"]}


def run(trial: Trial) -> TrialOutcome:
    """Start the program, put load on it, drain it, and say what came of it."""
    with tempfile.TemporaryDirectory(prefix="athanor-calls-") as name:
        folder = Path(name)
        with (folder / "said").open("w+b") as said:
            outcome = _run(trial, folder, said.fileno())
            said.seek(0)
            outcome.said = said.read().decode(errors="replace")[-TAIL_CHARS:]
        report = folder / "report"
        if report.exists():
            told = json.loads(report.read_text(encoding="utf-8"))
            outcome.programs, outcome.status = told["programs"], told["status"]
    return outcome


def _run(trial: Trial, folder: Path, said: int) -> TrialOutcome:
    outcome = TrialOutcome()
    path = folder / "host.sock"
    role = Role.ENGINE if isinstance(trial.config, EngineConfig) else Role.TEXT
    with Listener(str(path)) as listener:
        began = time.monotonic()
        child = start(_command(trial, folder, path), env=_environment(trial), cwd=ROOT, stdio=said, own_group=True)
        try:
            if trial.watch is not None:
                trial.watch.started(child.pid)
            channel = listener.accept(None, ATTACH_TIMEOUT_S, standard_layout(), role)
            try:
                _serve(trial, listener, channel, outcome, began)
            except PeerGoneError:
                outcome.problem = "it ended before it was drained"
            finally:
                channel.close()
            outcome.status = child.wait(END_TIMEOUT_S)
        except (AttachError, ProtocolError, TimeoutError) as error:
            outcome.problem = str(error)
            outcome.status = child.wait(1.0)
        finally:
            _end(child)
    return outcome


def _serve(trial: Trial, listener: Listener, channel: Channel, outcome: TrialOutcome, began: float) -> None:
    """Bring the program to its readiness and put the load on.

    Raises:
        AttachError: an engine whose blocks may leave it does not connect a second time.
        PeerGoneError: it has ended.
        ProtocolError: it broke the protocol.
        TimeoutError: it is never ready.
    """
    assert isinstance(_next(channel, ATTACH_TIMEOUT_S), Hello)
    channel.send(Configure(trial.config.to_json()))
    with ExitStack() as stack:
        spill = None
        if isinstance(trial.config, EngineConfig) and trial.config.spill:
            second = listener.accept(None, ATTACH_TIMEOUT_S, standard_layout(), Role.SPILL)
            stack.callback(second.close)
            spill = SpillHost(second, trial.seed, FORGETS)
        _put_load(trial, channel, outcome, began, spill)


def _put_load(trial: Trial, channel: Channel, outcome: TrialOutcome, began: float, spill: SpillHost | None) -> None:
    """Wait until the program is ready and put the load on; raises as ``_serve``."""
    ready = _next(channel, trial.ready_timeout_s)
    outcome.ready_s = time.monotonic() - began
    load = _load(trial, ready, spill)
    served = time.monotonic()
    if trial.watch is not None:
        trial.watch.serving(load)
    try:
        load.play(channel, trial.seconds)
        last = time.monotonic() + END_TIMEOUT_S
        while time.monotonic() < last:
            channel.receive()
            channel.wait(1.0)
        raise TimeoutError(f"it was drained and did not end within {END_TIMEOUT_S:g} s")
    except PeerGoneError:
        if not load.drained:
            raise
    finally:
        outcome.loaded_s = time.monotonic() - served
        outcome.ended, outcome.tokens = dict(load.ended), load.tokens
        if spill is not None:
            outcome.spilled = spill.figures()


def _load(trial: Trial, ready: Message, spill: SpillHost | None) -> EngineLoad | TextLoad:
    if isinstance(ready, TextReady):
        return TextLoad(ready, trial.seed)
    assert isinstance(ready, EngineReady)
    assert isinstance(trial.config, EngineConfig)
    return EngineLoad(ready, min(trial.config.max_num_seqs, trial.config.max_num_batched_tokens), trial.seed, spill)


def _next(channel: Channel, timeout_s: float) -> Message:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        for message in channel.receive(1):
            return message
        channel.wait(1.0)
    raise TimeoutError(f"the program said nothing for {timeout_s:g} s")


def _command(trial: Trial, folder: Path, path: Path) -> list[str]:
    program = "engine" if isinstance(trial.config, EngineConfig) else "text"
    observed = [sys.executable, *trial.observed, program, trial.mode.value]
    if trial.mode is Mode.ENFORCE:
        if not trial.added and trial.observed == OBSERVED:
            return [sys.executable, "-m", "engine" if program == "engine" else "engine.text", str(path)]
        (folder / "added").write_text(json.dumps(trial.added), encoding="utf-8")
        return [*observed, str(folder / "added"), str(path)]
    place = str(folder / "calls.sock")
    collector = [sys.executable, "-m", "appliance.operator.calls.collector", str(folder / "report"), place]
    return [*collector, *observed, place, str(path)]


def _environment(trial: Trial) -> dict[str, str]:
    threads = trial.config.threads if isinstance(trial.config, EngineConfig) else 1
    return {
        **trial.environment,
        "PYTHONPATH": os.pathsep.join((str(ROOT), *_packages())),
        **dict(guest_environment(threads=threads)),
    }


def _packages() -> Iterable[str]:
    """Folders in which this process finds packages: the program's are the same."""
    return (path for path in sys.path if path and path != str(ROOT))


def _end(child: Child) -> None:
    """End the program and the processes behind it, which are one group. A collector writes its report first."""
    child.end(grace_s=REPORT_S)
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
