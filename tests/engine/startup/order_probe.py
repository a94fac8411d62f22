"""Runs the engine's program and notes in which order it meets its host and its device: ``python -m
tests.engine.startup.order_probe NOTES SOCKET [CONFIGURATION [early]]``.

One line each: ``attach`` and ``attached`` around the meeting, ``cuda NAME`` for calls that start CUDA or ask for it,
``open PATH`` for files of a driver, ``device NAME`` for the device backend's parts. With ``early`` CUDA is asked for
first, as a control.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

DRIVER = ("/dev/nvidia", "libcuda", "libnvidia-ml")
"""What names of a driver's files have in them."""

CUDA = ("is_available", "init", "_lazy_init", "device_count", "get_device_capability", "current_device", "Stream")
"""Functions of ``torch.cuda`` that ask for a device."""

LOCKED: list[bool] = []
"""Not empty from lock-down on: a file must not be written then."""

NOTES = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


def note(line: str) -> None:
    """Add a line, at once."""
    if not LOCKED:
        os.write(NOTES, f"{line}\n".encode())


def audit(event: str, arguments: tuple[Any, ...]) -> None:
    """Note files of a driver, however they are opened from Python."""
    path = arguments[0] if event in ("open", "ctypes.dlopen") and arguments else None
    if isinstance(path, str) and any(name in path for name in DRIVER):
        note(f"open {path}")


def noted(function: Callable[..., Any], line: str, after: str = "") -> Callable[..., Any]:
    """The function, noted when it is called and, with a name, when it returns."""

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        note(line)
        result = function(*args, **kwargs)
        if after:
            note(after)
        return result

    return wrapper


def main() -> int:
    """Run the program."""
    sys.addaudithook(audit)
    import torch

    for name in CUDA:
        setattr(torch.cuda, name, noted(getattr(torch.cuda, name), f"cuda {name}"))
    import engine.__main__ as program
    from engine.backends.cuda import load
    from engine.backends.cuda.runtime.simulated_ops import PlainOperations
    from engine.backends.cuda.runtime.storage import DeviceStorage

    # As where a card is visible: what only a GPU needs is imported before the host is met.
    load.visible_gpus = lambda: ("/dev/nvidia0",)
    for part in (PlainOperations, DeviceStorage):
        part.__init__ = noted(part.__init__, f"device {part.__name__}")  # type: ignore[method-assign]
    attach = program.attach

    def attaching(*args: Any, **kwargs: Any) -> Any:
        note(f"kernels {'engine.backends.cuda.kernels.operations' in sys.modules}")
        return noted(attach, "attach", "attached")(*args, **kwargs)

    program.attach = attaching
    lock_down = program._lock_down

    def locking(*args: Any) -> None:
        LOCKED.append(True)
        lock_down(*args)

    program._lock_down = locking
    arguments = sys.argv[2:]
    if arguments[2:] == ["early"]:
        torch.cuda.is_available()
        arguments.pop()
    return program.main(arguments)


if __name__ == "__main__":
    from engine.sandbox.lockdown import leave

    leave(main())
