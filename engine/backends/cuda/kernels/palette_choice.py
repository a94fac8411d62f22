"""Which products of a model are taken from palettes: measured on the card itself, before an engine serves.

A palette lies beside the plain matrix, which products of many rows need. So it costs three quarters of the matrix's
memory and buys time where a step waits for weights. For each shape of a matrix and each number of rows all ways to
multiply are timed over the model's own matrices, in their own memory; one that is not faster than the plain product by
``MARGIN``, or gives other numbers, is not taken. Palettes of a shape that no number of rows takes are given back.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from engine.backends.cuda.kernels import gemv
from engine.backends.cuda.kernels.activation import Gate
from engine.backends.cuda.kernels.gemv import FewRows, Scratch
from engine.backends.cuda.kernels.lines import Map
from engine.backends.cuda.kernels.palette import GROUP, MOST_INPUTS, Palette, PaletteMap, packed
from engine.backends.cuda.kernels.palette_direct import DirectCut, direct_rows
from engine.backends.cuda.kernels.palette_products import PaletteCut, palette_rows
from engine.backends.cuda.kernels.triton_common import EMULATED

Cut = PaletteCut | DirectCut

COUNTS = (1, 2, 4, 8, 16)
"""Numbers of rows that are measured; others take the way of the next larger one."""

MARGIN = 0.03
"""A way has to be faster by more than this share: two runs of one kernel differ by about as much."""

ERROR = 0.02
"""Largest difference from the plain product over its largest number: two roundings to bfloat16, and sums in another
order."""

REPLAYS = 5

EPS = 1e-5
"""What norms add to the mean of squares while ways are measured."""

ONE_ROW: tuple[Cut, ...] = (PaletteCut(lines=4, warps=4), PaletteCut(lines=8, warps=4), DirectCut())
SEVERAL_ROWS: tuple[Cut, ...] = (DirectCut(), DirectCut(programs=1_024), PaletteCut())
"""Ways that are tried."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """One matrix of a model, and what is computed with it."""

    weight: Tensor
    activation: Gate | None
    gain: Tensor | None
    bias: Tensor | None = None
    offset: bool = False
    """Whether the gain is published less one."""

    @property
    def adds(self) -> bool:
        """Whether the result is added to the residual stream: that of a gate is not."""
        return self.activation is None

    @property
    def outputs(self) -> int:
        """Numbers of a row of the result."""
        return len(self.weight) // (1 if self.activation is None else 2)

    @property
    def shape(self) -> tuple[int, int, bool]:
        """Outputs, inputs, and whether there is a gate: what decides which way is the fastest."""
        return self.outputs, self.weight.shape[1], self.activation is not None


def ways(rows: int) -> tuple[Cut, ...]:
    """What is tried for so many rows. The interpreter does not know the language of ``DirectCut``."""
    found = ONE_ROW if rows == 1 else SEVERAL_ROWS
    return tuple(one for one in found if isinstance(one, PaletteCut) or not EMULATED.value)


def multiply(
    x: Tensor,
    given: PaletteMap,
    out: Tensor,
    scratch: Scratch,
    cut: Cut,
    *,
    gate: Gate | None = None,
    offset: bool = False,
    adds: bool = False,
) -> None:
    """The product in this way; see ``engine.backends.cuda.kernels.gemv.few_rows``."""
    run: Callable[..., None] = palette_rows if isinstance(cut, PaletteCut) else direct_rows
    run(x, given, out, scratch, cut, gate=gate, offset=offset, adds=adds)


def numbers_needed(cut: Cut | FewRows, matrix: Matrix) -> int:
    """Sums that a product needs room for."""
    shape = cut if isinstance(cut, FewRows) else cut.parts_of
    return gemv.numbers_needed(shape, matrix.outputs, matrix.weight.shape[1], gate=matrix.activation is not None)


Measure = Callable[[Callable[[], None]], float]
"""Seconds of what a call launches."""


def replayed(run: Callable[[], None]) -> float:
    """Seconds of what a call launches: the median of replays of a graph; on a processor the call's."""
    run()
    if not torch.cuda.is_available():
        began = time.perf_counter()
        run()
        return time.perf_counter() - began
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    taken = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) / 1e3)
    return float(statistics.median(taken))


