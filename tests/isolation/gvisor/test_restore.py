"""Sandboxes restored from a checkpoint, under a real gVisor: the walls of a started one, numbers of their own."""

from __future__ import annotations

import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from isolation.errors import IsolationError, SandboxStartError
from isolation.gvisor.gvisor_runtime import GvisorRuntime
from isolation.gvisor.runtime import Sandbox
from isolation.gvisor.snapshot import save_template
from isolation.gvisor.spec import Mount
from tests.engine.sandbox.test_lockdown import check_report
from tests.isolation.gvisor.test_gvisor import leftovers, nothing_left

pytestmark = pytest.mark.runsc

WAITS = "waits"
MEET = f"""
import os, sys, time
if not os.path.exists("/ipc/go"):
    print("{WAITS}", flush=True)
    while not os.path.exists("/ipc/go"):
        time.sleep(0.01)
"""
"""Wait for a file; at once behind it where it is there from the start."""

DRAW = "import json, random, tempfile; from engine.sandbox.reseed import reseed; next(tempfile._get_candidate_names())"
TELL = (
    "\nprint(json.dumps([random.random(), next(tempfile._get_candidate_names()), os.urandom(4).hex(),"
    " time.monotonic(), time.time(), hash('x'), len(os.listdir('/proc/self/task'))]), flush=True)\n"
)
LOCKDOWN_PROBE = Path(__file__).resolve().parents[2] / "engine" / "sandbox" / "lockdown_probe.py"


@pytest.fixture
def meeting(tmp_path: Path) -> Path:
    """A folder whose guests find nobody, with a folder in which they do beside it."""
    for name in ("empty", "met"):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(0o755)
    (tmp_path / "met" / "go").write_text("")
    (tmp_path / "image").mkdir()
    return tmp_path


def save(runtime: GvisorRuntime, make_spec, meeting: Path, code: str, **limits) -> Path:
    """A checkpoint of this program at its meeting point."""
    spec = make_spec("template", code, mounts=[Mount(meeting / "empty", "/ipc")], **limits)
    save_template(runtime, spec, meeting / "image", waits_line=WAITS, timeout_s=30.0)
    return meeting / "image"


def printed(sandbox: Sandbox, within_s: float = 10.0) -> str:
    """The line of JSON that it printed; the thread that reads its pipe may come to it after its end."""
    deadline = time.monotonic() + within_s
    while True:
        for line in sandbox.output_tail():
            if line[0] in "[{":
                return line
        assert time.monotonic() < deadline, sandbox.output_tail()
        time.sleep(0.01)


def restore(runtime: GvisorRuntime, make_spec, meeting: Path, code: str, name: str, image: Path | None, **limits):
    """What a copy prints, as JSON; with None as the image, what a started one does."""
    spec = make_spec(name, code, mounts=[Mount(meeting / "met", "/ipc")], **limits)
    sandbox = runtime.boot(spec, image=image)
    try:
        assert sandbox.wait(60.0) == 0, sandbox.output_tail()
        return json.loads(printed(sandbox))
    finally:
        sandbox.delete()


def test_the_walls_are_those_of_a_started_one(runtime, make_spec, probe_code, meeting, run_dir) -> None:
    """The same program says the same of everything it can see and do, whether it was started or restored."""
    code = MEET + "sys.argv = ['', 'inside', '9', '192.0.2.1', '9', '/etc/passwd', '/root']\n" + probe_code
    image = save(runtime, make_spec, meeting, code)
    cold = restore(runtime, make_spec, meeting, code, "cold", None)
    assert restore(runtime, make_spec, meeting, code, "left-warm", image) == cold
    assert cold["writes"]["/opt/python/lib/x"] != "ok", "the probe tries something"
    assert nothing_left(run_dir), leftovers(run_dir)


