"""A step's linear maps with adapters on a card: the section ``adapters`` of ``bench/gpu_palette.py``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu_pieces import BF16, DEVICE, META, REHEARSE, Figures, noise, seconds_of, tried
from engine.backends.cuda.kernels.adapters import (
    AdapterTile,
    Groups,
    SlotFactors,
    expand,
    group_rows,
    shrink,
    sums_needed,
)

ROWS, RANK, LAYERS = 64, 16, 2
MOST_ADAPTERS = 64
COUNTS = (0, 1, 8, 64)
MAPS: dict[str, tuple[int, list[tuple[int, int]]]] = {
    "qkv": (4_096, [(0, 4_096), (4_096, 1_024), (5_120, 1_024)]),
    "o": (4_096, [(0, 4_096)]),
    "gate_up": (4_096, [(0, 14_336), (14_336, 14_336)]),
    "down": (14_336, [(0, 4_096)]),
}
"""Inputs, and first output and number of outputs of each published map, of a Llama 8B's layer."""
TILES = (AdapterTile(), AdapterTile(walkers=4), AdapterTile(outputs=64, walkers=8))
if REHEARSE:
    ROWS, LAYERS, MOST_ADAPTERS, COUNTS = 6, 1, 3, (0, 1, 3)
    MAPS = {"qkv": (64, [(0, 32), (32, 16), (48, 16)]), "down": (96, [(0, 40)])}
    TILES = (AdapterTile(depth=32, share=64, outputs=16, walkers=2),)


def compile_adapters(tile: AdapterTile, name: str) -> None:
    """Launch on memory without contents."""
    inputs, pieces = MAPS[name]
    groups = Groups.empty(ROWS, META)
    group_rows(torch.empty(ROWS, dtype=torch.int32, device=META), groups)
    given = SlotFactors.empty(MOST_ADAPTERS, inputs, pieces, RANK, BF16, META, tile)
    sums = torch.empty(sums_needed(given, ROWS, tile), device=META)
    shrink(torch.empty(ROWS, inputs, dtype=BF16, device=META), groups, given, sums, tile)
    expand(groups, given, sums, torch.empty(ROWS, given.up.shape[1], dtype=BF16, device=META), tile)


class Step:
    """The linear maps of some layers, and adapters beside them."""

    def __init__(self, tile: AdapterTile) -> None:
        self.tile = tile
        self.slots = torch.zeros(ROWS, dtype=torch.int32, device=DEVICE)
        self.groups = Groups.empty(ROWS, torch.device(DEVICE))
        self.side = torch.cuda.Stream() if DEVICE.type == "cuda" else None
        self.inputs = {inputs: noise(ROWS, inputs) for inputs, _ in MAPS.values()}
        self.maps: list[tuple[Tensor, SlotFactors, Tensor]] = []
        for _ in range(LAYERS):
            for inputs, pieces in MAPS.values():
                outputs = pieces[-1][0] + pieces[-1][1]
                given = SlotFactors.empty(MOST_ADAPTERS, inputs, pieces, RANK, BF16, torch.device(DEVICE), tile)
                given.down.normal_(std=inputs**-0.5)
                given.up.normal_(std=RANK**-0.5)
                sums = torch.empty(sums_needed(given, ROWS, tile), device=DEVICE)
                self.maps.append((noise(outputs, inputs, spread=inputs**-0.5), given, sums))

    def choose(self, count: int) -> None:
        """So many adapters, in turns; 0: no row has one."""
        rows = torch.arange(ROWS, dtype=torch.int32, device=DEVICE)
        self.slots.copy_(rows % count + 1 if count else rows * 0)

    def base(self) -> list[Tensor]:
        """The maps alone."""
        return [F.linear(self.inputs[weight.shape[1]], weight) for weight, _, _ in self.maps]

    def run(self, *, beside: bool) -> list[Tensor]:
        """The maps and what adapters add. ``beside``: the first launch of each runs beside the map."""
        group_rows(self.slots, self.groups)
        found = []
        for weight, given, sums in self.maps:
            x = self.inputs[weight.shape[1]]
            side = self.side if beside else None
            if side is not None:
                side.wait_stream(torch.cuda.current_stream())
            with nullcontext() if side is None else torch.cuda.stream(side):
                shrink(x, self.groups, given, sums, self.tile)
            y = F.linear(x, weight)
            if side is not None:
                torch.cuda.current_stream().wait_stream(side)
            expand(self.groups, given, sums, y, self.tile)
            found.append(y)
        return found

    def bytes_of(self, count: int) -> tuple[int, int]:
        """Bytes of the maps, and of so many adapters' factors."""
        base = sum(weight.nbytes for weight, _, _ in self.maps)
        per_slot = sum(given.down[0].nbytes + given.up[0].nbytes for _, given, _ in self.maps)
        return base, per_slot * count


