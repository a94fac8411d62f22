"""Which form computes a model fastest here: each form computes the dear parts of one layer, in a moment of the load.

A form is plain operations, or a variant of the kernels with weights as they are or compressed. What is fastest depends
on the processor, on what a sandbox lets through of it, on the model's shapes and on the number of rows, so it is
measured and not guessed. All numbers of rows are served by one form, whose times are the best on (geometric) average: a
second form of the weights would take their memory twice.

Timed are the products of a layer and, of kernels, attention over a middling context. Plain operations are compared by
their products alone. One thread is enough: forms share their rows of outputs out in the same way.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from engine.backends.native.abi import Kind, Mode, Op, Program, Step, Type
from engine.backends.native.compression import compress
from engine.backends.native.library import Library
from engine.backends.native.manifest import COMPRESSED, PLAIN
from engine.backends.native.packing import TYPES, Packed, pack
from engine.backends.native.program import CACHE_LINE, Builder
from engine.model.layers.layers import Linear

ROWS = (1, 4, 16, 64)
"""Rows of the products that are timed, where a step may have so many."""

MOST_WEIGHTS = 16 << 20
"""Weights that are multiplied: of a larger layer only so many outputs, which is more than caches hold."""

BUDGET_S = 0.5
"""After so long no other form is begun: a load takes seconds for each gigabyte."""

CONTEXT = 256
"""Tokens that attention looks back at."""

REPEATS, REPEAT_S = 3, 0.004
"""A time is the best of at least so many, and of as many more as fit into this: small models take microseconds."""

HOPELESS = 2.0
"""A form that takes so many times as long as another at any number of rows is given up."""

CLEARLY = 0.95
"""A form must take this share of the time of one before it to be preferred: less is the machine's noise."""

CLEARLY_PLAIN = 0.8
"""Share for plain operations, whose numbers differ in their last bits: noise must not choose them after a restart."""

Work = Callable[[], object]
"""Computes once. What its structures point to lives as long as it does."""


@dataclass(frozen=True, slots=True)
class Heads:
    """Shape of a layer's attention."""

    heads: int
    kv_heads: int
    dim: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """A form, and how it is set up."""

    name: str
    library: Library | None
    """None: plain operations."""
    compressed: bool = False


@dataclass(slots=True)
class Trial:
    """What a trial found."""

    seconds: dict[Candidate, dict[int, float]] = field(default_factory=dict)
    """Time of a layer by number of rows; a form that was given up lacks the larger ones."""

    @property
    def best(self) -> Candidate:
        """The form to take."""
        whole = max(len(times) for times in self.seconds.values())
        chosen, least = None, math.inf
        for candidate, times in self.seconds.items():
            mean = math.exp(sum(map(math.log, times.values())) / len(times))
            clearly = CLEARLY_PLAIN if candidate.library is None else CLEARLY
            if len(times) == whole and mean < least * (clearly if chosen else 1.0):
                chosen, least = candidate, mean
        assert chosen is not None, "nothing was tried"
        return chosen

    def __str__(self) -> str:
        rows = max(self.seconds.values(), key=len)
        parts = [
            f"{one.name} {'/'.join(f'{times[row] * 1e3:.2f}' if row in times else 'more' for row in rows)}"
            for one, times in self.seconds.items()
        ]
        return f"ms a layer at {'/'.join(map(str, rows))} rows: {', '.join(parts)}"


def try_forms(
    libraries: Iterable[Library], layer: Sequence[Linear], heads: Heads, *, most_rows: int, int8: bool
) -> Trial:
    """Time a layer in each form.

    Args:
        libraries: those to choose from, the best first; taken one by one while there is time.
        layer: its matrices, loaded and not packed; they stay so.
        heads: of its attention.
        most_rows: of a step.
        int8: whether weights are quantised.

    Raises:
        UnusableKernelsError: there is no library.
    """
    cut = min(1.0, MOST_WEIGHTS / sum(one.loaded.numel() for one in layer))
    weights = [one.loaded[: max(1, int(len(one.loaded) * cut))] for one in layer]
    rows = [count for count in ROWS if count <= most_rows]
    trial, deadline = Trial(), time.perf_counter() + BUDGET_S
    best = dict.fromkeys(rows, math.inf)
    attention: dict[tuple[Library | None, int], float] = {}
    for candidate, products in _forms(libraries, weights, int8=int8):
        times = trial.seconds[candidate] = {}
        for count in rows:
            key = candidate.library, count
            if key not in attention:
                attention[key] = _attention_s(candidate.library, heads, weights[0].dtype, count) * cut
            times[count] = _seconds(products(count)) + attention[key]
            if times[count] > HOPELESS * best[count]:
                break
            best[count] = min(best[count], times[count])
            # Plain operations count as if their attention were that of the best kernels.
            attention.setdefault((None, count), attention[key])
        if time.perf_counter() > deadline:
            break
    chosen = trial.best
    for candidate in trial.seconds:
        if candidate.library is not None and candidate.library is not chosen.library:
            candidate.library.release()
    return trial