def test_the_host_side_is_confined_as_ever(runtime, make_spec, meeting) -> None:
    """The restored sandbox's process has the rights, the filter and the cgroups of a started one."""
    code = MEET + "print('up', flush=True); time.sleep(60)"
    image = save(runtime, make_spec, meeting, code)
    told = []
    for name, begin in (("cold", None), ("warm", image)):
        up = threading.Event()
        spec = make_spec(name, code, mounts=[Mount(meeting / "met", "/ipc")])
        sandbox = runtime.boot(spec, lambda line, up=up: up.set() if line == "up" else None, begin)
        try:
            assert up.wait(30), sandbox.output_tail()
            lines = Path(f"/proc/{sandbox.pid}/status").read_text().splitlines()
            wanted = ("Uid", "Gid", "CapEff", "CapPrm", "Seccomp", "NoNewPrivs")
            groups = Path(f"/proc/{sandbox.pid}/cgroup").read_text().replace(name, "NAME")
            told.append([groups, *(line for line in lines if line.partition(":")[0] in wanted)])
        finally:
            sandbox.delete()
    assert told[0] == told[1]


def test_a_copys_pages_count_as_its_memory(runtime, make_spec, meeting) -> None:
    """What a checkpoint brings along is held against the limit: too large a copy ends, and nothing else does."""
    if "memory" not in runtime.cgroups.enforced:
        pytest.skip(runtime.cgroups.describe())
    code = "ballast = bytes(range(1, 256)) * (1 << 20)\n" + MEET + "print([len(ballast)])"
    image = save(runtime, make_spec, meeting, code)
    restore(runtime, make_spec, meeting, code, "fits", image)
    sandbox = None
    try:
        spec = make_spec("large", code, mounts=[Mount(meeting / "met", "/ipc")], memory_mib=128)
        sandbox = runtime.boot(spec, image=image)
        assert sandbox.wait(30.0) != 0
    except SandboxStartError:
        pass
    finally:
        if sandbox is not None:
            sandbox.delete()


