"""Figures of the sandbox: the same engine inside gVisor and outside, an idle appliance, and what the filter costs.

``engine`` boots the engine's program twice from one configuration, behind runsc and as a plain process, pins both to
one core (``--threads`` of them) and drives them over their rings in turn (inside, outside, outside, inside); the one
that waits is stopped. Both compute in the form that the one inside has chosen.
Processor time is that of everything the sandbox is: sentry, stubs, gofer. ``idle`` compares an idle appliance with
two sandboxes in which a program sleeps for good: what those burn is runsc's own; then once more with its sandboxes
frozen. ``filter`` times a system call before and after lock-down. ``pages`` boots the engine in two sandboxes, driven
in turn as ``engine`` does: while one boots, the kernel may give shared memory, which all memory of a sandbox is,
pages of 2 MiB; while the other boots, it may not. It writes the kernel's setting, as root, and puts it back.

Run: ``python bench/sandbox.py [engine|pages|idle|filter] [--model DIR|big] [--streams 16] [--rounds 3] [--core 1]
[--threads 1]``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from appliance.supervisor.boot import Booted, BootPlan, boot, end
from appliance.supervisor.layout import GUEST_KERNELS
from bench.process_times import named_seconds, seconds, steady, tree
from bench.syscalls import Counter
from engine.backends.native.manifest import FORMS
from engine.config import EngineConfig
from isolation.gvisor.environment import guest_environment
from isolation.gvisor.gvisor_runtime import GvisorRuntime
from isolation.gvisor.runsc import find_runsc
from isolation.gvisor.runtime import Runtime
from isolation.gvisor.spec import Limits, Mount, SandboxSpec
from isolation.gvisor.unsafe_runtime import UnsafeRuntime
from isolation.image.python_rootfs import python_rootfs
from isolation.ipc.engine import Drain, StepOutput, Submit
from isolation.ipc.messages import FailureCode, Role
from isolation.ipc.sampling import Sampling
from tests.engine.support import model_config, save_model

ROOT = Path(__file__).resolve().parents[1]
MINI = ROOT / "images" / "mini" / "athanor-mini"
MEMORY_BYTES = 4 << 30
PASS_S = 0.02
"""Tokens are taken so often, as the gateway does with 32 streams (``appliance.gateway.sandboxes.flush_interval``)."""
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
SLEEP = "import signal; signal.pause()"
FILTER = """
import os, time
from engine.sandbox.allowed_calls import Bells, engine_calls
from engine.sandbox.lockdown import lock_down
def cost():
    best = 1e9
    for _ in range(20):
        begun = time.perf_counter_ns()
        for _ in range(5000):
            os.getpid()
        best = min(best, time.perf_counter_ns() - begun)
    return best / 5000
