"""Runs a step again and again: recorded once for a bucket of lanes, then replayed without its Python.

On a GPU the recording is a CUDA graph of launches. On a CPU it is a list of tensor operations with their tensors, which
behaves like one: the same memory every time, every number of the host as it was when the step was recorded, and nothing
that brings a number to the host or has a shape by one can be in it. So what would break a graph breaks a test.

A bucket's first step is computed as it is, which loads whatever is loaded lazily; the second one records it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Step = Callable[[int], object]
"""Computes one step of so many lanes. What it gives is not kept: memory of a recording that nobody holds is the next
recording's too."""

LOOKS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "item", "is_nonzero", "equal")
"""Operations that bring a number to the host, or whose shape is one."""


class UnrecordableError(AssertionError):
    """A step did something that no recording can repeat: a defect of this package."""


class Replayer(Protocol):
    """Runs steps by bucket."""

    def run(self, bucket: int) -> None:
        """One step."""
        ...

    def recorded(self, bucket: int) -> bool:
        """Whether the next step of so many lanes is a replay."""
        ...


class _Recording(Protocol):
    """A recorded step."""

    def replay(self) -> object:
        """Compute it once more, in the memory that it had."""
        ...


class EagerSteps:
    """Computes every step anew."""

    def __init__(self, step: Step) -> None:
        self._step = step

    def run(self, bucket: int) -> None:
        """One step."""
        self._step(bucket)

    def recorded(self, bucket: int) -> bool:
        """Never."""
        return False


class _Recorder:
    """Computes a bucket's first step as it is, records its second one, and replays from then on."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._recordings: dict[int, _Recording | None] = {}

    def run(self, bucket: int) -> None:
        """Run one step."""
        if bucket not in self._recordings:
            self._recordings[bucket] = None
            self._step(bucket)
            return
        found = self._recordings[bucket]
        if found is None:
            self._recordings[bucket] = self._record(bucket)
        else:
            found.replay()

    def recorded(self, bucket: int) -> bool:
        """Whether there is a recording."""
        return self._recordings.get(bucket) is not None

    @abstractmethod
    def _record(self, bucket: int) -> _Recording:
        """Compute a step and record it."""


class RecordedSteps(_Recorder):
    """Replay simulator: records tensor operations, and repeats them in the memory that they had."""

    def _record(self, bucket: int) -> _Recording:
        tape = _Tape()
        with tape:
            self._step(bucket)
        return tape


class _Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Operations in the order in which they were computed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], tuple[Tensor, ...]]] = []

    def __torch_dispatch__(
        self, func: Any, _types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name in LOOKS or _chooses(name, args):
            raise UnrecordableError(f"{name} brings a number to the host, or has a shape by one")
        given = kwargs or {}
        result = func(*args, **given)
        outputs = result if isinstance(result, tuple | list) else (result,)
        fresh = tuple(one for one in outputs if isinstance(one, Tensor))
        if func._schema.is_mutable:
            self._calls.append((func, args, given, ()))
        elif not _are_views(fresh, args):
            self._calls.append((func, args, given, fresh))
        return result

    def replay(self) -> None:
        """Repeat all operations; what they give goes where it lay the first time."""
        for func, args, kwargs, places in self._calls:
            result = func(*args, **kwargs)
            if places:
                outputs = result if isinstance(result, tuple | list) else (result,)
                for place, output in zip(places, outputs, strict=True):
                    place.copy_(output)


def _chooses(name: str, args: tuple[Any, ...]) -> bool:
    """Whether this picks numbers by a condition: how many there are the host has to know."""
    if name not in ("index", "index_put", "index_put_"):
        return False
    return any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1])


def _are_views(outputs: tuple[Tensor, ...], args: tuple[Any, ...]) -> bool:
    """Whether what came out lies in the memory of what went in: such a view is there at every replay."""
    memory = {one.untyped_storage().data_ptr() for one in args if isinstance(one, Tensor)}
    return bool(outputs) and all(one.untyped_storage().data_ptr() in memory for one in outputs if one.numel())


class GraphSteps(_Recorder):
    """CUDA graphs, one for each bucket, in one pool of memory: they never run at the same time.

    Everything runs on one stream of its own: libraries' workspaces belong to a stream, and a recording that had to take
    a new one would keep it for itself. Other threads may use the GPU while one is recorded (``thread_local``): one
    copies weights meanwhile (``engine.backends.cuda.runtime.preparation``). It may take memory and wait for its own
    stream; a wait for the whole device would end the recording ("CUDA C++ Programming Guide", prohibited and unhandled
    operations).
    """

    def __init__(self, step: Step, stream: torch.cuda.Stream) -> None:
        """``stream``: the current one whenever a step is run."""
        super().__init__(step)
        self._stream = stream
        self._pool: Any = None

    def _record(self, bucket: int) -> _Recording:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            self._step(bucket)
        # A capture computes nothing.
        graph.replay()
        return graph


def make_replayer(step: Step, stream: torch.cuda.Stream | None, *, eager: bool) -> Replayer:
    """What runs a loop's steps: graphs where there is a stream, recordings where there is none."""
    if eager:
        return EagerSteps(step)
    return RecordedSteps(step) if stream is None else GraphSteps(step, stream)