@pytest.mark.parametrize("few", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_restored_program_locks_itself_down(runtime, make_spec, meeting, few: bool) -> None:
    """Behind the meeting point gVisor takes the engine's filter and enforces it, call by call."""
    code = MEET + f"sys.argv += {['engine only', *['few'] * few]}\n" + LOCKDOWN_PROBE.read_text()
    image = save(runtime, make_spec, meeting, code)
    check_report(restore(runtime, make_spec, meeting, code, "lockdown", image), text=False, few=few)


def test_copies_draw_numbers_of_their_own(runtime, make_spec, meeting) -> None:
    """Seeded anew two copies draw differently; the control: without that they draw alike. Clocks are right in both."""
    code = DRAW + MEET + "if os.path.exists('/ipc/seed'): reseed()" + TELL
    image = save(runtime, make_spec, meeting, code)
    same = [restore(runtime, make_spec, meeting, code, f"same-{count}", image) for count in range(2)]
    (meeting / "met" / "seed").write_text("")
    own = [restore(runtime, make_spec, meeting, code, f"own-{count}", image) for count in range(2)]
    assert same[0][:2] == same[1][:2], "the control: copies begin alike"
    assert own[0][0] != own[1][0]
    assert own[0][1] != own[1][1]
    assert len({one[2] for one in (*same, *own)}) == 4, "the kernel's numbers are fresh in any case"
    assert {one[5] for one in (*same, *own)} == {same[0][5]}, "what SECURITY.md says is shared"
    assert abs(own[1][4] - __import__("time").time()) < 60
    assert own[1][3] > 0


@pytest.mark.parametrize("copies", [6, pytest.param(12, marks=pytest.mark.full)])
def test_many_at_once(runtime, make_spec, meeting, run_dir, copies: int) -> None:
    """Copies of one checkpoint come up beside each other, and nothing is left of them."""
    code = DRAW + MEET + "reseed()" + TELL
    image = save(runtime, make_spec, meeting, code)
    with ThreadPoolExecutor(copies) as pool:
        found = list(
            pool.map(lambda count: restore(runtime, make_spec, meeting, code, f"left-{count}", image), range(copies))
        )
    assert len({one[0] for one in found}) == copies
    assert nothing_left(run_dir), leftovers(run_dir)


LOOK = """
import mmap
found = {}
for top, _, names in os.walk("/model"):
    for name in names:
        with open(os.path.join(top, name), "rb") as file:
            found[os.path.join(top, name)] = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)[:].decode()
for place in ("/model/new", *found):
    try:
        open(place, "r+b" if place in found else "wb")
        found["written"] = place
    except OSError:
        pass
import json
print(json.dumps(found), flush=True)
"""


def test_a_copy_has_files_that_its_checkpoint_lacks(runtime, make_spec, meeting, run_dir) -> None:
    """Two copies of one checkpoint with an empty folder have each its own files there, under any names, mapped as read,
    and no way to write; nothing else of the host's folder shows. A third without files finds none. A started sandbox
    sees the same as a copy, and the files of the host are as they were."""
    if not runtime.fills_folders:
        pytest.skip("this runsc compares the mounts of a restore with those of its checkpoint")
    code = MEET + LOOK

    def spec(name: str, met: str, files: dict[str, str]):
        mounts = [Mount(meeting / met, "/ipc")]
        for inside, text in files.items():
            path = meeting / "files" / name / inside
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            path.with_name("private").write_text("of nobody")
            mounts.append(Mount(path, f"/model/{inside}"))
        return replace(make_spec(name, code, mounts=mounts), folders=("/model",))

    save_template(runtime, spec("template", "empty", {}), meeting / "image", waits_line=WAITS, timeout_s=30.0)
    ours = {"left-one": {"config": "of one"}, "left-two": {"config": "of two", "sub/weights": "of two too"}, "left": {}}
    for name, files in ours.items():
        for image in (meeting / "image", None):
            one = spec(name, "met", files)
            sandbox = runtime.boot(one, image=image)
            try:
                assert sandbox.wait(60.0) == 0, sandbox.output_tail()
                assert json.loads(printed(sandbox)) == {f"/model/{inside}": text for inside, text in files.items()}
            finally:
                sandbox.delete()
            assert all((meeting / "files" / name / inside).read_text() == text for inside, text in files.items())
    assert nothing_left(run_dir), leftovers(run_dir)


@pytest.mark.parametrize("harm", ["cut", "state", "empty"])
def test_damage_that_nobody_looked_for_is_no_sandbox(runtime, make_spec, meeting, run_dir, harm: str) -> None:
    """runsc refuses a checkpoint that was cut, changed or is missing: a typed error, and nothing is left."""
    image = save(runtime, make_spec, meeting, MEET)
    for path in image.iterdir():
        if harm == "empty":
            path.unlink()
        elif path.name == "checkpoint.img":
            data = path.read_bytes()
            path.write_bytes(data[: len(data) // 2] if harm == "cut" else data[:200] + bytes(64) + data[264:])
    spec = make_spec("left-harm", MEET, mounts=[Mount(meeting / "met", "/ipc")])
    with pytest.raises(SandboxStartError, match="did not come up") as caught:
        runtime.boot(spec, image=image)
    assert nothing_left(run_dir), (leftovers(run_dir), getattr(caught.value, "__notes__", []))


def test_a_sandbox_of_another_shape_is_another_identity(runtime, make_spec) -> None:
    """Name, place, limits and processors do not matter to a checkpoint; program, environment and mounts do."""
    spec = make_spec("one", MEET)
    same = replace(spec, name="two", limits=replace(spec.limits, cpu_quota_cores=0.5), cpus=(0,))
    assert runtime.identity(spec) == runtime.identity(same)
    others = [
        replace(spec, argv=(*spec.argv, "x")),
        replace(spec, env=(*spec.env, ("X", "y"))),
        replace(spec, mounts=(Mount(Path("/usr"), "/usr"),)),
        replace(spec, limits=replace(spec.limits, memory_bytes=1 << 30)),
    ]
    assert len({runtime.identity(one) for one in (spec, *others)}) == 5


def test_a_template_that_never_waits_is_an_error(runtime, make_spec, meeting, run_dir) -> None:
    """One that ends, hangs or is not wanted any more is told, and nothing of it is left."""
    mounts = [Mount(meeting / "empty", "/ipc")]
    for code, timeout_s, stop in (
        ("print('other words')", 20.0, False),
        ("import time; time.sleep(60)", 0.5, False),
        ("import time; time.sleep(60)", 60.0, True),
    ):
        wish = threading.Event()
        if stop:
            wish.set()
        with pytest.raises(IsolationError, match="did not come to the point"):
            save_template(
                runtime,
                make_spec("left-never", code, mounts=mounts),
                meeting / "image",
                waits_line=WAITS,
                timeout_s=timeout_s,
                stop=wish,
            )
    assert os.listdir(meeting / "image") == []
    assert nothing_left(run_dir), leftovers(run_dir)