free = cost()
lock_down(engine_calls(Bells(0, 1), threads=1, generates_code=True))
print("getpid %.0f ns free, %.0f ns locked down" % (free, cost()), flush=True)
"""


@contextlib.contextmanager
def gvisor() -> Iterator[GvisorRuntime]:
    """A runtime in a run directory of its own."""
    folder = Path(tempfile.mkdtemp(prefix="ath-"))
    runtime = GvisorRuntime(find_runsc(), folder)
    try:
        yield runtime
    finally:
        runtime.close()
        shutil.rmtree(folder)


def python_spec(name: str, code: str) -> SandboxSpec:
    """A sandbox that runs some Python."""
    rootfs = python_rootfs("text")
    return SandboxSpec(
        name=name,
        argv=(rootfs.python, "-s", "-S", "-P", "-c", code),
        env=guest_environment(threads=1),
        rootfs=rootfs,
        mounts=(),
        limits=Limits(512 << 20),
    )


@contextlib.contextmanager
def sleeping(count: int) -> Iterator[list[int]]:
    """So many sandboxes in which a program sleeps for good; gives their processes, stubs aside."""
    with gvisor() as runtime, contextlib.ExitStack() as stack:
        pids: list[int] = []
        for number in range(count):
            sandbox = runtime.boot(python_spec(f"sleep-{number}", SLEEP))
            stack.callback(sandbox.delete)
            time.sleep(0.5)
            sandbox.settle()
            pids += sorted(sandbox.peer_pids | {sandbox.pid})
        time.sleep(1.0)
        yield pids


@dataclass(frozen=True)
class Guest:
    """A booted engine."""

    booted: Booted
    pids: list[int]
    vocab_size: int

    def signal(self, number: signal.Signals) -> None:
        """To all of its processes."""
        for pid in tree(self.pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def run(self, streams: int, tokens: int) -> tuple[float, float]:
        """Serve so many greedy streams: tokens a second, processor seconds."""
        channel = self.booted.channel
        assert channel is not None
        before, begun = seconds(tree(self.pids)), time.perf_counter()
        for number in range(streams):
            prompt = array("I", [(number * 7 + place) % self.vocab_size for place in range(32)])
            channel.send(
                Submit(
                    1_000 + number, bytes(32), prompt, tokens, Sampling(temperature=0.0), ignore_eos=True, retain=False
                )
            )
        live, produced = streams, 0
        while live:
            for message in channel.receive(64):
                assert isinstance(message, StepOutput)
                produced += len(message.requests)
                live -= sum(1 for finish in message.finishes if finish)
                assert not [failure for failure in message.failures if failure.code != FailureCode.ABORTED]
            if live and not channel.arm(napping=True):
                time.sleep(PASS_S)
        wall = time.perf_counter() - begun
        return produced / wall, seconds(tree(self.pids)) - before


def start(runtime: Runtime, model: Path, cores: set[int], options: argparse.Namespace, form: str) -> Guest:
    """Boot an engine on so many cores, with a thread on each; ``form``: in which it computes, empty: it chooses."""
    rootfs = python_rootfs("engine")
    isa = (("ONEDNN_MAX_CPU_ISA", options.isa),) if options.isa else ()
    folder = Path(tempfile.mkdtemp(prefix="ath-ipc-"))
    spec = SandboxSpec(
        name="engine-bench",
        argv=rootfs.argv("engine", "/ipc/host.sock"),
        env=guest_environment(threads=len(cores), extra=isa),
        rootfs=rootfs,
        mounts=(Mount(folder, "/ipc"), Mount(model, "/model"), *_kernel_mounts(options.kernels)),
        limits=Limits(MEMORY_BYTES),
    )
    configuration = EngineConfig(
        model_dir=runtime.guest_path(spec, "/model"),
        model_digest="00",
        dtype=options.dtype,
        kv_bytes=64 << 20,
        max_context=1_024,
        prefix_caching=False,
        kernels="" if options.kernels is None else runtime.guest_path(spec, GUEST_KERNELS),
        threads=len(cores),
        form=form,
    ).to_json()
    plan = BootPlan("engine-bench", "bench", Role.ENGINE, spec, folder, configuration)
    everywhere = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        booted = boot(plan, runtime, threading.Event())
    finally:
        os.sched_setaffinity(0, everywhere)
    return Guest(booted, sorted(booted.sandbox.peer_pids | {booted.sandbox.pid}), booted.ready["vocab_size"])


def _kernel_mounts(directory: Path | None) -> tuple[Mount, ...]:
    return () if directory is None else (Mount(directory.resolve(), GUEST_KERNELS),)


@contextlib.contextmanager
def model_of(options: argparse.Namespace) -> Iterator[Path]:
    """The model's directory; a large one with random weights is made where it is asked for."""
    if options.model != "big":
        yield Path(options.model)
        return
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        model.chmod(0o755)
        save_model(
            model,
            model_config(
                hidden_size=768,
                intermediate_size=2_048,
                num_layers=12,
                num_heads=12,
                num_kv_heads=4,
                head_dim=64,
                vocab_size=32_000,
                max_positions=1_024,
            ),
        )
        for file in model.iterdir():
            file.chmod(0o644)
        yield model


