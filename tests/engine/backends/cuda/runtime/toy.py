"""A model whose every token depends, exactly, on all numbers that it finds under a row's block table."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from engine.backends.common.masks import MaskedLogits
from engine.backends.common.sampler import Sampler
from engine.backends.cuda.runtime.device_memory import Resources
from engine.backends.cuda.runtime.mixing import NEVER, Mixing
from engine.backends.cuda.runtime.model import ChunkTokens
from engine.backends.cuda.runtime.operations import Beside, Chunks
from engine.backends.cuda.runtime.runner import DeviceRunner
from engine.backends.cuda.runtime.simulated_ops import PlainOperations
from engine.backends.cuda.runtime.storage import DeviceStorage
from engine.backends.cuda.runtime.tables import first_seen
from engine.core.engine import Engine
from engine.core.fairness.tenancy import Fairness
from engine.core.kv.block_pool import BlockPool
from engine.core.kv.groups import divide
from engine.core.kv.layout import FULL, KvGroup, KvLayout, LayerLayout, Reach, most_blocks
from engine.core.kv.leaving import SpillChannel
from engine.core.kv.prefix_cache import PrefixCache
from engine.core.kv.spill import SpillTier
from engine.core.offline import Answer, collect
from engine.core.scheduler.limits import SchedulerLimits
from engine.core.scheduler.plan import Admission, RowMask
from engine.core.scheduler.scheduler import Scheduler
from isolation.ipc.engine import Submit
from isolation.ipc.logprob import TokenLogprobs
from isolation.ipc.messages import FailureCode
from isolation.ipc.sampling import Sampling
from tests.engine.support import GREEDY, namespace

BLOCK, VOCAB, CONTEXT, ROWS = 4, 97, 48, 5
STAGED = 3
"""Blocks on their way to the host, or back, at a time."""
REPEATED = 100
"""Between the ids of a request and of its repetition."""
PRIME = 2_147_483_647
MOST_STEPS = 2_000
"""No schedule takes as many; one that does will not end."""
CPU = torch.device("cpu")
LOGITS = 3 * torch.randn(509, VOCAB, generator=torch.Generator().manual_seed(1))
"""What a total of everything under a row's table gives."""
CLOSE = 1e-5
"""Between log-probabilities of two orders of sums in float32."""


def mixed(token: int | Tensor, position: int | Tensor) -> int | Tensor:
    """What a token leaves in the cache: never zero, so cleaned memory shows."""
    return (token * 7_919 + position * 104_729 + 12_345) % PRIME


def expected(prompt: list[int], limit: int, stop_ids: tuple[int, ...]) -> list[int]:
    """The tokens of a greedy request that asks for nothing else, of a layer that sees everything."""
    submit = Submit(1, namespace(1), array("I", prompt), limit, GREEDY, stop_ids=stop_ids)
    return plainest(submit, limit)[0]


def plainest(submit: Submit, limit: int, reaches: tuple[Reach, ...] = (FULL,)) -> tuple[list[int], list[TokenLogprobs]]:
    """The plainest loop: one token after another, each from everything before it that a layer sees, chosen by the
    sampler of the CPU's path for a batch of one."""
    tokens = list(submit.token_ids)
    sampler, masked = Sampler(1, VOCAB), MaskedLogits(frozenset())
    sampler.admit(Admission(0, array("I", tokens), len(tokens), submit.sampling, submit.logprobs, ()))
    logprobs: list[TokenLogprobs] = []
    while True:
        firsts = [reach.first_seen(len(tokens) - 1) for reach in reaches]
        seen = [place for first in firsts for place in range(first, len(tokens))]
        total = sum(int(mixed(tokens[place], place)) * (place + 1) for place in seen)
        logits = LOGITS[total % PRIME % len(LOGITS)].unsqueeze(0)
        if submit.structured:
            logits = masked.apply(logits, [0], {0: mask_of(submit.request, len(tokens) - len(submit.token_ids))})
        chosen = sampler.sample(logits, [0], np.array([len(tokens)]))
        logprobs += chosen.logprobs
        tokens += chosen.token_ids
        if tokens[-1] in submit.stop_ids or len(tokens) >= limit:
            return tokens[len(submit.token_ids) :], logprobs


