"""Copies through a fixed piece of memory: whole, in pieces, and never over the bytes of one that is still under way."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

import engine
from engine.backends.cuda.runtime import copying
from engine.backends.cuda.runtime.arena import ALIGNMENT, StretchRing
from engine.backends.cuda.runtime.copying import (
    FETCHES,
    LEAST_STRETCH,
    MOST_STRETCH,
    STRETCHES,
    ArenaCopies,
    ArenaSizes,
    CachedCopies,
    arena_sizes,
    make_copies,
)
from tests.engine.backends.cuda.runtime.shadow import POISON, LateFence, LateQueue
from tests.engine.backends.cuda.runtime.toy import CPU

SIZES = ArenaSizes(stretch=4 * ALIGNMENT, fetched=3 * ALIGNMENT, mirrored=8 * ALIGNMENT)


def arena(queue: LateQueue) -> ArenaCopies:
    """A small one, whose copies end late."""
    memory = torch.full((SIZES.total,), POISON, dtype=torch.uint8)
    return ArenaCopies(CPU, SIZES, memory, queue.fence, queue.carry)


def test_no_stretch_is_given_out_while_it_is_under_way() -> None:
    """Over drawn sizes, of stretches of which some end early and some only when they are waited for: none overlaps one
    whose fence is not over, all lie within the memory, and the host had to wait. Control: with fences that are over at
    once, some overlap."""
    for honest in (True, False):
        queue = LateQueue(random.Random(2), honest=honest)
        ring = StretchRing(16 * ALIGNMENT, [queue.fence() for _ in range(5)])
        draw = random.Random(1)
        under_way: list[tuple[int, int, int]] = []
        overlaps = 0
        for _ in range(2_000):
            size = draw.choice((1, ALIGNMENT, draw.randint(1, 16 * ALIGNMENT)))
            begin = ring.take(size)
            under_way = [one for one in under_way if one[2] > queue._done]
            assert begin >= 0 and begin + size <= ring.size and begin % ALIGNMENT == 0
            overlaps += sum(begin < last and first < begin + size for first, last, _ in under_way)
            queue.carry(torch.zeros(1, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8))
            ring.mark()
            under_way.append((begin, begin + size, queue.now()))
            assert not honest or len(under_way) <= 5
        assert (overlaps == 0) == honest
        assert (ring.num_waits > 100) == honest


def uploads(copies: ArenaCopies, draw: random.Random) -> bool:
    """Whether drawn arrays, of all sizes up to some laps of the ring, come over as they were."""
    sound = True
    for number in range(300):
        shape = (draw.choice((0, 1, 7, draw.randint(1, 900))), draw.randint(1, 3))
        values = np.full(shape, number, dtype=draw.choice((np.int64, np.int32, np.float32)))
        values[1::2] = -number
        found = copies.upload(values[:, : draw.randint(1, shape[1])])
        sound &= found.dtype == torch.from_numpy(values).dtype
        sound &= np.array_equal(found.numpy(), values[:, : found.shape[1]])
    return sound


def test_arrays_come_over_in_pieces_that_nothing_overwrites() -> None:
    """Of all sizes, those larger than a stretch in pieces, with copies that end late: what is on the device is what was
    given, and no byte changes while its copy is under way. Control: with fences that are over at once some do."""
    for honest in (True, False):
        queue = LateQueue(random.Random(3), honest=honest)
        copies = arena(queue)
        assert uploads(copies, random.Random(4))
        assert (copies.num_copies > 300) and ((copies.ring.num_waits > 0) == honest)
        queue.advance(queue.now())
        assert (queue.overwritten == 0) == honest


def test_an_array_goes_in_one_copy_up_to_a_stretch() -> None:
    """And in as few as there are stretches in it beyond."""
    for size, copies_needed in ((1, 1), (SIZES.stretch, 1), (SIZES.stretch + 1, 2), (3 * SIZES.stretch, 3), (0, 0)):
        copies = arena(LateQueue(random.Random(0)))
        copies.upload(np.zeros(size, dtype=np.uint8))
        assert copies.num_copies == copies_needed


def test_results_come_back_when_they_are_there() -> None:
    """As many as there are rooms are on their way at once and taken in any order, with what the tensors held when the
    copies were started; rooms are given out again. Control: one more is refused, and before the wait a room holds
    poison."""
    queue = LateQueue(random.Random(5))
    copies = arena(queue)
    for turn in range(20):
        sources = ([torch.full((9,), turn), torch.full((4, 3), float(turn))] * FETCHES)[:FETCHES]
        sources = [one.clone() for one in sources]
        results = [copies.fetch(one) for one in sources]
        with pytest.raises(AssertionError, match="never taken"):
            copies.fetch(sources[0])
        for one, found in zip(sources, results, strict=True):
            one.fill_(-1)
            assert (found._view.view(torch.uint8) == POISON).all()  # type: ignore[attr-defined]
        for one, found in list(zip(sources, results, strict=True))[:: 1 if turn % 2 else -1]:
            content = found.numpy()
            assert content.shape == tuple(one.shape) and (content == turn).all()
            assert found.numpy() is content


def test_parts_of_an_arena_lie_apart() -> None:
    """Stretches, rooms and mirrors fill it without an overlap; what does not fit any more is refused."""
    copies = arena(LateQueue(random.Random(6)))
    mirrors = [copies.mirror(torch.zeros(size)) for size in (1, 64, 100)]
    spans = [(0, copies.ring.size)]
    parts = [*(room.memory for room in copies._rooms), *mirrors]
    spans += [(part.data_ptr() - copies._memory.data_ptr(), part.nbytes) for part in parts]
    spans.sort()
    assert len(spans) == 1 + FETCHES + len(mirrors)
    assert all(begin + size <= after for (begin, size), (after, _) in pairwise(spans))
    assert spans[-1][0] + spans[-1][1] <= SIZES.total
    with pytest.raises(AssertionError, match="room for all"):
        copies.mirror(torch.zeros(4_096))


def test_an_arena_is_as_large_as_its_copies_ask() -> None:
    """A stretch is bounded both ways, whatever is asked for."""
    for asked, given in ((1, LEAST_STRETCH), (3 << 20, 3 << 20), (1 << 40, MOST_STRETCH)):
        sizes = arena_sizes(largest_upload=asked, fetched=100, mirrors=(1, ALIGNMENT + 1))
        assert sizes.stretch == given and sizes.mirrored == 3 * ALIGNMENT
        assert sizes.total == STRETCHES * given + FETCHES * ALIGNMENT + 3 * ALIGNMENT


def test_without_a_gpu_nothing_is_copied() -> None:
    """A CPU reads what is there, and of memory without contents nothing is fetched."""
    copies = make_copies(CPU, SIZES)
    assert isinstance(copies, CachedCopies) and not copies.fences(3)
    values, tensor = np.arange(4), torch.arange(3)
    assert copies.upload(values).data_ptr() == values.ctypes.data
    assert copies.mirror(tensor) is tensor and copies.fetch(tensor).numpy().tolist() == [0, 1, 2]
    described = CachedCopies(torch.device("meta"))
    assert described.upload(values).is_meta and described.mirror(torch.empty(3, device="meta")).shape == (3,)


@pytest.mark.parametrize("word", ["pin_memory", "cudaHostRegister", "empty_cache"])
def test_page_locked_memory_is_asked_for_in_few_places(word: str) -> None:
    """Nothing else of an engine asks for some, or gives memory of a device back: the arena, and the ring that weights
    are read through before it serves. Control: those places do."""
    found = sorted(path.name for path in Path(engine.__path__[0]).rglob("*.py") if re.search(word, path.read_text()))
    places = {"pin_memory": [Path(copying.__file__).name, "preparation.py"], "empty_cache": ["device_memory.py"]}
    assert found == places.get(word, [])


def test_the_simulated_queue_poisons_what_is_over() -> None:
    """Control of the simulation: a source is poison when its copy is over, and a write before is noticed."""
    change: list[Callable[[torch.Tensor], object]] = [lambda _: None, lambda source: source.fill_(9)]
    for noticed, touch in enumerate(change):
        queue = LateQueue(random.Random(7))
        source, target = torch.full((4,), 5, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)
        fence: LateFence = queue.fence()
        queue.carry(target, source)
        fence.record()
        touch(source)
        fence.wait()
        assert target.tolist() == [5] * 4 and source.tolist() == [POISON] * 4
        assert queue.overwritten == noticed
