"""What the sections of ``bench/gpu.py`` share: budgets of time, results written as they come, bars and verdicts."""

from __future__ import annotations

import ctypes
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch


class OutOfTimeError(Exception):
    """A section has used its time."""


@dataclass(frozen=True, slots=True)
class Bar:
    """What a figure has to reach."""

    name: str
    least: float | None = None
    most: float | None = None

    def verdict(self, figure: float | None) -> str:
        """``met``, ``missed``, or ``no figure``."""
        if figure is None:
            return "no figure"
        low = self.least is not None and figure < self.least
        return "missed" if low or (self.most is not None and figure > self.most) else "met"


BARS = {
    "decode_share_batch_1": Bar("batch-1 decode, share of measured HBM bandwidth", least=0.80),
    "attention_decode_share": Bar("attention decode on mixed lengths, share of HBM bandwidth", least=0.85),
    "attention_prefill_ratio": Bar("prefill attention over the best library kernel", least=0.75),
    "over_transformers": Bar("tokens/s at 64 streams over transformers' continuous batching", least=1.0),
    "host_ms_per_step": Bar("host processor time of a decode step, ms", most=0.30),
    "host_cores_at_200": Bar("host cores at 200 streams", most=0.25),
    "cold_start_s": Bar("process start to first token from tmpfs, s", most=8.0),
    "utilisation_saturated": Bar("GPU utilisation on the trace at saturation", least=0.80),
    "taken_after_ready": Bar("pieces of memory that a warm engine took from the driver", most=0.0),
    "loops_equal": Bar("share of schedules on which the graph loop and the eager loop agree", least=1.0),
}


@dataclass(slots=True)
class Report:
    """Results, in a file of JSON lines from the moment that they are known."""

    path: Path
    toy: bool
    device: torch.device
    began: float = field(default_factory=time.monotonic)
    figures: dict[str, float] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    deadline: float = 0.0
    """When the running section has to be over."""

    def put(self, section: str, **values: object) -> None:
        """Write one result."""
        line = {"section": section, "at_s": round(time.monotonic() - self.began, 2), **values}
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)

    def figure(self, name: str, value: float) -> None:
        """A figure that a bar asks for."""
        self.figures[name] = value
        self.put("bar", name=name, figure=value, verdict=BARS[name].verdict(value))

    def left(self) -> float:
        """Seconds that the running section still has."""
        return self.deadline - time.monotonic()

    def check(self) -> None:
        """Raise ``OutOfTimeError`` when the section's time is over."""
        if self.left() <= 0:
            raise OutOfTimeError

    def summary(self) -> str:
        """The table at the end: a verdict per bar, and the sections that failed."""
        lines = [f"{'bar':66} {'figure':>10}  wanted      verdict"]
        for key, bar in BARS.items():
            figure = self.figures.get(key)
            wanted = f">= {bar.least}" if bar.least is not None else f"<= {bar.most}"
            shown = "-" if figure is None else f"{figure:.3f}"
            verdict = bar.verdict(figure)
            if self.toy and figure is not None and key != "loops_equal":
                verdict = "toy size"
            lines.append(f"{bar.name:66} {shown:>10}  {wanted:10}  {verdict}")
        lines += [f"section {name} failed: {reason}" for name, reason in self.failures.items()]
        return "\n".join(lines)


def synchronise(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(run: Callable[[], object], report: Report, *, rounds: int = 20, warm: int = 3) -> float:
    """Median seconds of a call: by events on a GPU, so that launches are hidden behind each other as in a step."""
    rounds, warm = (2, 1) if report.toy else (rounds, warm)
    for _ in range(warm):
        run()
    synchronise(report.device)
    taken = []
    for _ in range(rounds):
        report.check()
        if report.device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            taken.append(begin.elapsed_time(end) / 1e3)
        else:
            start = time.perf_counter()
            run()
            taken.append(time.perf_counter() - start)
    return statistics.median(taken)


MOST_PROCESSES = 64

UNKNOWN_BYTES = (1 << 64) - 1
"""What NVML says where a process's memory is not known."""


class Meter:
    """Energy and utilisation by NVML, where its library is there."""

    def __init__(self) -> None:
        self._library: ctypes.CDLL | None = None
        self._handle = ctypes.c_void_p()
        try:
            library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return
        if library.nvmlInit_v2() == 0 and library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(self._handle)) == 0:
            self._library = library

    def joules(self) -> float | None:
        """Energy since the driver was loaded."""
        if self._library is None:
            return None
        millijoules = ctypes.c_ulonglong()
        failed = self._library.nvmlDeviceGetTotalEnergyConsumption(self._handle, ctypes.byref(millijoules))
        return None if failed else millijoules.value / 1e3

    def utilisation(self) -> float | None:
        """Share of the last sample period in which a kernel ran."""
        if self._library is None:
            return None
        rates = (ctypes.c_uint * 2)()
        return None if self._library.nvmlDeviceGetUtilizationRates(self._handle, rates) else rates[0] / 100

    def used_bytes(self) -> int | None:
        """Memory of the card that is in use, by any process."""
        if self._library is None:
            return None
        memory = (ctypes.c_ulonglong * 3)()
        return None if self._library.nvmlDeviceGetMemoryInfo(self._handle, memory) else int(memory[2])

    def process_bytes(self, pid: int) -> int | None:
        """Memory of the card that one process has; None where the driver does not name it, as in a container."""
        if self._library is None or not hasattr(self._library, "nvmlDeviceGetComputeRunningProcesses_v3"):
            return None
        count, rows = ctypes.c_uint(MOST_PROCESSES), (_Process * MOST_PROCESSES)()
        if self._library.nvmlDeviceGetComputeRunningProcesses_v3(self._handle, ctypes.byref(count), rows):
            return None
        found = [int(row.used) for row in rows[: count.value] if row.pid == pid]
        return found[0] if found and found[0] != UNKNOWN_BYTES else None


class _Process(ctypes.Structure):
    """A row of NVML's table of processes."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )
