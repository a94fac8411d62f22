"""Rows that advance alone on the device give the tokens of a plain loop, whatever the schedule."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.device.loop import NOTHING, RING_STEPS, DeviceLoop
from engine.device.rows import Deltas, RowLayout
from engine.errors import ConfigurationError

BLOCK, WIDTH, ROWS, LANES, BLOCKS, VOCAB = 4, 10, 6, 4, 40, 97
PRIME = 2_147_483_647
CPU = torch.device("cpu")


def mixed(token: int | Tensor, position: int | Tensor) -> int | Tensor:
    """What a token leaves in the cache."""
    return (token * 7_919 + position * 104_729 + 12_345) % PRIME


@dataclass
class Request:
    """A prompt's tokens, when to end, and what came out."""

    prompt: list[int]
    limit: int
    stop_ids: list[int]
    output: list[int] = field(default_factory=list)

    def expected(self) -> list[int]:
        """The plain loop: one token after another, each from everything before it."""
        tokens = list(self.prompt)
        while True:
            total = sum(int(mixed(token, place)) * (place + 1) for place, token in enumerate(tokens))
            tokens.append(total % PRIME % VOCAB)
            if tokens[-1] in self.stop_ids or len(tokens) >= self.limit:
                return tokens[len(self.prompt) :]


