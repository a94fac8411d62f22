"""Gets an engine on a device ready while its weights are read, and records its steps meanwhile.

Reading weights is mostly waiting for a drive; all else that a start takes is work of the processor: CUDA's context,
Triton, KV memory, the recording of a step for each bucket. So the weights' memory is taken first, by the files'
headers, and filled by a thread of its own. Recordings name addresses, not numbers: what is computed while one is made
is thrown away, and a replay reads what lies there then. For that the memory has to be final, which ``WeightMemory``
checks: what is filled is what steps read, and stays it.

Every model of the device backend can be had so. Packed and quantised checkpoints are decoded into the same memory while
they are read, experts' maps lie in one piece from the first, and int8 and models of several ranks, whose weights are
made after reading, are not computed on a device at all.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType

import torch
from torch import Tensor

from engine.backends.cuda.runtime.copying import CudaFence
from engine.errors import ModelLoadError
from engine.model.checkpoint.staging import USUAL_ROUTE, RingStaging, RingTimes, Route
from engine.model.checkpoint.weights import UnreadModel

Fill = Callable[[Callable[[], bool]], None]
"""Reads weights; asks now and then whether to stop."""

OURS = "engine."
"""Modules whose objects are looked into for tensors."""


SWITCH_S = 5e-4
"""Seconds until a thread gives the interpreter to another while weights are read."""


class MovedWeightsError(AssertionError):
    """Steps were recorded on memory that is not the weights': a defect of this package."""


class Reading:
    """Weights on their way."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def over(self) -> bool:
        """Whether they are there, or will never be."""
        return self._future.done()


@contextmanager
def reading(fill: Fill) -> Iterator[Reading]:
    """Read weights in a thread beside what is inside. When this has ended the weights are there and the thread is gone.

    Raises:
        Whatever ``fill`` raised, or what is inside, which stops the reading; where both did an error of the files goes
        before, because it is what somebody can mend.
    """
    stop = threading.Event()
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights") as pool:
        future = pool.submit(fill, stop.is_set)
        try:
            yield Reading(future)
        except BaseException as error:
            stop.set()
            failure = future.exception()
            if isinstance(failure, ModelLoadError):
                raise failure from error
            raise
        future.result()


def filling(unread: UnreadModel, route: Route = USUAL_ROUTE, times: list[RingTimes] | None = None) -> Fill:
    """What fills a model. On a GPU it copies on a stream of its own and has waited for that when it ends: whatever is
    launched from then on finds the weights. It never waits for the whole device, which no recording would survive.

    Args:
        unread: the model.
        route: how weights go to a GPU. Page-locked memory is taken here, by the thread that records later, and given
            back by ``release_locked``.
        times: takes what a ring waited for.
    """
    device = unread.model.device
    if device.type != "cuda":
        return unread.fill
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    # Its memory was made zero on the stream that is the current one here.
    stream.wait_stream(torch.cuda.current_stream(device))
    memory, marks = None, []
    if route.locked:
        memory = torch.empty(route.places * route.place_bytes, dtype=torch.uint8, pin_memory=True)
        marks = [CudaFence() for _ in range(route.places)]

    def fill(stopped: Callable[[], bool]) -> None:
        nonlocal memory
        with torch.cuda.stream(stream), often_switched():
            if memory is None:
                unread.fill(stopped)
            else:
                with ThreadPoolExecutor(route.readers, thread_name_prefix="weights-read") as pool:
                    staging = RingStaging(pool, memory, marks)
                    try:
                        unread.fill(stopped, staging)
                    finally:
                        staging.close()
                memory = None
                if times is not None:
                    times.append(staging.times)
        stream.synchronize()

    return fill


@contextmanager
def often_switched() -> Iterator[None]:
    """Inside, a thread that computes in Python gives way to those that read after ``SWITCH_S``: each stretch needs the
    interpreter a few times for some microseconds, and would wait the usual 5 ms each time while steps are recorded."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def release_locked(device: torch.device) -> None:
    """Give page-locked memory that is not in use back to the driver. The thread that records calls this: torch looks
    at events meanwhile, which another thread must not do during a recording."""
    if device.type == "cuda":
        torch._C._host_emptyCache()


class WeightMemory:
    """Where the weights lie that something computes with."""

    def __init__(self, root: object, unread: UnreadModel) -> None:
        """Remember what ``root`` reads.

        Raises:
            MovedWeightsError: weights are to be filled that it does not read.
        """
        self._root = root
        self._before = memory_of(root)
        for piece in unread.checklist.pieces.values():
            for target in (home.target for home in piece.homes if home.target.numel()):
                if target.untyped_storage().data_ptr() not in self._before:
                    raise MovedWeightsError(f"{piece.name} is filled in memory that no step reads")

    def check(self) -> None:
        """Check that it reads all of that memory still. It may read more by now: operations take scratch with their
        first step.

        Raises:
            MovedWeightsError: it does not.
        """
        moved = len(self._before - memory_of(self._root))
        if moved:
            raise MovedWeightsError(
                f"of the memory that steps were recorded on, {moved} of the pieces were replaced since"
            )


def memory_of(root: object) -> frozenset[int]:
    """Addresses of the memory of all tensors that can be reached from an object through our own objects, containers and
    functions."""
    return frozenset(one.untyped_storage().data_ptr() for one in _tensors_of(root))


def bytes_of(root: object) -> int:
    """Bytes of all these tensors."""
    return sum({one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in _tensors_of(root)}.values())


def _tensors_of(root: object) -> Iterator[Tensor]:
    seen, waiting = set(), [root]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if not isinstance(one, Tensor):
            waiting.extend(_parts(one))
        elif one.numel():
            yield one


def _parts(one: object) -> Iterable[object]:
    """What an object holds."""
    if isinstance(one, dict):
        return one.values()
    if isinstance(one, list | tuple | set | frozenset):
        return one
    if isinstance(one, MethodType):
        return one.__self__, one.__func__
    if isinstance(one, FunctionType):
        return tuple(cell.cell_contents for cell in one.__closure__ or ())
    if isinstance(one, partial):
        return one.func, one.args, one.keywords
    if not type(one).__module__.startswith(OURS):
        return ()
    slots = (name for kind in type(one).__mro__ for name in getattr(kind, "__slots__", ()))
    return *getattr(one, "__dict__", {}).values(), *(getattr(one, name, None) for name in slots)