@contextlib.contextmanager
def huge_pages(setting: str) -> Iterator[None]:
    """Have the kernel give shared memory huge pages as the setting says, for the time of the block."""
    before = HUGE_PAGES.read_text().partition("[")[2].partition("]")[0]
    HUGE_PAGES.write_text(setting)
    try:
        yield
    finally:
        HUGE_PAGES.write_text(before)


def started(
    stack: contextlib.ExitStack, runtime: Runtime, model: Path, cores: set[int], options: argparse.Namespace, form: str
) -> Guest:
    """An engine that has served a little and is stopped until its turn comes; the stack ends it."""
    guest = start(runtime, model, cores, options, form)
    stack.callback(end, guest.booted)
    stack.callback(guest.booted.channel.send, Drain())
    stack.callback(guest.signal, signal.SIGCONT)
    guest.run(options.streams, options.tokens)
    guest.booted.sandbox.settle(busy=True)  # As the supervisor does after a busy second.
    guest.signal(signal.SIGSTOP)
    return guest


def compare(guests: dict[str, Guest], cores: set[int], options: argparse.Namespace) -> dict[str, object]:
    """Drive two engines in alternating order; the ratios are those of the first to the second."""
    everywhere = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores if options.same_core else everywhere - cores or everywhere)
    first, second = guests
    found: dict[str, list[tuple[float, float]]] = {first: [], second: []}
    for _ in range(options.rounds):
        for name in (first, second, second, first):
            guests[name].signal(signal.SIGCONT)
            time.sleep(0.2)
            found[name].append(guests[name].run(options.streams, options.tokens))
            guests[name].signal(signal.SIGSTOP)
    pairs = list(zip(found[first], found[second], strict=True))
    return {
        "model": str(options.model),
        "dtype": options.dtype,
        "isa": options.isa,
        "streams": options.streams,
        "threads": options.threads,
        "kernels": options.kernels is not None,
        "tokens_per_s": {name: [round(speed) for speed, _ in runs] for name, runs in found.items()},
        "cpu_s": {name: [round(cpu, 2) for _, cpu in runs] for name, runs in found.items()},
        "tokens_per_s_ratio": round(statistics.median(one[0] / other[0] for one, other in pairs), 3),
        "cpu_s_ratio": round(statistics.median(one[1] / other[1] for one, other in pairs), 3),
    }


def cores_of(options: argparse.Namespace) -> set[int]:
    """Cores of an engine, a thread on each."""
    everywhere = os.sched_getaffinity(0)
    return {(options.core + number) % len(everywhere) for number in range(options.threads)}


