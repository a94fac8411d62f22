"""Prints what NVML tells of some NVIDIA cards, a line of JSON every few seconds.

    python reader.py LIBRARY PERIOD_S MINOR...

A program of its own: NVML is code of the driver, which may hang in the kernel, where no signal ends it, or crash;
neither holds up the supervisor. It ends when nothing reads its lines, and when the driver has gone or is another one
than its library is for. Imports nothing of ours; ``appliance.supervisor.cards.samples`` reads the lines.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pynvml

MAX_PLACES = 64
"""Most cards that are looked at to find those that are asked for: no machine has more."""

MAX_PROCESSES = 256
"""Most processes told of one card; the rest is told as a number."""

MIN_GAP_S = 1.0
"""Least seconds between two lines, however many events come."""

OVER = ("DriverNotLoaded", "LibraryNotFound", "LibRmVersionMismatch", "Uninitialized")
"""Errors after which this process can learn nothing more: the driver was unloaded or replaced."""

STATES = {"GpuIsLost": "lost", "ResetRequired": "reset"}
"""Errors that say what a card is; any other says only that one question has no answer."""


class OpenCard:
    """One card that is asked for."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.uuid = ""
        self.place = -1
        """Position among NVML's cards, where it was last found."""
        self.address = 0
        """Address of its handle, by which events name it."""
        self.follows = False
        """Whether its Xid events are told."""
        self.xids: Counter[int] = Counter()
        self.last_xid = 0


def error_name(error: Exception) -> str:
    """Name of an error of NVML without its prefix."""
    return type(error).__name__.removeprefix("NVMLError_")


def ask(question: Callable[..., Any], *arguments: Any) -> Any:
    """Answer of a question, or None where NVML has none.

    Raises:
        NVMLError: it says that the card is lost or has to be reset, or that the driver has gone.
    """
    try:
        return question(*arguments)
    except pynvml.NVMLError as error:
        if error_name(error) in (*OVER, *STATES):
            raise
        return None


