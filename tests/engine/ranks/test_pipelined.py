"""Rank 0 of a pipeline takes what is on its way for requests that have ended, also when no further step comes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from engine.backends.common.pipelined import GONE, PipelinedRunner, SentPart
from engine.core.backend import Capabilities

VOCAB = 10


class Wires:
    """Stands for the other stages: texts that they were told, and bytes that were taken from them."""

    stages = 2

    def __init__(self) -> None:
        self.queue = self
        self.texts: list[bytes] = []
        self.taken: list[int] = []

    def has_room(self, _length: int) -> bool:
        return True

    def tell(self, text: bytearray) -> None:
        self.texts.append(bytes(text))

    def receive(self, out: memoryview) -> None:
        self.taken.append(len(out))


def runner_of(wires: Wires) -> PipelinedRunner:
    """A runner whose own stage computes nothing."""
    own = SimpleNamespace(
        limits=SimpleNamespace(max_num_seqs=4),
        storage=None,
        capabilities=Capabilities(deterministic=True),
        model=SimpleNamespace(config=SimpleNamespace(hidden_size=8, vocab_size=VOCAB), dtype=torch.float32),
        forget=lambda _rows: None,
    )
    return PipelinedRunner(cast(Any, own), cast(Any, wires))


def part_of(*rows: int) -> SentPart:
    """Rows that are on their way, with logits to come."""
    return SentPart(list(rows), [], np.zeros(len(rows), dtype=np.int64), {}, best=False)


def test_results_of_rows_that_have_ended_are_taken_without_a_further_step() -> None:
    """Where all rows of the oldest parts have ended, their results are taken behind the word to forget them: else the
    last stage would wait for room and keep the rows' tokens as long as nobody asks for anything. A part with a row that
    lives, and what is behind it, stays (control)."""
    wires = Wires()
    runner = runner_of(wires)
    runner._parts = [part_of(0, 1), part_of(2), part_of(3)]
    runner.forget([1, 3])
    assert [part.rows for part in runner._parts] == [[0, GONE], [2], [GONE]]
    assert (len(wires.texts), wires.taken) == (1, [])
    runner.forget([0])
    assert [part.rows for part in runner._parts] == [[2], [GONE]]
    assert (len(wires.texts), wires.taken) == (2, [4 * 2 * VOCAB])
    runner.forget([2])
    assert not runner._parts
    assert (len(wires.texts), wires.taken[1:]) == (3, [4 * VOCAB] * 2)
