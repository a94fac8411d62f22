"""Figures of this process under Prometheus' standard names, read from ``/proc/self`` and its own limits alone.

The collector of prometheus_client computes the start from the boot time in ``/proc/stat``. A unit with
``ProcSubset=pid`` has no such file, and the collector then gives nothing at all: panels are empty, and an alert on
descriptors cannot fire.
"""

from __future__ import annotations

import errno
import os
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

OWN_PROC = Path("/proc/self")

NAME_END = b")"
"""Last byte of the program's name in ``stat``; the name may hold spaces and the same byte, the fields behind not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStat:
    """What ``/proc/self/stat`` says (proc_pid_stat(5)); seconds and bytes."""

    cpu_s: float
    """User and system time."""
    started_s: float
    """Start, in seconds of ``CLOCK_BOOTTIME``."""
    virtual_bytes: int
    resident_bytes: int


def parse_stat(text: bytes, ticks: int, page_bytes: int) -> ProcessStat:
    """Return the figures in the content of ``stat``. ``ticks``: clock ticks of a second.

    Raises:
        ValueError: no such content.
    """
    fields = text.rpartition(NAME_END)[2].split()
    try:
        user, system, started, virtual, resident = (int(fields[at]) for at in (11, 12, 19, 20, 21))
    except IndexError:
        raise ValueError(f"{len(fields)} fields behind the name in stat, fewer than proc_pid_stat(5) has") from None
    return ProcessStat(
        cpu_s=(user + system) / ticks,
        started_s=started / ticks,
        virtual_bytes=virtual,
        resident_bytes=resident * page_bytes,
    )


class ProcessFigures(Collector):
    """Collector of the six standard series. ``collect`` may run in any thread."""

    def __init__(self) -> None:
        self._ticks = os.sysconf("SC_CLK_TCK")
        # Computed once: a clock that is set later must not move the start, which would look like a restart.
        booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        self._start_time = booted + self._stat().started_s

    def collect(self) -> Iterator[Metric]:
        """Yield the figures of now.

        Raises:
            OSError: ``/proc/self`` cannot be read, for another reason than that all descriptors are in use.
        """
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        most = float("inf") if limit == resource.RLIM_INFINITY else float(limit)
        yield GaugeMetricFamily("process_max_fds", "Maximum number of open file descriptors.", value=most)
        yield GaugeMetricFamily(
            "process_start_time_seconds",
            "Start time of the process since unix epoch in seconds.",
            value=self._start_time,
        )
        try:
            # The folder's own descriptor is in the list.
            num_open = float(len(os.listdir(OWN_PROC / "fd")) - 1)
            stat = self._stat()
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
            # The figure that an alert needs most is known exactly when nothing can be opened any more.
            yield _open_fds(most)
            return
        yield _open_fds(num_open)
        for name, meaning, value in (
            ("process_virtual_memory_bytes", "Virtual memory size in bytes.", stat.virtual_bytes),
            ("process_resident_memory_bytes", "Resident memory size in bytes.", stat.resident_bytes),
        ):
            yield GaugeMetricFamily(name, meaning, value=float(value))
        yield CounterMetricFamily(
            "process_cpu_seconds_total", "Total user and system CPU time spent in seconds.", value=stat.cpu_s
        )

    def _stat(self) -> ProcessStat:
        return parse_stat((OWN_PROC / "stat").read_bytes(), self._ticks, resource.getpagesize())


def _open_fds(count: float) -> Metric:
    return GaugeMetricFamily("process_open_fds", "Number of open file descriptors.", value=count)