def read_figures(handle: Any) -> dict[str, int]:
    """Numbers of one card; one that NVML does not tell is left out."""
    found: dict[str, int | None] = {}
    if (memory := ask(pynvml.nvmlDeviceGetMemoryInfo, handle)) is not None:
        found |= {"memory_total_bytes": memory.total, "memory_used_bytes": memory.used}
    if (rates := ask(pynvml.nvmlDeviceGetUtilizationRates, handle)) is not None:
        found |= {"busy_percent": rates.gpu, "memory_busy_percent": rates.memory}
    found["power_mw"] = ask(pynvml.nvmlDeviceGetPowerUsage, handle)
    found["power_limit_mw"] = ask(pynvml.nvmlDeviceGetEnforcedPowerLimit, handle)
    found["temperature_c"] = ask(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU)
    slowdown = pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
    found["slowdown_c"] = ask(pynvml.nvmlDeviceGetTemperatureThreshold, handle, slowdown)
    uncorrected = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
    found["ecc_uncorrected"] = ask(pynvml.nvmlDeviceGetTotalEccErrors, handle, *uncorrected)
    if (rows := ask(pynvml.nvmlDeviceGetRemappedRows, handle)) is not None:
        names = "remapped_corrected", "remapped_uncorrected", "remap_pending", "remap_failed"
        found |= dict(zip(names, rows, strict=True))
    reasons = ask(pynvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
    if reasons is None:  # Its name before driver 535.
        reasons = ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
    found["clock_reasons"] = reasons
    if (mig := ask(pynvml.nvmlDeviceGetMigMode, handle)) is not None:
        found["mig"] = int(mig[0] != 0)
    return {name: int(value) for name, value in found.items() if value is not None}


def read_processes(handle: Any) -> list[list[int]] | None:
    """Processes that compute on a card, each with its bytes (-1: not told); None where NVML does not list them."""
    listed = ask(pynvml.nvmlDeviceGetComputeRunningProcesses, handle)
    if listed is None:
        return None
    return [[one.pid, -1 if one.usedGpuMemory is None else one.usedGpuMemory] for one in listed[:MAX_PROCESSES]]


class Reader:
    """The cards that are asked for, and the events of them."""

    def __init__(self, indices: list[int]) -> None:
        self._cards = {index: OpenCard(index) for index in indices}
        self._events: Any = None

    def sample(self) -> list[dict[str, Any]]:
        """Everything that NVML tells now.

        Raises:
            NVMLError: the driver has gone.
        """
        handles, lost = self._find()
        missing = [index for index in self._cards if index not in handles]
        told = []
        for index, card in self._cards.items():
            state = self._state(card, lost, len(missing)) if index in missing else "ok"
            row: dict[str, Any] = {"index": index, "state": state, "figures": {}, "processes": None}
            if index in handles:
                row |= self._of(card, handles[index])
            row |= {
                "uuid": card.uuid,
                "events": card.follows,
                "xids": sorted(card.xids.items()),
                "last_xid": card.last_xid,
            }
            told.append(row)
        return told

    def wait(self, period_s: float) -> None:
        """Wait for so long, or until soon after an event."""
        end = time.monotonic() + period_s
        while (left := end - time.monotonic()) > 0:
            if self._events is None:
                time.sleep(left)
                continue
            try:
                event = pynvml.nvmlEventSetWait(self._events, max(1, int(left * 1_000)))
            except pynvml.NVMLError as error:
                if error_name(error) != "Timeout":
                    # Events of the other cards end with those of a lost one; samples go on.
                    self._events = None
                    for card in self._cards.values():
                        card.follows = False
                        # Found anew with the next sample, which then follows it again.
                        card.address = 0
                continue
            address = ctypes.cast(event.device, ctypes.c_void_p).value
            for card in self._cards.values():
                if card.address == address and event.eventType == pynvml.nvmlEventTypeXidCriticalError:
                    card.last_xid = int(event.eventData)
                    card.xids[card.last_xid] += 1
            end = min(end, time.monotonic() + MIN_GAP_S)

    def _find(self) -> tuple[dict[int, Any], set[int]]:
        """Handles of the cards by index, and places of cards that are lost."""
        handles, lost = dict[int, Any](), set[int]()
        for place in range(min(pynvml.nvmlDeviceGetCount(), MAX_PLACES)):
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(place)
                index = pynvml.nvmlDeviceGetMinorNumber(handle)
            except pynvml.NVMLError as error:
                if error_name(error) in OVER:
                    raise
                if error_name(error) == "GpuIsLost":
                    lost.add(place)
                continue
            if index in self._cards:
                handles[index] = handle
                self._cards[index].place = place
        return handles, lost

    @staticmethod
    def _state(card: OpenCard, lost: set[int], missing: int) -> str:
        """State of a card without a handle: lost where NVML says so of its place, or of as many as are missing."""
        return "lost" if card.place in lost or (card.place < 0 and lost and len(lost) == missing) else "absent"

    def _of(self, card: OpenCard, handle: Any) -> dict[str, Any]:
        """What a card that is there tells."""
        try:
            if not card.uuid:
                card.uuid = ask(pynvml.nvmlDeviceGetUUID, handle) or ""
            address = ctypes.cast(handle, ctypes.c_void_p).value or 0
            if card.address != address:
                card.address, card.follows = address, self._follow(handle)
            return {"processes": read_processes(handle), "figures": read_figures(handle)}
        except pynvml.NVMLError as error:
            if error_name(error) in OVER:
                raise
            return {"state": STATES[error_name(error)]}

    def _follow(self, handle: Any) -> bool:
        """Ask for the Xid events of a card; whether they will be told."""
        try:
            if self._events is None:
                self._events = pynvml.nvmlEventSetCreate()
            pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, self._events)
        except pynvml.NVMLError:
            return False
        return True


def main(library: str, period_s: float, indices: list[int]) -> int:
    """Print samples until nothing reads them; the exit status is 1 once NVML can tell nothing more."""
    try:
        # The library of the loaded module, wherever it lies; by itself pynvml looks for another name.
        pynvml.nvmlLib = ctypes.CDLL(library)
        pynvml.nvmlInit()
        reader = Reader(indices)
        while True:
            print(json.dumps({"cards": reader.sample()}), flush=True)
            reader.wait(period_s)
    except BrokenPipeError:
        return 0
    except (OSError, pynvml.NVMLError) as error:
        print(f"NVML: {error}", flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2]), [int(word) for word in sys.argv[3:]]))