def engine(options: argparse.Namespace) -> dict[str, object]:
    """Inside against outside, in alternating order."""
    with contextlib.ExitStack() as stack:
        model, cores = stack.enter_context(model_of(options)), cores_of(options)
        unsafe = UnsafeRuntime(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        stack.callback(unsafe.close)
        inside = started(stack, stack.enter_context(gvisor()), model, cores, options, "")
        form = FORMS[inside.booted.ready["form"]]
        outside = started(stack, unsafe, model, cores, options, form)
        return compare({"inside": inside, "outside": outside}, cores, options)


def pages(options: argparse.Namespace) -> dict[str, object]:
    """Two sandboxes, one with pages of 2 MiB, in alternating order; and the memory of each."""
    with contextlib.ExitStack() as stack:
        model, cores, form = stack.enter_context(model_of(options)), cores_of(options), ""
        guests, memory = {}, {}
        for name, setting in (("2 MiB", options.setting), ("4 KiB", "never")):
            before = _meminfo()
            with huge_pages(setting):
                guests[name] = started(stack, stack.enter_context(gvisor()), model, cores, options, form)
            memory[name] = {line: (now - before[line]) >> 10 for line, now in _meminfo().items()}
            form = FORMS[guests[name].booted.ready["form"]]
        return {"memory_mib": memory, **compare(guests, cores, options)}


def _meminfo() -> dict[str, int]:
    """Shared memory of the machine, and what of it is in huge pages; KiB."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return {name[:-1]: int(value) for name, value, *_ in lines if name in ("Shmem:", "ShmemHugePages:")}


def idle(options: argparse.Namespace) -> dict[str, object]:
    """An idle appliance against two sleeping sandboxes, over the same seconds; then the same with its sandboxes
    frozen. Percent of a core, host calls a second, and the time of a first request beside that of others."""
    from tests.system.conftest import running
    from tests.system.test_freezing import AFTER_S, all_frozen, allow, ask_ms, until

    settings = {"ATHANOR_SANDBOX__FREEZE_AFTER_S": str(AFTER_S)}
    with (
        tempfile.TemporaryDirectory() as folder,
        running(Path(folder) / "state", env=settings) as appliance,
        sleeping(2) as sleepers,
    ):
        time.sleep(20.0)  # checkpoints are made in the first seconds, or later: ``steady`` waits for them
        look = partial(watched, appliance.process.pid, sleepers, options.seconds)
        awake, samples = steady((appliance.process.pid, *sleepers), look)
        found: dict[str, object] = {"awake": awake, "samples": samples}
        warm = sorted(ask_ms(appliance) for _ in range(21))
        allow(appliance, freeze=True)
        firsts = []
        for _ in range(5):
            until(lambda: all_frozen(appliance))
            firsts.append(ask_ms(appliance))
        until(lambda: all_frozen(appliance))
        found["frozen"] = look()
        found["request_ms"] = {"warm": round(warm[10], 1), "first": [round(one, 1) for one in firsts]}
    return found


def watched(appliance: int, sleepers: list[int], duration_s: float) -> dict[str, object]:
    """Processor time and host calls of an appliance and of sleeping sandboxes, over the same seconds."""
    ours, theirs = tree([appliance]), tree(sleepers)
    calls = Counter(ours), Counter(theirs)
    before = named_seconds(ours), named_seconds(theirs), [sum(one.read().values()) for one in calls]
    time.sleep(duration_s)
    after = named_seconds(ours), named_seconds(theirs), [sum(one.read().values()) for one in calls]
    shares = [
        {name: round((now[name] - then.get(name, 0.0)) / duration_s * 100, 2) for name in now}  # Some end meanwhile.
        for then, now in zip(before[:2], after[:2], strict=True)
    ]
    own, runsc = (round((now - then) / duration_s) for then, now in zip(before[2], after[2], strict=True))
    return {
        "appliance_percent": shares[0],
        "sleeping_percent": shares[1],
        "beyond_runsc_percent": round(sum(shares[0].values()) - sum(shares[1].values()), 2),
        "calls_per_s": {"appliance": own, "sleeping": runsc},
    }


def cost_of_filter(_: argparse.Namespace) -> dict[str, object]:
    """A call's time before and after lock-down, outside and inside."""
    command = [sys.executable, "-c", FILTER]
    outside = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
    with gvisor() as runtime:
        sandbox = runtime.boot(python_spec("filter", FILTER))
        sandbox.wait(60.0)
        inside = sandbox.output_tail()[-1]
        sandbox.delete()
    return {"outside": outside, "inside": inside}


def main() -> int:
    """Measure and print as JSON."""
    parser = argparse.ArgumentParser(description="Figures of the sandbox.")
    parser.add_argument("what", nargs="?", choices=("engine", "pages", "idle", "filter"), default="engine")
    parser.add_argument("--model", default=str(MINI), help="a model's directory, or 'big' for random weights")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--isa", help="oneDNN's ONEDNN_MAX_CPU_ISA for both; AVX512_CORE_BF16 leaves AMX out")
    parser.add_argument("--kernels", type=Path, help="a directory of compiled kernels")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--core", type=int, default=1, help="the engine's core, its first one")
    parser.add_argument("--threads", type=int, default=1, help="of the engine, each on a core of its own")
    parser.add_argument("--same-core", action="store_true", help="pin the driver to the engine's core too")
    parser.add_argument("--setting", choices=("within_size", "always"), default="within_size", help="of huge pages")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long an idle appliance is watched")
    options = parser.parse_args()
    work = {"engine": engine, "pages": pages, "idle": idle, "filter": cost_of_filter}[options.what]
    print(json.dumps(work(options), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
