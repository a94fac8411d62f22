"""Prints the memory of each NVIDIA card, by NVML; a program of its own, so that a driver that hangs holds up nothing.

    python nvml_program.py /usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1

One line of JSON: a list of index, uuid, total and free bytes. Needs the standard library alone.
"""

from __future__ import annotations

import ctypes
import json
import sys

UUID_BYTES = 96
"""NVML_DEVICE_UUID_V2_BUFFER_SIZE."""


class _Memory(ctypes.Structure):
    """``nvmlMemory_t``: bytes."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def read_cards(library: str) -> list[dict[str, object]]:
    """Ask NVML for all cards that this process may see; those that do not answer are left out.

    Raises:
        OSError: the library cannot be loaded, or NVML does not start.
    """
    nvml = ctypes.CDLL(library)

    def call(name: str, *arguments: object) -> None:
        status = getattr(nvml, name)(*arguments)
        if status != 0:
            raise OSError(f"{name} gives {status}")

    call("nvmlInit_v2")
    count = ctypes.c_uint()
    call("nvmlDeviceGetCount_v2", ctypes.byref(count))
    found: list[dict[str, object]] = []
    for place in range(count.value):
        device, minor, memory = ctypes.c_void_p(), ctypes.c_uint(), _Memory()
        uuid = ctypes.create_string_buffer(UUID_BYTES)
        try:
            call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(place), ctypes.byref(device))
            call("nvmlDeviceGetMinorNumber", device, ctypes.byref(minor))
            call("nvmlDeviceGetUUID", device, uuid, ctypes.c_uint(UUID_BYTES))
            call("nvmlDeviceGetMemoryInfo", device, ctypes.byref(memory))
        except OSError:
            # A card that has fallen off the bus answers nothing, and says nothing of the others.
            continue
        text = uuid.value.decode("ascii", errors="replace")
        found.append({"index": minor.value, "uuid": text, "total": memory.total, "free": memory.free})
    return found


if __name__ == "__main__":
    try:
        print(json.dumps(read_cards(sys.argv[1])))
    except (OSError, AttributeError) as error:
        sys.exit(f"NVML: {error}")
