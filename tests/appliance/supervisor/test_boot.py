"""A boot against guests that hang, flood or refuse, over a real socket and a real channel; the sandbox is a thread."""

from __future__ import annotations

import os
import shutil
import socket
import threading
import time
from array import array
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from appliance.supervisor import boot as boot_module
from appliance.supervisor.boot import Booted, BootPlan, boot, end
from appliance.supervisor.gate import Latch
from appliance.supervisor.sandbox_output import MAX_CLAIM_CHARS, claimed
from appliance.supervisor.saved_start import SavedStart
from isolation.errors import SandboxStartError
from isolation.gvisor.checkpoint import Checkpoint, Stamp
from isolation.ipc.channel import Channel
from isolation.ipc.engine import RequestFailure, StepOutput
from isolation.ipc.messages import PROTOCOL_VERSION, EngineReady, FailureCode, Hello, Role
from isolation.ipc.segment import Layout
from isolation.ipc.weights_names import FILE_NAME

READY = EngineReady(vocab_size=512, max_context=256, block_size=16, num_blocks=64)


class Guest:
    """A sandbox whose program is a function of its channel."""

    def __init__(self, path: Path, program: Callable[[Channel, threading.Event], None]) -> None:
        self.name = "engine-m"
        self.pid = os.getpid()
        self.pidfd = -1
        self.peer_pids = frozenset({os.getpid()})
        self.gone = threading.Event()
        self.deleted = False
        self.said: tuple[str, ...] = ("engine holds little",)
        self._thread = threading.Thread(target=self._run, args=(path, program))
        self._thread.start()

    def _run(self, path: Path, program: Callable[[Channel, threading.Event], None]) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.connect(str(path))
            data, fds, _, _ = socket.recv_fds(sock, 65_536, 3)
        channel = Channel.guest(fds[0], fds[1], fds[2], Layout.decode(data), Role.ENGINE)
        program(channel, self.gone)
        self.gone.wait(10)
        channel.close()

    def poll(self) -> int | None:
        """Whether it was killed."""
        return -9 if self.gone.is_set() else None

    def wait(self, timeout_s: float) -> int | None:
        """The same, after a while."""
        self.gone.wait(timeout_s)
        return self.poll()

    def ending(self) -> None:
        """Not known."""

    def kill(self) -> None:
        """End the thread."""
        self.gone.set()

    def settle(self) -> None:
        """Nothing runs beside it."""

    def output_tail(self) -> tuple[str, ...]:
        """What was said."""
        return self.said

    def delete(self) -> None:
        """Join it."""
        self.gone.set()
        self._thread.join()
        self.deleted = True


class OneGuest:
    """A runtime that boots such a guest."""

    label = "gvisor/test"

    def __init__(self, program: Callable[[Channel, threading.Event], None]) -> None:
        self._program = program
        self.guest: Guest | None = None

    def boot(self, spec: Any, on_line: object = None, image: object = None, hold: Callable[[], None] = int) -> Guest:
        """Start it, once it is not held back any more."""
        hold()
        self.guest = Guest(spec.path, self._program)
        return self.guest


def attempt(
    tmp_path: Path,
    program: Callable[[Channel, threading.Event], None],
    stop: threading.Event | None = None,
    gate: Latch | None = None,
    saved: SavedStart | None = None,
) -> tuple[Booted | SandboxStartError, OneGuest, float]:
    """Boot this guest; gives the outcome, the runtime and the seconds it took."""
    directory = tmp_path / "ipc"
    spec = SimpleNamespace(path=directory / "host.sock", folders=("/model",))
    plan = BootPlan("engine-m", "m", Role.ENGINE, spec, directory, b"{}")  # type: ignore[arg-type]
    runtime = OneGuest(program)
    began = time.monotonic()
    try:
        outcome: Booted | SandboxStartError = boot(plan, runtime, stop or threading.Event(), saved, gate)  # type: ignore[arg-type]
    except SandboxStartError as error:
        outcome = error
    return outcome, runtime, time.monotonic() - began


def greet(channel: Channel, ready: EngineReady = READY) -> None:
    """An honest guest's beginning."""
    channel.send(Hello(PROTOCOL_VERSION, Role.ENGINE))
    while not channel.receive(1):
        channel.wait(1.0)
    channel.send(ready)


def answer(channel: Channel, _gone: threading.Event) -> None:
    """An honest guest: a token for the probe."""
    greet(channel)
    token(channel, _gone)