@dataclass(slots=True)
class PaletteChoice:
    """Palettes of a model's matrices, and which way each product takes."""

    few: FewRows
    palettes: dict[int, Palette] = field(default_factory=dict)
    """By the address of the plain matrix."""
    taken: dict[tuple[int, int, bool], dict[int, Cut | None]] = field(default_factory=dict)
    """By shape and number of rows; None: the plain product."""
    ratios: dict[tuple[int, int, bool], dict[int, float]] = field(default_factory=dict)
    """Time of the plain product over that of the fastest way, which is not taken where it is about 1 or below."""

    @property
    def nbytes(self) -> int:
        """Bytes of all palettes."""
        return sum(one.nbytes for one in self.palettes.values())

    def of(self, weight: Tensor, rows: int, *, gate: bool) -> tuple[Palette, Cut] | None:
        """The palette of a matrix and how it is multiplied with so many rows; None: as a plain one."""
        palette = self.palettes.get(weight.data_ptr())
        if palette is None:
            return None
        shape = len(weight) // (2 if gate else 1), weight.shape[1], gate
        cut = self.taken[shape][next(count for count in COUNTS if count >= rows)]
        return None if cut is None else (palette, cut)

    def choose(self, matrices: Sequence[Matrix], scratch: Scratch, measure: Measure = replayed) -> None:
        """Pack matrices and measure all ways, shape by shape: no more memory is taken than palettes that stay need, and
        those of one shape.

        Args:
            matrices: of the model, filled.
            scratch: with room for ``most_numbers``.
            measure: what times.
        """
        by_shape: dict[tuple[int, int, bool], list[Matrix]] = {}
        for one in matrices:
            by_shape.setdefault(one.shape, []).append(one)
        for shape, own in by_shape.items():
            found = {one.weight.data_ptr(): packed(one.weight) for one in own}
            if None in found.values():
                # Some layer's does not fit; a step would be as slow as its slowest.
                continue
            self.palettes.update({place: one for place, one in found.items() if one is not None})
            self.taken[shape], self.ratios[shape] = {}, {}
            for count in COUNTS:
                self._choose_for(shape, own, count, scratch, measure)
            if not any(self.taken[shape].values()):
                for place in found:
                    del self.palettes[place]

    def _choose_for(
        self, shape: tuple[int, int, bool], own: list[Matrix], rows: int, scratch: Scratch, measure: Measure
    ) -> None:
        weight = own[0].weight
        x = torch.linspace(-1.0, 1.0, rows * shape[1], device=weight.device).to(weight.dtype).view(rows, -1)
        plain, out = (x.new_zeros(rows, shape[0]) for _ in range(2))

        def run_plain(some: Sequence[Matrix]) -> None:
            for one in some:
                given = Map(one.weight, one.bias, one.gain, EPS)
                gemv.few_rows(x, given, plain, scratch, self.few, gate=one.activation, offset=one.offset, adds=one.adds)

        run_plain(own[:1])
        wanted, best, chosen = plain.clone(), float("inf"), None
        base = measure(partial(run_plain, own))
        for cut in ways(rows):

            def run(some: Sequence[Matrix], cut: Cut = cut) -> None:
                for one in some:
                    given = PaletteMap(self.palettes[one.weight.data_ptr()], one.bias, one.gain, EPS)
                    multiply(x, given, out, scratch, cut, gate=one.activation, offset=one.offset, adds=one.adds)

            out.zero_()
            run(own[:1])
            if _agree(out, wanted) and (taken := measure(partial(run, own))) < best:
                best, chosen = taken, cut
        self.taken[shape][rows] = chosen if best < base * (1 - MARGIN) else None
        self.ratios[shape][rows] = base / best

    def __str__(self) -> str:
        """For people: what is taken."""
        said = []
        for shape, ratios in self.ratios.items():
            parts = []
            for rows, ratio in ratios.items():
                cut = self.taken[shape][rows]
                name = "bf16" if cut is None else type(cut).__name__.removesuffix("Cut").lower()
                parts.append(f"{rows}: {name} {ratio:.2f}")
            said.append(f"{shape[1]}x{shape[0]}{' gated' if shape[2] else ''} ({', '.join(parts)})")
        return f"palettes of {self.nbytes >> 20} MiB: {'; '.join(said)}" if said else "palettes: none pays"


def fits(weight: Tensor) -> bool:
    """Whether a matrix of this form can have a palette, whatever its numbers."""
    return weight.dtype == torch.bfloat16 and weight.shape[1] % GROUP == 0 and weight.shape[1] <= MOST_INPUTS


def most_numbers(matrices: Sequence[Matrix], few: FewRows) -> int:
    """Sums that all ways need room for."""
    cuts = (few, *ONE_ROW, *SEVERAL_ROWS)
    return max((numbers_needed(cut, one) for one in matrices for cut in cuts), default=0)


def launch_all(matrices: Sequence[Matrix], scratch: Scratch) -> None:
    """Launch every form once, on matrices that may have no contents: what is compiled ahead."""
    for one in {one.shape: one for one in matrices}.values():
        for rows in COUNTS:
            x, out = one.weight.new_empty(rows, one.weight.shape[1]), one.weight.new_empty(rows, one.outputs)
            given = PaletteMap(
                Palette.empty(len(one.weight), one.weight.shape[1], 1, one.weight.device), one.bias, one.gain, EPS
            )
            for cut in ways(rows):
                multiply(x, given, out, scratch, cut, gate=one.activation, offset=one.offset, adds=one.adds)


def _agree(found: Tensor, wanted: Tensor) -> bool:
    error = (found.float() - wanted.float()).abs().max()
    return bool(error <= ERROR * wanted.float().abs().max())
