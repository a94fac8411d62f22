"""A second queue of the device, for copies that steps do not wait for.

Steps, prompts and what is written before them run in the *main* queue, in the order in which they were started. Copies
of whole blocks run beside it. Four words keep the order between both, and the host waits for none of them:

* ``mark``: the main queue was given something that changes blocks and that the host does not wait for: blocks were
  cleaned or moved, or tokens of a cut prompt computed;
* ``follow_mark``: copies that are started from here on begin behind the last mark;
* ``follow_all``: they begin behind everything that the main queue was given so far;
* ``join``: what the main queue is given from here on begins behind all copies that were started.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from engine.backends.cuda.runtime.arena import Fence
from engine.backends.cuda.runtime.copying import CudaFence


class SideQueue(Protocol):
    """Copies between the host and the device, beside steps."""

    def carry(self, target: Tensor, source: Tensor) -> None:
        """Start a copy of the second tensor's bytes into the first one."""
        ...

    def fence(self) -> Fence:
        """A fence of this queue. All are made before anybody is served."""
        ...

    def mark(self) -> None:
        """Note in the main queue that blocks were changed by something that the host does not wait for."""
        ...

    def follow_mark(self) -> None:
        """Begin further copies behind the last mark."""
        ...

    def follow_all(self) -> None:
        """Begin further copies behind all that the main queue was given."""
        ...

    def join(self) -> None:
        """Begin what the main queue is given next behind all copies."""
        ...


class DirectQueue:
    """Copies where the host computes: each is complete when it returns."""

    def carry(self, target: Tensor, source: Tensor) -> None:
        """Copy."""
        target.copy_(source)

    def fence(self) -> Fence:
        """A fence that is always over."""
        return PassedFence()

    def mark(self) -> None:
        """There is one order."""

    def follow_mark(self) -> None:
        """There is one order."""

    def follow_all(self) -> None:
        """There is one order."""

    def join(self) -> None:
        """There is one order."""


class PassedFence:
    """See ``DirectQueue``."""

    def record(self) -> None:
        """Everything is over."""

    def over(self) -> bool:
        """Everything is over."""
        return True

    def wait(self) -> None:
        """Everything is over."""


class CudaQueue:
    """A stream beside that of the steps. Its events are made here: none is taken once an engine serves."""

    def __init__(self, device: torch.device, main: torch.cuda.Stream) -> None:
        self._main = main
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._marked, self._given, self._carried = (_event(stream) for stream in (main, main, self._stream))
        self._busy = False
        """Whether a copy was started that the main queue does not wait for yet."""

    def carry(self, target: Tensor, source: Tensor) -> None:
        """Start a copy; the host's side is page-locked."""
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        self._busy = True

    def fence(self) -> Fence:
        """An event of this stream."""
        return CudaFence(self._stream)

    def mark(self) -> None:
        """Record an event in the main stream."""
        self._marked.record(self._main)

    def follow_mark(self) -> None:
        """Have the stream wait for the last mark."""
        self._stream.wait_event(self._marked)

    def follow_all(self) -> None:
        """Have the stream wait for all that the main stream was given."""
        self._given.record(self._main)
        self._stream.wait_event(self._given)

    def join(self) -> None:
        """Have the main stream wait for all copies; nothing where it does already."""
        if self._busy:
            self._carried.record(self._stream)
            self._main.wait_event(self._carried)
            self._busy = False


def main_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A stream for steps; None where there is no GPU."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def make_side_queue(device: torch.device, main: torch.cuda.Stream | None) -> SideQueue:
    """A stream of its own where there is a GPU."""
    return DirectQueue() if main is None else CudaQueue(device, main)


def _event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    return event
