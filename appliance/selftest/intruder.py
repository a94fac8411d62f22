"""Results of the attacker's program in real sandboxes, and outside them as the control.

The sandbox is configured as in service (``appliance.supervisor.layout``), with the embedded model's files, its one
socket and its limits; only the program in it differs. The host offers everything that the program looks for: servers on
every kind of address, a file, a process, keys, shared memory, another sandbox's socket.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from appliance.common.catalog import embedded_model, read_model
from appliance.common.config import ApplianceConfig, ModelConfig
from appliance.selftest.targets import standing
from appliance.supervisor.layout import FOLDERS, role_threads, sandbox_spec
from isolation.errors import IsolationError
from isolation.gvisor.gvisor_runtime import GvisorRuntime
from isolation.gvisor.runsc import find_runsc
from isolation.gvisor.snapshot import save_template
from isolation.gvisor.spec import SandboxSpec
from isolation.host.process import MINIMAL_ENVIRONMENT, run
from isolation.ipc.channel import Channel
from isolation.ipc.errors import AttachError
from isolation.ipc.listener import Listener
from isolation.ipc.messages import WAITS_LINE, Role
from isolation.ipc.segment import standard_layout

PACKAGE = "appliance.selftest.redteam"
MODULES = ("base", "network", "files", "kernel", "ring")
"""Modules in loading order; none imports a later one."""

END_S = 120.0
"""Seconds for all attacks in one sandbox: most are refused at once, some wait for seconds."""

LOADER = """\
import json, os, sys, time, types
def enter(name, source):
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = []
    exec(compile(source, name, "exec"), module.__dict__)
sources, target = json.loads(sys.stdin.read() if sys.argv[1] == "-" else sys.argv[1]), json.loads(sys.argv[2])
if not os.path.exists(target["socket"]):
    sys.stderr.write(target["waits"] + "\\n")
    for _ in range(6000):
        if os.path.exists(target["socket"]):
            break
        time.sleep(0.01)
for name, source in sources:
    enter(name, source)
lock = None
if target["locked"]:
    from engine.sandbox.allowed_calls import Bells, engine_calls
    from engine.sandbox.lockdown import lock_down
    engine = lambda bells: engine_calls(bells, threads=1, generates_code=False)
    if target["locked"] == "TEXT":
        from engine.text.allowed_calls import worker_calls
    calls = engine if target["locked"] == "ENGINE" else lambda bells: worker_calls(bells, None, None)
    lock = lambda outlet: lock_down(calls(Bells(0, outlet)))
sys.modules["appliance.selftest.redteam.base"].try_all(target, lock)
"""
"""Loads the modules, for which no sandbox has files, and runs every attack."""

Findings = dict[str, dict[str, str]]
"""Result of each attack by name."""


class CannotBeShownError(Exception):
    """This machine cannot run the check; the message says why."""


def sources() -> str:
    """Return the attacker's modules in the form that the loader takes."""
    folder = Path(__file__).parent / "redteam"
    parents = [(name, "") for name in ("appliance", "appliance.selftest", PACKAGE)]
    return json.dumps(parents + [(f"{PACKAGE}.{name}", (folder / f"{name}.py").read_text()) for name in MODULES])


@contextlib.contextmanager
def gvisor() -> Iterator[GvisorRuntime]:
    """Start a runtime with real sandboxes in a new run directory.

    Raises:
        CannotBeShownError: without root or runsc.
    """
    if os.geteuid() != 0:
        raise CannotBeShownError("real sandboxes are started as root here; run it as root")
    folder = Path(tempfile.mkdtemp(prefix="ath-"))
    folder.chmod(0o755)
    try:
        try:
            runtime = GvisorRuntime(find_runsc(), folder / "run")
        except IsolationError as error:
            raise CannotBeShownError(str(error)) from error
        try:
            yield runtime
        finally:
            runtime.cleanup_stale()
            runtime.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def serving_spec(role: Role, name: str, socket_dir: Path, argv: tuple[str, ...]) -> SandboxSpec:
    """Build the specification of a role's sandbox for the embedded model, with another program in it."""
    folder = embedded_model()
    config = ApplianceConfig(
        models=(ModelConfig(name="athanor-mini", path=folder),),
        policy=folder,
        credentials=folder,
        pepper=folder,
        run_dir=socket_dir,
    )
    threads = role_threads(config, role)
    spec = sandbox_spec(config, read_model("athanor-mini", folder), role, name, socket_dir, threads)
    return replace(spec, argv=(spec.argv[0], "-s", "-S", "-P", *argv))