def token(channel: Channel, _gone: threading.Event) -> None:
    """Answer the probe with a token."""
    while not channel.receive(1):
        channel.wait(1.0)
    channel.send(StepOutput(array("Q", [boot_module.PROBE_ID]), array("I", [1]), b"\1"))


def test_a_guest_that_answers_is_ready_also_over_a_dead_supervisors_socket(tmp_path: Path) -> None:
    """The positive control; and a socket left by a supervisor that was killed does not stand in the way."""
    (tmp_path / "ipc").mkdir()
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(tmp_path / "ipc" / "host.sock"))
    outcome, runtime, _ = attempt(tmp_path, answer)
    assert isinstance(outcome, Booted) and outcome.ready["vocab_size"] == 512
    assert outcome.channel is not None and runtime.guest is not None
    outcome.channel.close()
    runtime.guest.delete()


def locked_kib() -> int:
    """Memory of this process that is locked."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmLck"))


@pytest.mark.parametrize("gone", [False, True], ids=["there", "gone"])
def test_mapped_weights_are_locked_until_the_end_whatever_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: bool
) -> None:
    """The weights of a copy are locked until its sandbox is removed, also where that fails. Where the checkpoint has
    gone since the copy came up, which has it mapped, the boot succeeds all the same and locks nothing."""
    folder = tmp_path / "k"
    folder.mkdir()
    (folder / FILE_NAME).write_bytes(bytes(1 << 20))
    checkpoint, verdict = Checkpoint(folder, ((FILE_NAME, 1 << 20, ""),), 1.0), Future[Stamp]()
    stamp = checkpoint.stamp()
    assert stamp is not None
    verdict.set_result(stamp)
    monkeypatch.setattr(SavedStart, "spec", lambda _self, spec: spec)

    def serve(channel: Channel, ended: threading.Event) -> None:
        greet(channel)
        if gone:
            shutil.rmtree(folder)
        token(channel, ended)

    before = locked_kib()
    outcome, runtime, _ = attempt(tmp_path, serve, saved=SavedStart(checkpoint, verdict))
    assert isinstance(outcome, Booted) and runtime.guest is not None
    assert (locked_kib() - before, outcome.weights is None) == ((0, True) if gone else (1_024, False))
    delete = runtime.guest.delete

    def fail() -> None:
        delete()
        raise SandboxStartError("it could not be removed")

    monkeypatch.setattr(runtime.guest, "delete", fail)
    with pytest.raises(SandboxStartError, match="not be removed"):
        end(outcome)
    assert locked_kib() == before and not (tmp_path / "ipc").exists()


def test_a_boot_at_a_gate_starts_no_program_and_counts_no_wait(tmp_path: Path) -> None:
    """A program starts when the gate is opened, and what it waited for others' memory is no part of its boot."""
    gate = Latch()
    gate.shut()
    timer = threading.Timer(0.5, gate.open)
    timer.start()
    outcome, runtime, took = attempt(tmp_path, answer, gate=gate)
    assert isinstance(outcome, Booted) and outcome.channel is not None and runtime.guest is not None
    assert took > 0.5 > outcome.boot_s + 0.01
    outcome.channel.close()
    runtime.guest.delete()
    timer.join()


def test_files_that_change_while_a_boot_waits_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's files are checked before its sandbox is made and again when its program may start: what has changed
    between, while it waited for memory, starts no program."""
    looks, gate = list[int](), Latch()
    gate.shut()

    def change(_files: object, _pinned: str) -> None:
        looks.append(1)
        if len(looks) > 1:
            raise SandboxStartError("a file is not what it was at the start")

    monkeypatch.setattr(boot_module, "check_model", change)
    timer = threading.Timer(0.1, gate.open)
    timer.start()
    outcome, runtime, _ = attempt(tmp_path, answer, gate=gate)
    timer.join()
    assert isinstance(outcome, SandboxStartError) and "not what it was" in str(outcome)
    assert runtime.guest is None and list(tmp_path.iterdir()) == [] and len(looks) == 2


def test_the_files_of_a_boot_that_does_not_wait_are_checked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that was only touched makes a check read the whole model, so that no boot has two without a reason."""
    looks = list[int]()
    monkeypatch.setattr(boot_module, "check_model", lambda _files, _pinned: looks.append(1))
    outcome, runtime, _ = attempt(tmp_path, answer)
    assert isinstance(outcome, Booted) and outcome.channel is not None and runtime.guest is not None
    assert looks == [1]
    outcome.channel.close()
    runtime.guest.delete()


