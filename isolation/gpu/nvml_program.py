"""Prints the memory of each NVIDIA card, by NVML; a program of its own, so that a driver that hangs holds up nothing.

    python nvml_program.py /usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1

One line of JSON: a list of index, uuid, total and free bytes, and whether MIG is on. Imports nothing of ours;
``isolation.gpu.card_memory`` reads the line.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

import pynvml


def read_cards(library: str) -> list[dict[str, object]]:
    """Ask NVML for all cards that this process may see; those that do not answer are left out.

    Raises:
        OSError: the library cannot be loaded.
        pynvml.NVMLError: NVML does not start.
    """
    # The library of the loaded module, wherever it lies; by itself pynvml looks for another name.
    pynvml.nvmlLib = ctypes.CDLL(library)
    pynvml.nvmlInit()
    found: list[dict[str, object]] = []
    for place in range(pynvml.nvmlDeviceGetCount()):
        try:
            card = pynvml.nvmlDeviceGetHandleByIndex(place)
            memory = pynvml.nvmlDeviceGetMemoryInfo(card)
            index, uuid = pynvml.nvmlDeviceGetMinorNumber(card), pynvml.nvmlDeviceGetUUID(card)
        except pynvml.NVMLError:
            # A card that has fallen off the bus answers nothing, and says nothing of the others.
            continue
        mig = _cut_up(card)
        found.append({"index": index, "uuid": uuid, "total": memory.total, "free": memory.free, "mig": mig})
    return found


def _cut_up(card: Any) -> bool:
    """Whether a card is in the mode in which programs get instances of it alone; most cards have none."""
    try:
        return bool(pynvml.nvmlDeviceGetMigMode(card)[0])
    except pynvml.NVMLError:
        return False


if __name__ == "__main__":
    try:
        print(json.dumps(read_cards(sys.argv[1])))
    except (OSError, pynvml.NVMLError) as error:
        sys.exit(f"NVML: {error}")
