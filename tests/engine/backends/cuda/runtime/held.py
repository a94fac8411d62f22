"""Engines whose steps are all recorded before the first weight is read, and what their recordings read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor

from engine.backends.cuda import load
from engine.backends.cuda.runtime.replay import RecordedSteps
from engine.backends.cuda.runtime.runner import DeviceRunner
from engine.model.checkpoint.weights import UnreadModel

LOOK_S = 0.02
"""Seconds after which a reading that is held back asks whether it is to stop."""


@contextmanager
def recorded_first(before: Callable[[UnreadModel], None] = lambda _: None) -> Iterator[list[UnreadModel]]:
    """Inside, weights are read only when every bucket is recorded; gives the models that were loaded so.

    Args:
        before: called when all is recorded, before the first weight is read.
    """
    models: list[UnreadModel] = []
    recorded = threading.Event()
    make, record = load.filling, DeviceRunner.record

    def held(unread: UnreadModel) -> Callable[[Callable[[], bool]], None]:
        models.append(unread)
        recorded.clear()
        fill = make(unread)

        def run(stopped: Callable[[], bool]) -> None:
            while not recorded.wait(LOOK_S):
                if stopped():
                    return
            before(unread)
            fill(stopped)

        return run

    def watched(runner: DeviceRunner, enough: Callable[[], bool]) -> None:
        record(runner, enough)
        recorded.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "filling", held)
        patch.setattr(DeviceRunner, "record", watched)
        yield models


def read_by(runner: DeviceRunner, bucket: int) -> set[int]:
    """Addresses of the memory that the operations on a bucket's tape read."""
    return {address for call in _tape(runner, bucket)._calls for given in call[1:3] for address in _addresses(given)}


def logits_of(runner: DeviceRunner, bucket: int) -> Tensor:
    """Where a bucket's recording leaves its logits: what it computes first in their shape."""
    shape = (bucket, runner.limits.vocab_size)
    return next(place for call in _tape(runner, bucket)._calls for place in call[3] if place.shape == shape)


def _tape(runner: DeviceRunner, bucket: int) -> Any:
    replayer: Any = runner._launcher._replayer
    assert isinstance(replayer, RecordedSteps)
    tape = replayer._recordings[bucket]
    assert tape is not None
    return tape


def targets_of(unread: UnreadModel) -> dict[str, set[int]]:
    """Addresses of the memory that is filled, by published name."""
    return {
        name: {home.target.untyped_storage().data_ptr() for home in piece.homes if home.target.numel()}
        for name, piece in unread.checklist.pieces.items()
    }


def _addresses(given: Any) -> Iterator[int]:
    if isinstance(given, Tensor):
        yield given.untyped_storage().data_ptr()
    elif isinstance(given, list | tuple):
        for one in given:
            yield from _addresses(one)
    elif isinstance(given, dict):
        yield from _addresses(list(given.values()))