def mask_of(request: int, position: int) -> RowMask:
    """What a structured request may choose at this place of its output: from one id to most."""
    draw = random.Random(1_000 * request + position)
    allowed = draw.sample(range(VOCAB), draw.choice((1, 3, 30, 90)))
    return RowMask(sum(1 << token for token in allowed).to_bytes(16, "little"), accepting=False)


class ToyOperations(PlainOperations):
    """Operations for whole numbers in float64: exact in any order."""

    exact = True


class ToyModel:
    """Keeps what tokens leave in the keys of all layers, as whole numbers in float64."""

    def __init__(self, storage: DeviceStorage) -> None:
        self._layers = storage.layers

    def decode(
        self, tokens: Tensor, positions: Tensor, slots: tuple[Tensor, ...], tables: tuple[Tensor, ...], lengths: Tensor
    ) -> Tensor:
        """Logits of every lane."""
        self._write(tokens, positions, slots)
        return self._choose(tables, lengths)

    def prefill(self, tokens: ChunkTokens, chunks: Chunks, wanted: Tensor, beside: Beside | None = None) -> Tensor:
        """Logits of the wanted tokens; those of decoding rows come first."""
        self._write(tokens.token_ids, tokens.positions, tokens.slots)
        if beside is not None:
            rows = len(beside.lengths)
            return torch.cat((self._choose(beside.tables, beside.lengths), self._chunks(tokens, chunks, wanted[rows:])))
        return self._chunks(tokens, chunks, wanted)

    def _chunks(self, tokens: ChunkTokens, chunks: Chunks, wanted: Tensor) -> Tensor:
        begins, lengths = chunks.begins.tolist(), [length for _, length in chunks.spans]
        # A token of no chunk pads a tile: what its logits are matters to nobody.
        owner = [next((i for i, b in enumerate(begins) if b <= at < b + lengths[i]), 0) for at in wanted.tolist()]
        live = chunks.lengths[owner] > 0
        tables = tuple(table[owner] for table in chunks.tables)
        return self._choose(tables, torch.where(live, tokens.positions[wanted] + 1, 0))

    def _write(self, tokens: Tensor, positions: Tensor, slots: tuple[Tensor, ...]) -> None:
        left = mixed(tokens, positions).double().view(-1, 1, 1)
        for layer in self._layers:
            layer.write(slots[layer.table], left, left)

    def _choose(self, tables: tuple[Tensor, ...], lengths: Tensor) -> Tensor:
        total = torch.zeros_like(lengths)
        for layer in self._layers:
            size = layer.keys.shape[1]
            place = torch.arange(tables[layer.table].shape[1] * size)
            found = layer.keys[tables[layer.table][:, place // size], place % size].flatten(1).long()
            first = first_seen(layer.reach, (lengths - 1).clamp(min=0)).unsqueeze(1)
            seen = (place < lengths.unsqueeze(1)) & (place >= first)
            total = total + torch.where(seen, found * (place + 1), 0).sum(1)
        return LOGITS.index_select(0, total % PRIME % len(LOGITS))


def toy_layers(reaches: tuple[Reach, ...]) -> tuple[LayerLayout, ...]:
    """A number a token and layer."""
    return tuple(LayerLayout(heads=1, key_dim=1, value_dim=1, reach=reach) for reach in reaches)


@dataclass
class Schedule:
    """Requests with the steps at which they come and, some of them, are given up."""

    blocks: int
    budget: int
    reaches: tuple[Reach, ...] = (FULL,)
    """Of the layers."""
    arrivals: dict[int, list[Submit]] = field(default_factory=dict)
    aborts: dict[int, list[int]] = field(default_factory=dict)
    slowness: float = 0.5
    """How likely it is that a mask that is waited for does not come in a step."""

    @property
    def aborted(self) -> set[int]:
        """Requests that are given up at some step, if they are still there then."""
        return {number for numbers in self.aborts.values() for number in numbers}


def draw_sampling(draw: random.Random) -> Sampling:
    """Greedy or drawn, cut or not, with penalties or without."""
    penalties = draw.choice(((1.0, 0.0, 0.0), (1.0, 0.0, 0.0), (1.4, 0.0, 0.0), (0.8, 0.5, 0.3), (1.0, -0.5, 1.5)))
    return Sampling(
        temperature=draw.choice((0.0, 0.0, 0.7, 1.2)),
        top_k=draw.choice((0, 5)),
        top_p=draw.choice((1.0, 0.8)),
        min_p=draw.choice((0.0, 0.1)),
        typical_p=draw.choice((1.0, 1.0, 0.6)),
        seed=draw.getrandbits(64),
        repetition_penalty=penalties[0],
        presence_penalty=penalties[1],
        frequency_penalty=penalties[2],
    )


def draw_schedule(seed: int, reaches: tuple[Reach, ...] = (FULL,), *, exact: float = 0.0) -> Schedule:
    """Arrivals, lengths, stop ids, shared prefixes, tenants, aborts, the pool, and what requests ask of the choice of
    their tokens, drawn at random; ``exact``: how likely a request is of the deterministic class."""
    classes = random.Random(seed + (1 << 33))
    draw, wishes = random.Random(seed), random.Random(seed + (1 << 32))
    more, budget = draw.randint(0, 18), draw.choice((ROWS, 8, 16, 64))
    tables = divide(toy_layers(reaches), BLOCK, CONTEXT) or (KvGroup(FULL, BLOCK),)
    schedule = Schedule(most_blocks(tables, CONTEXT, budget) + more // len(reaches), budget, reaches)
    schedule.slowness = wishes.choice((0.0, 0.3, 0.8))
    prefix = [draw.randrange(VOCAB) for _ in range(12)]
    for number in range(1, draw.randint(2, 12)):
        own = [draw.randrange(VOCAB) for _ in range(draw.randint(1, 20))]
        prompt = prefix[: draw.choice((0, 0, 8, 12))] + own
        step = draw.randint(0, 40)
        stops = tuple(draw.randrange(VOCAB) for _ in range(draw.choice((0, 1, 2, 20))))
        schedule.arrivals.setdefault(step, []).append(
            Submit(
                number,
                namespace(draw.randint(1, 2)),
                array("I", prompt),
                draw.randint(1, 26),
                draw_sampling(wishes),
                stop_ids=stops,
                ignore_eos=True,
                retain=draw.random() < 0.8,
                structured=wishes.random() < 0.2,
                logprobs=wishes.choice((-1, -1, -1, 0, 4)),
                deterministic=classes.random() < exact,
                prompt_logprobs=classes.choice((-1, 0, 3)) if exact else -1,
            )
        )
        if draw.random() < 0.15:
            schedule.aborts.setdefault(step + draw.randint(1, 12), []).append(number)
    return schedule


def again(schedule: Schedule, seed: int) -> Schedule:
    """The schedule with longer prompts, most of which come a second time when others have taken their blocks, in the
    smallest pool."""
    draw = random.Random(seed)
    arrivals: dict[int, list[Submit]] = {}
    for step, some in schedule.arrivals.items():
        for submit in some:
            more = draw.randint(0, min(16, CONTEXT - 1 - len(submit.token_ids)))
            ids = submit.token_ids + array("I", [draw.randrange(VOCAB) for _ in range(more)])
            longer = replace(submit, token_ids=ids, max_tokens=min(submit.max_tokens, 12))
            arrivals.setdefault(step, []).append(longer)
            if draw.random() < 0.8:
                later = replace(longer, request=submit.request + REPEATED)
                arrivals.setdefault(45 + draw.randint(0, 90), []).append(later)
    blocks = most_blocks((KvGroup(FULL, BLOCK),), CONTEXT, schedule.budget)
    return replace(schedule, arrivals=arrivals, blocks=blocks)


def toy_engine(
    schedule: Schedule,
    *,
    eager: bool,
    most_ahead: int,
    mixing: Mixing = NEVER,
    resources: Resources | None = None,
    spill: SpillChannel | None = None,
) -> Engine:
    """The real scheduler around the device's runner with the toy model; ``spill``: where its blocks go."""
    layers = toy_layers(schedule.reaches)
    groups = divide(layers, BLOCK, CONTEXT)
    layout = KvLayout(layers=layers, block_size=BLOCK, dtype="float32", num_blocks=schedule.blocks, groups=groups)
    limits = SchedulerLimits(
        max_num_seqs=ROWS,
        max_num_batched_tokens=schedule.budget,
        max_waiting=100,
        max_context=CONTEXT,
        block_size=BLOCK,
        vocab_size=VOCAB,
        groups=groups,
    )
    operations = ToyOperations()
    storage = DeviceStorage(layout, ROWS, operations, torch.float64, CPU, 0 if spill is None else STAGED)
    runner = DeviceRunner(
        ToyModel(storage),  # type: ignore[arg-type]
        storage,
        limits,
        operations,
        eager=eager,
        most_ahead=most_ahead,
        mixing=mixing,
        resources=resources,
    )
    pool = BlockPool(layout.num_blocks)
    cache = PrefixCache(pool, root=bytes(16), block_size=BLOCK, caching=True, groups=groups)
    scheduler, tier = Scheduler(limits, pool, cache, Fairness(limits, pool, raise_defects=True)), None
    if spill is not None:
        assert runner.content is not None
        tier = SpillTier(spill, runner.content, pool, cache, runner.adopt)
    return Engine(scheduler, runner, spill=tier, clock_ns=lambda: 0)


def run_schedule(engine: Engine, schedule: Schedule, between: Callable[[], None] = lambda: None) -> dict[int, Answer]:
    """All answers, in the order of the schedule's steps; ``between`` is called between two steps."""
    answers: dict[int, Answer] = {}
    step = 0
    last = max((*schedule.arrivals, *schedule.aborts), default=0)
    draw = random.Random(schedule.blocks)
    guided = [one.request for some in schedule.arrivals.values() for one in some if one.structured]
    while step <= last or engine.has_work or engine.has_live_requests:
        assert step < MOST_STEPS, "the schedule does not end"
        for submit in schedule.arrivals.get(step, ()):
            engine.add(submit)
        for number in schedule.aborts.get(step, ()):
            engine.abort(number)
        for number in guided:
            if draw.random() >= schedule.slowness:
                place = len(answers[number].token_ids) if number in answers else 0
                engine.scheduler.set_mask(number, place, mask_of(number, place))
        if engine.has_work:
            collect(engine, answers)
        between()
        step += 1
    return answers


def differs(schedule: Schedule, answers: dict[int, Answer]) -> bool:
    """Whether some request has other tokens or log-probabilities than its plainest loop; an aborted one may have the
    first of them."""
    for submit in (one for some in schedule.arrivals.values() for one in some):
        limit = min(len(submit.token_ids) + submit.max_tokens, CONTEXT)
        wanted, logprobs = plainest(submit, limit, schedule.reaches)
        found = answers[submit.request]
        ended = found.failure is FailureCode.ABORTED and submit.request in schedule.aborted
        if found.failure is not None and not ended:
            return True
        if found.token_ids != (wanted[: len(found.token_ids)] if ended else wanted):
            return True
        scored = sum(len(part.logprobs) for part in found.prompts)
        if not ended and scored != (len(submit.token_ids) - 1 if submit.prompt_logprobs >= 0 else 0):
            return True
        if len(found.logprobs) != (len(found.token_ids) if submit.logprobs >= 0 else 0):
            return True
        for one, other in zip(found.logprobs, logprobs, strict=False):
            numbers = zip((one.logprob, *one.top_logprobs), (other.logprob, *other.top_logprobs), strict=False)
            if one.top_ids != other.top_ids or any(abs(a - b) > CLOSE for a, b in numbers):
                return True
    return False