def inside(runtime: GvisorRuntime, role: Role, *, locked: bool = False, restored: bool = False) -> Findings:
    """Run every attack inside one sandbox, over its real socket. ``locked``: each in a process that is locked down like
    a serving engine or text worker. ``restored``: in a copy of a checkpoint taken where programs wait for the host.
    """
    with standing() as targets, tempfile.TemporaryDirectory(prefix="ath-") as outer:
        socket_dir = Path(outer) / "ipc"
        for folder in (socket_dir.parent, socket_dir):
            folder.mkdir(exist_ok=True)
            folder.chmod(0o755)
        spec = serving_spec(role, f"intruder-{role.name.lower()}", socket_dir, ("-c", LOADER, "", ""))
        if runtime.fills_folders:
            spec = replace(spec, folders=FOLDERS[role])
        mounts = [*spec.folders, *(one.target for one in spec.all_mounts())]
        lock = role.name if locked else ""
        words = targets.words(socket="/ipc/host.sock", scratch="/tmp", mounts=mounts, locked=lock)
        words["waits"] = WAITS_LINE
        spec = replace(spec, argv=(*spec.argv[:-2], sources(), json.dumps(words)))
        image = None
        if restored:
            image = Path(outer) / "image"
            image.mkdir()
            named = replace(spec.without_content(), name=f"{spec.name}-template")
            save_template(runtime, named, image, waits_line=WAITS_LINE, timeout_s=END_S)
        lines: list[str] = []
        with Listener(str(socket_dir / "host.sock")) as listener:
            sandbox = runtime.boot(spec, on_line=lines.append, image=image)
            try:
                meeting = _Meeting(listener, sandbox.peer_pids, role)
                status = sandbox.wait(END_S)
                tail = sandbox.output_tail()
            finally:
                sandbox.delete()
                whole = meeting.end()
    found = read(lines)
    if status != 0 or not found:
        raise CannotBeShownError(f"the attacker's program ended with {status}: {' / '.join(tail[-3:])}")
    # The guest's view of the segment's size comes from its own kernel; the host's view counts.
    found["ring.segment"] = {
        "attack": "ring.segment",
        "outcome": "refused" if whole else "reached",
        "said": "as the host sees it afterwards",
    }
    return found


def outside() -> Findings:
    """Run the program as a plain process, where its attacks succeed: the positive control."""
    with standing() as targets, tempfile.TemporaryDirectory(prefix="ath-") as scratch:
        words = targets.words(socket=targets.meeting, scratch=scratch, mounts=[scratch], locked="")
        argv = (sys.executable, "-c", LOADER, sources(), json.dumps(words))
        done = run(argv, timeout_s=END_S, env=MINIMAL_ENVIRONMENT, cwd=Path(scratch), check=False)
    return read(done.stdout.splitlines())


def read(lines: list[str]) -> Findings:
    """Parse the attacker's lines; other output is skipped."""
    found = {}
    for line in lines:
        if line.startswith('{"attack"'):
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                found[str(row["attack"])] = row
    return found


class _Meeting:
    """Holds the host's end of the handshake, as a supervisor does, while the attacks run."""

    def __init__(self, listener: Listener, pids: frozenset[int], role: Role) -> None:
        self._channel: Channel | None = None
        self._arguments = (listener, pids, role)
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def _accept(self) -> None:
        listener, pids, role = self._arguments
        with contextlib.suppress(AttachError):
            self._channel = listener.accept(pids, 60.0, standard_layout(), role)
        listener.close()  # like the supervisor: one handshake, then nobody listens

    def end(self) -> bool:
        """Release it; return whether the shared memory still has its original size."""
        self._thread.join()
        if self._channel is None:
            return False
        whole = os.fstat(self._channel.fds()[0]).st_size == standard_layout().size
        self._channel.close()
        return whole