def _forms(
    libraries: Iterable[Library], weights: list[Tensor], *, int8: bool
) -> Iterator[tuple[Candidate, Callable[[int], Work]]]:
    """Yield candidates, each with what makes its products for a number of rows: the best kernels, plain operations,
    then the other kernels."""
    packed = [pack(weight, int8=int8) for weight in weights]
    dtype = torch.int8 if int8 else weights[0].dtype
    small: list[Packed] = []
    for place, library in enumerate(libraries):
        small = small or [compress(library, one) for one in packed]
        if any(one.compression is not None for one in small):
            yield Candidate(library.variant + COMPRESSED, library, True), partial(_compiled, library, small, dtype)
        yield Candidate(library.variant, library), partial(_compiled, library, packed, dtype)
        if place == 0:
            yield Candidate(PLAIN, None), partial(_plain, weights, int8)


def _plain(weights: list[Tensor], int8: bool, rows: int) -> Work:
    maps = [Linear(weight) for weight in weights]
    inputs = [torch.ones(rows, weight.shape[1], dtype=weight.dtype) for weight in weights]
    for one in maps:
        one.pack(int8=int8)
    return lambda: [one(x) for one, x in zip(maps, inputs, strict=True)]


def _compiled(library: Library, packed: list[Packed], dtype: torch.dtype, rows: int) -> Work:
    build = Builder(max_tokens=rows, dtype=dtype, dots=library.has_dot_products)
    output = build.floats(max(one.outputs for one in packed))
    for one in packed:
        build.linear(one, build.operand(one.inputs), output, Mode.STORE)
    return _run_of(library, build, rows)


def _attention_s(library: Library | None, heads: Heads, dtype: torch.dtype, rows: int) -> float:
    """Time of one token's attention in each of so many rows, which all have the same keys and values."""
    assert library is not None, "kernels are tried before plain operations"
    build = Builder(max_tokens=rows, dtype=dtype, dots=library.has_dot_products)
    kept = torch.zeros(2, CONTEXT, heads.kv_heads, heads.dim, dtype=dtype)
    build.add(
        Kind.ATTEND,
        dtype=TYPES[dtype],
        number=1.0,
        heads=heads.heads,
        kv_heads=heads.kv_heads,
        dim=heads.dim,
        input=build.floats((heads.heads + 2 * heads.kv_heads) * heads.dim),
        output=build.operand(heads.heads * heads.dim)[0],
        keys=build.keep(kept[0]),
        values=build.keep(kept[1]),
    )
    return _seconds(_run_of(library, build, rows, TYPES[dtype]))


def _run_of(library: Library, build: Builder, rows: int, kv_dtype: Type = Type.F32) -> Work:
    """The run of operations on the caller's thread, for tokens at the last place of a context."""
    ops = (Op * len(build.ops))(*build.ops)
    counters = torch.zeros((len(ops) + 2) * CACHE_LINE, dtype=torch.uint8)
    # All tokens are token 0 of row 0, whose context is one block: the null block, with the null stamp.
    nothing, places = np.zeros(rows, dtype=np.int64), np.full(rows, CONTEXT - 1)
    program = Program(
        ops=ctypes.addressof(ops),
        count=len(ops),
        block_size=CONTEXT,
        vocab_size=1,
        num_slots=CONTEXT,
        max_rows=1,
        kv_dtype=kv_dtype,
        solo_tokens=rows,
        counters=-(-counters.data_ptr() // CACHE_LINE) * CACHE_LINE,
    )
    zeros = dict.fromkeys(("token_ids", "slots", "rows", "wanted", "tables", "expected", "stamps"), nothing.ctypes.data)
    step = Step(tokens=rows, wanted_count=rows, table_width=1, positions=places.ctypes.data, **zeros)

    def run() -> object:
        library.run(program, step)
        return build, ops, counters, nothing, places

    return run


def _seconds(work: Work) -> float:
    """Time of a work: the best of several."""
    work()
    best, end = math.inf, time.perf_counter() + REPEAT_S
    count = 0
    while count < REPEATS or time.perf_counter() < end:
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
        count += 1
    return best
