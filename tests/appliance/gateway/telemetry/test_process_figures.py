"""Figures of the process: those of prometheus_client's collector, and there where that one gives nothing."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time

import pytest
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.registry import Collector

from appliance.gateway.telemetry.process_figures import ProcessFigures, parse_stat

STANDARD = {
    "process_cpu_seconds_total",
    "process_max_fds",
    "process_open_fds",
    "process_resident_memory_bytes",
    "process_start_time_seconds",
    "process_virtual_memory_bytes",
}
"""Names as Prometheus' guide for client libraries has them."""

LOOK = """
import json
from prometheus_client import CollectorRegistry, ProcessCollector
from appliance.gateway.telemetry.process_figures import ProcessFigures
from tests.appliance.gateway.telemetry.test_process_figures import figures
stock = CollectorRegistry()
ProcessCollector(registry=stock)
print(json.dumps([figures(ProcessFigures()), figures(stock)]))
"""
"""Program that shows what both collectors give."""

SHIPPED_PROC = "mount -t proc -o subset=pid,hidepid=invisible proc /proc && exec setpriv {drop} -- {python} -c {look}"
"""What ProcSubset=pid and ProtectProc=invisible of the gateway's unit do, and its unprivileged user."""


def figures(source: Collector | CollectorRegistry) -> dict[str, float]:
    """Samples of a collector by name."""
    return {sample.name: sample.value for family in source.collect() for sample in family.samples}


def test_figures_are_those_of_the_stock_collector() -> None:
    """Each of the six standard series is there, with the stock collector's value: control and reference in one."""
    stock = figures(ProcessCollector(registry=None))
    ours = figures(ProcessFigures())
    assert set(stock) == set(ours) == STANDARD
    assert ours["process_max_fds"] == stock["process_max_fds"]
    # The stock collector counts the descriptor by which it counts.
    assert ours["process_open_fds"] == stock["process_open_fds"] - 1
    # Its boot time has whole seconds.
    assert ours["process_start_time_seconds"] == pytest.approx(stock["process_start_time_seconds"], abs=2)
    for name in ("process_resident_memory_bytes", "process_virtual_memory_bytes", "process_cpu_seconds_total"):
        assert ours[name] == pytest.approx(stock[name], rel=0.1, abs=1)


def test_the_start_does_not_move() -> None:
    """Two looks give one start, of this process: between the boot and now."""
    one = ProcessFigures()
    first, later = figures(one), figures(one)
    assert first["process_start_time_seconds"] == later["process_start_time_seconds"] < time.time()
    assert later["process_cpu_seconds_total"] >= first["process_cpu_seconds_total"]


def test_figures_are_there_under_the_units_procfs() -> None:
    """In a procfs of processes alone, as another user, all six are there; control: the stock collector gives none."""
    command = [*namespaces(), "sh", "-c", SHIPPED_PROC.format(drop=drop(), python=sys.executable, look=f"'{LOOK}'")]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60, env={**os.environ, "PYTHONPATH": os.getcwd()}
    )
    if "permission denied" in done.stderr.lower() or "not permitted" in done.stderr.lower():
        pytest.skip(f"no procfs can be mounted here: {done.stderr.strip()[-200:]}")
    assert done.returncode == 0, done.stderr[-2000:]
    ours, stock = json.loads(done.stdout)
    assert set(ours) == STANDARD
    assert all(value > 0 for value in ours.values()), ours
    assert stock == {}


def namespaces() -> list[str]:
    """Program that gives a command a mount namespace of its own, with the right to mount a procfs."""
    if os.geteuid() == 0:
        return ["unshare", "--mount"]
    return ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork"]


def drop() -> str:
    """Options that take root's rights away, where there are any."""
    return "--reuid=65534 --regid=65534 --clear-groups --no-new-privs" if os.geteuid() == 0 else "--no-new-privs"


def test_all_descriptors_in_use_is_a_figure_too() -> None:
    """A process that can open nothing any more says that it has as many open as it may; control: with room again,
    it counts them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    one = ProcessFigures()
    opened: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                opened.append(os.open("/dev/null", os.O_RDONLY))
        full = figures(one)
        while opened:
            os.close(opened.pop())
        assert (full["process_open_fds"], full["process_max_fds"]) == (256, 256)
        assert figures(one)["process_open_fds"] < 256
    finally:
        while opened:
            os.close(opened.pop())
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_programs_name_may_hold_anything() -> None:
    """Fields are counted from the last bracket; content that is cut is refused."""
    fields = b" S " + b" ".join(str(number).encode() for number in range(1, 50))
    found = parse_stat(b"1 (a b) S 1) (x" + b")" + fields, ticks=100, page_bytes=4096)
    assert (found.cpu_s, found.started_s) == ((11 + 12) / 100, 19 / 100)
    assert (found.virtual_bytes, found.resident_bytes) == (20, 21 * 4096)
    with pytest.raises(ValueError, match="fewer than"):
        parse_stat(b"1 (a) S 1 2 3", ticks=100, page_bytes=4096)