def test_a_stop_ends_a_boot_at_a_gate(tmp_path: Path) -> None:
    """A boot that waits for memory is given up as one that loads; no program was started."""
    gate, stop = Latch(), threading.Event()
    gate.shut()
    stop.set()
    outcome, runtime, _ = attempt(tmp_path, answer, stop, gate)
    assert isinstance(outcome, SandboxStartError) and runtime.guest is None
    assert list(tmp_path.iterdir()) == []


def test_a_stop_ends_a_boot_at_once(tmp_path: Path) -> None:
    """A guest that loads for ever does not hold up a supervisor that is told to stop; nothing is left of it."""
    stop = threading.Event()
    threading.Timer(0.2, stop.set).start()
    hello = Hello(PROTOCOL_VERSION, Role.ENGINE)
    outcome, runtime, took = attempt(tmp_path, lambda channel, _gone: channel.send(hello), stop)
    assert isinstance(outcome, SandboxStartError) and took < 20
    assert runtime.guest is not None and runtime.guest.deleted
    assert list(tmp_path.iterdir()) == []


def test_a_guest_that_floods_the_probe_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames about anything but the probe, without end: the time for the probe runs all the same."""
    monkeypatch.setattr(boot_module, "PROBE_TIMEOUT_S", 0.3)

    def flood(channel: Channel, gone: threading.Event) -> None:
        from isolation.ipc.errors import RingFull

        greet(channel)
        while not gone.is_set():
            try:
                channel.send(StepOutput(array("Q"), array("I"), b""))
            except RingFull:
                time.sleep(0.001)

    outcome, _, took = attempt(tmp_path, flood)
    assert isinstance(outcome, SandboxStartError) and "did not answer" in str(outcome)
    assert took < 20


def test_a_refused_probe_is_a_failed_start_at_once(tmp_path: Path) -> None:
    """An engine that cannot run one token says so; nobody waits for the time to run out."""

    def refuse(channel: Channel, _gone: threading.Event) -> None:
        greet(channel)
        failures = (RequestFailure(boot_module.PROBE_ID, FailureCode.INTERNAL),)
        channel.send(StepOutput(array("Q"), array("I"), b"", failures=failures))

    outcome, _, took = attempt(tmp_path, refuse)
    assert isinstance(outcome, SandboxStartError) and "simplest request" in str(outcome)
    assert took < 20


def test_an_absurd_vocabulary_is_a_failed_start(tmp_path: Path) -> None:
    """A claim of four billion ids would be the gateway's memory."""
    outcome, _, _ = attempt(tmp_path, lambda channel, _gone: greet(channel, EngineReady(0xFFFF_FFFF, 8, 8, 8)))
    assert isinstance(outcome, SandboxStartError) and "claims 4294967295" in str(outcome)


def test_why_a_guest_could_not_start_is_told(tmp_path: Path) -> None:
    """Its channel ends before its process: the cause is what it said and how it ended, not that its channel ended."""

    def fail(channel: Channel, gone: threading.Event) -> None:
        channel.send(Hello(PROTOCOL_VERSION, Role.ENGINE))
        channel.close()
        threading.Timer(0.2, gone.set).start()

    outcome, runtime, _ = attempt(tmp_path, fail)
    assert isinstance(outcome, SandboxStartError)
    assert str(outcome) == "sandbox engine-m ended while starting; its last words: engine holds little"
    assert runtime.guest is not None and runtime.guest.deleted


def test_only_what_was_said_since_it_was_ready_are_last_words(tmp_path: Path) -> None:
    """A kill is not explained by what the guest said of its start; what it says later is told with its end."""
    outcome, runtime, _ = attempt(tmp_path, answer)
    assert isinstance(outcome, Booted) and outcome.channel is not None and runtime.guest is not None
    outcome.channel.close()
    runtime.guest.kill()
    assert outcome.describe_end() == "was ended"
    runtime.guest.said += ("a bus error",)
    assert outcome.describe_end() == "was ended; its last words: a bus error"
    runtime.guest.delete()


def test_what_an_engine_computes_with_is_its_last_word_on_it() -> None:
    """The rest of the line, cut; another sandbox, or none that says so, says nothing."""
    lines = ("engine computes with plain operations", "engine computes with compiled kernels", "engine holds little")
    assert claimed(lines) == "compiled kernels"
    assert claimed(("text is ready",)) == claimed(()) == ""
    assert len(claimed((f"engine computes with {'x' * 1_000}",))) == MAX_CLAIM_CHARS