def check(step: Step, figures: Figures) -> None:
    """Against float64, with half of the rows without an adapter, whose bits are to stay."""
    step.choose(MOST_ADAPTERS)
    step.slots[::2] = 0
    worst, kept = 0.0, 0
    for (weight, given, _), y, plain in zip(step.maps, step.run(beside=False), step.base(), strict=True):
        x = step.inputs[weight.shape[1]].double()
        target, rank = plain.double(), given.rank
        for row, slot in enumerate(step.slots.tolist()):
            if slot == 0:
                kept += int((y[row] != plain[row]).sum())
                continue
            narrow = given.down[slot].double() @ x[row]
            for begin, end, piece in given.tiles.tolist():
                part = given.up[slot, begin:end].double() @ narrow[piece * rank : (piece + 1) * rank]
                target[row, begin:end] += part
        worst = max(worst, float((y.double() - target).abs().max() / target.abs().max()))
    figures.put("adapters exact", rows=ROWS, error=worst, changed_without_adapter=kept)


def adapters(figures: Figures, _bandwidth: float) -> None:
    """All counts, tiles and orders; then an adapter that is loaded into a slot."""
    first = Step(TILES[0])
    tried(lambda: check(first, figures), "adapters against float64")
    base = seconds_of(first.base, LAYERS)
    figures.put("adapters base", rows=ROWS, us=base * 1e6)
    for tile in TILES:
        step = first if tile == TILES[0] else Step(tile)
        for beside in (False, True) if DEVICE.type == "cuda" else (False,):
            for count in COUNTS:

                def measure(
                    step: Step = step, beside: bool = beside, count: int = count, tile: AdapterTile = tile
                ) -> None:
                    step.choose(count)
                    own, extra = step.bytes_of(count)
                    taken = seconds_of(lambda: step.run(beside=beside), LAYERS)
                    figures.put(
                        "adapters", rows=ROWS, count=count, us=taken * 1e6, of_base=base / taken,
                        bound=own / (own + extra), beside=beside, cut=repr(tile),
                    )  # fmt: skip

                tried(measure, f"{count} adapters")
    tried(lambda: _load(first, figures), "loading a slot")


def _load(step: Step, figures: Figures) -> None:
    """One adapter's factors of all maps, from page-locked memory."""
    locked = DEVICE.type == "cuda"
    sources: list[tuple[SlotFactors, int, int, Tensor, Tensor]] = []
    for (_, given, _), (inputs, pieces) in zip(step.maps, list(MAPS.values()) * LAYERS, strict=True):
        for piece, (begin, count) in enumerate(pieces):
            parts = [torch.randn(shape).to(BF16) for shape in ((RANK, inputs), (count, RANK))]
            down, up = (part.pin_memory() if locked else part for part in parts)
            sources.append((given, piece, begin, down, up))

    def run() -> None:
        for given, piece, begin, down, up in sources:
            given.load(1, piece, begin, down, up)

    figures.put("adapters load", layers=LAYERS, us_a_layer=seconds_of(run, LAYERS) * 1e6)


Section = Callable[[Figures, float], None]
