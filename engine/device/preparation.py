"""Gets ready, while weights are read, what an engine on a GPU needs besides them: CUDA's context, the kernels' code.

Reading weights is mostly waiting for a drive, and a context and Triton are mostly work of the processor. Steps are
recorded after both: the first of a bucket is computed, which weights are needed for. On the processor nothing is to be
got ready.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

KERNELS = ("engine.kernels.gpu.cache", "engine.kernels.gpu.operations")
"""Modules that load Triton, and with it its compiler's library."""


def start_context() -> None:
    """Make CUDA's context, which the first allocation does."""
    torch.zeros(1, device="cuda")


def load_kernels() -> None:
    """Load the kernels' modules."""
    for name in KERNELS:
        importlib.import_module(name)


GPU_STEPS: tuple[Callable[[], None], ...] = (start_context, load_kernels)


@contextmanager
def preparing(device: str, steps: Sequence[Callable[[], None]] = GPU_STEPS) -> Iterator[None]:
    """Run the steps in a thread beside what is inside; the thread has ended when this has.

    Args:
        device: as torch names it; on ``cpu`` there are no steps and no thread.
        steps: in their order.

    Raises:
        Whatever a step raised, unless what is inside has raised.
    """
    if not device.startswith("cuda"):
        yield
        return
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="prepare") as pool:
        prepared = pool.submit(_run, tuple(steps))
        yield
        prepared.result()


def _run(steps: tuple[Callable[[], None], ...]) -> None:
    for step in steps:
        step()