class Cache:
    """A model whose next token depends on every number that it finds under a row's table."""

    def __init__(self) -> None:
        self.slots = torch.randint(0, PRIME, ((BLOCKS + 1) * BLOCK + 1,))

    def __call__(self, tokens: Tensor, positions: Tensor, slots: Tensor, tables: Tensor, lengths: Tensor) -> Tensor:
        self.slots.index_copy_(0, torch.where(slots < 0, len(self.slots) - 1, slots), mixed(tokens, positions))
        place = torch.arange(WIDTH * BLOCK)
        found = self.slots[tables[:, place // BLOCK] * BLOCK + place % BLOCK]
        seen = place < lengths.unsqueeze(1)
        return torch.where(seen, found * (place + 1), 0).sum(1) % PRIME % VOCAB

    def prefill(self, request: Request, blocks: list[int]) -> None:
        """All of the prompt but its last token."""
        for place, token in enumerate(request.prompt[:-1]):
            self.slots[blocks[place // BLOCK] * BLOCK + place % BLOCK] = mixed(token, place)


class Host:
    """A scheduler that runs one replay ahead: it announces and starts a replay before it has seen the last one's."""

    def __init__(self, draw: random.Random, requests: list[Request], fault: str = "") -> None:
        self.draw, self.waiting = draw, list(requests)
        self.silent, self.short = fault == "silent", fault == "short"
        self.cache = Cache()
        self.layout = RowLayout(ROWS, LANES, 2, WIDTH)
        self.loop = DeviceLoop(self.layout, self.cache, BLOCK, CPU)
        self.deltas = Deltas(self.layout)
        self.free = list(range(1, BLOCKS + 1))
        self.lanes: list[tuple[Request, int, list[int]] | None] = [None] * LANES
        self.free_rows = list(range(ROWS))
        self.ahead: dict[int, int] = {}
        self.aborted: list[Request] = []
        self.turn = 0

    def run(self) -> None:
        """Until every request has ended."""
        under_way: tuple[int, int, list[Request | None]] | None = None
        while self.waiting or any(self.lanes) or under_way:
            self.abort()
            self.admit()
            steps = self.draw.choice((1, 1, 2, 4, 8))
            self.reserve(steps)
            self.loop.announce(self.deltas)
            following = None
            if any(self.lanes):
                following = self.turn, steps, [None if lane is None else lane[0] for lane in self.lanes]
                self.loop.replay(LANES, steps)
                self.turn += steps
            if under_way:
                self.take(*under_way)
            under_way = following

    def abort(self) -> None:
        """Now and then a request is given up, while its last replay may still be under way."""
        for lane, held in enumerate(self.lanes):
            if held is not None and self.draw.random() < 0.05:
                self.aborted.append(held[0])
                self.leave(lane)

    def admit(self) -> None:
        """Requests to free lanes, with blocks for what they know."""
        for lane in range(LANES):
            if self.lanes[lane] is None and self.waiting and self.free_rows and self.draw.random() < 0.7:
                needed = -(-len(self.waiting[0].prompt) // BLOCK)
                if needed > len(self.free):
                    return
                request, row = self.waiting.pop(0), self.free_rows.pop(self.draw.randrange(len(self.free_rows)))
                self.draw.shuffle(self.free)
                blocks = [self.free.pop() for _ in range(needed)]
                self.cache.prefill(request, blocks)
                last = len(request.prompt) - 1
                self.deltas.admit(row, (request.prompt[-1], last), request.limit, request.stop_ids, blocks)
                self.deltas.lane(lane, row)
                self.lanes[lane] = request, row, blocks
                self.ahead[row] = len(request.prompt)

    def reserve(self, steps: int) -> None:
        """Blocks for all tokens that the coming replay may compute."""
        for held in self.lanes:
            if held is None:
                continue
            request, row, blocks = held
            self.ahead[row] = min(self.ahead[row] + steps, request.limit)
            while len(blocks) * BLOCK < self.ahead[row] and not self.short:
                blocks.append(self.free.pop())
                self.deltas.grow(row, len(blocks) - 1, blocks[-1])

    def take(self, first: int, steps: int, requests: list[Request | None]) -> None:
        """Tokens of a replay that is over; its ended rows leave."""
        for line in self.loop.fetch(first, steps):
            for lane, (request, token) in enumerate(zip(requests, line, strict=True)):
                if token == NOTHING or request is None or request in self.aborted:
                    continue
                request.output.append(token)
                ended = token in request.stop_ids or len(request.prompt) + len(request.output) >= request.limit
                held = self.lanes[lane]
                if ended and held is not None and held[0] is request:
                    self.leave(lane)

    def leave(self, lane: int) -> None:
        """Announce a row's end and take its blocks back; a ``silent`` host does not announce it."""
        held = self.lanes[lane]
        assert held is not None
        _, row, blocks = held
        if not self.silent:
            self.deltas.end(row)
            self.deltas.lane(lane, None)
        self.lanes[lane] = None
        self.free += blocks
        self.free_rows.append(row)


def requests_of(draw: random.Random) -> list[Request]:
    """Requests of all lengths."""
    found = []
    for _ in range(draw.randint(1, 12)):
        prompt = [draw.randrange(VOCAB) for _ in range(draw.randint(1, 12))]
        limit = len(prompt) + draw.randint(1, 26)
        found.append(Request(prompt, limit, [draw.randrange(VOCAB) for _ in range(draw.randint(0, 2))]))
    return found


@pytest.mark.parametrize("schedules", [40, pytest.param(500, marks=pytest.mark.full)])
def test_replayed_steps_give_the_tokens_of_a_plain_loop(schedules: int) -> None:
    """Arrivals, ends, aborts, blocks and the number of steps of a replay drawn at random: each request gets the tokens
    of its plain loop, an aborted one the first of them."""
    aborted = 0
    for seed in range(schedules):
        draw = random.Random(seed)
        torch.manual_seed(seed)
        requests = requests_of(draw)
        host = Host(draw, requests)
        host.run()
        aborted += len(host.aborted)
        for request in requests:
            wanted = request.expected()
            assert request.output == (wanted[: len(request.output)] if request in host.aborted else wanted), seed
    assert aborted > 0


@pytest.mark.parametrize("fault", ["silent", "short"])
def test_a_host_that_breaks_its_rules_is_noticed(fault: str) -> None:
    """Positive control: an end that is not announced, or blocks not given ahead, make tokens differ somewhere."""
    for seed in range(200):
        draw = random.Random(seed)
        torch.manual_seed(seed)
        requests = requests_of(draw)
        host = Host(draw, requests, fault)
        host.run()
        if any(request.output != request.expected() for request in requests if request not in host.aborted):
            return
    pytest.fail("no schedule noticed")


class NoLook(TorchDispatchMode):
    """Objects to what cannot be recorded: numbers that come to the host, and shapes that depend on contents."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func._schema.name
        assert name not in ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::unique"), name
        return func(*args, **(kwargs or {}))


def test_a_step_can_be_recorded() -> None:
    """No operation of a step brings a number to the host or has a shape that depends on one, and the loop's memory
    stays where it is. Control: the same look objects to one that does."""
    loop = DeviceLoop(RowLayout(ROWS, LANES, 2, WIDTH), Cache(), BLOCK, CPU)
    before = [value.data_ptr() for value in vars(loop).values() if isinstance(value, Tensor)]
    with NoLook():
        loop.replay(3, RING_STEPS + 1)
    assert before == [value.data_ptr() for value in vars(loop).values() if isinstance(value, Tensor)]
    with NoLook(), pytest.raises(AssertionError, match="nonzero"):
        torch.ones(3).nonzero()


def test_changes_travel_in_copies_of_one_size() -> None:
    """Of two changes to one address the later counts; what a copy does not need goes where nobody reads."""
    layout = RowLayout(2, 2, 1, 3)
    deltas = Deltas(layout)
    deltas.admit(1, (5, 9), 20, [7], [3, 4])
    deltas.grow(1, 1, 6)
    deltas.lane(0, 1)
    deltas.end(1)
    copies = list(deltas.copies(5))
    words = layout.fresh()
    for addresses, values in copies:
        assert len(addresses) == len(values) == 5
        words[addresses] = values
    assert len(copies) == 2 and not len(deltas) and not list(deltas.copies(5))
    assert words[: layout.first_lane].reshape(3, -1).tolist()[1] == [5, 9, 20, 1, 7, 3, 6, 0]
    assert words[layout.first_lane : layout.spare].tolist() == [1, 2]


def test_what_does_not_fit_a_line_is_refused() -> None:
    """Too many stop ids, too many blocks, or a layout without a row get an error that says so."""
    deltas = Deltas(RowLayout(2, 2, 1, 3))
    for stop_ids, blocks in (([1, 2], [3]), ([1], [3, 4, 5, 6])):
        with pytest.raises(ConfigurationError, match="room for 1 stop ids and 3 blocks"):
            deltas.admit(0, (1, 0), 9, stop_ids, blocks)
    with pytest.raises(ConfigurationError, match="at least one row"):
        RowLayout(0, 1, 1, 1)
