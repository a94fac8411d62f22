"""Adapters for the compiled kernels: their matrices in panels, and the rows of a step that have one, in pieces
(``csrc/adapt.c``)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from engine.backends.common.intake import Ints
from engine.backends.native.abi import ADAPT_PANEL, ADAPT_ROWS, Pair, Pieces
from engine.model.adapters.bank import MapDelta, Product
from engine.model.layers.layers import Delta


class PackedPair(NamedTuple):
    """One adapter's two matrices for some outputs of a map, in panels."""

    rank: int
    down: Tensor
    up: Tensor


@dataclass(frozen=True, slots=True)
class PackedPlace:
    """What all adapters add to outputs of a map that begin at one place."""

    place: int
    count: int
    pairs: dict[int, PackedPair]
    """By adapter."""

    def table(self, adapters: int) -> ctypes.Array[Pair]:
        """Pairs for adapters from number 1 on; empty ones for those that add nothing here."""
        table = (Pair * adapters)()
        for number, pair in self.pairs.items():
            table[number - 1] = Pair(pair.rank, pair.down.data_ptr(), pair.up.data_ptr())
        return table


def packed_places(delta: Delta | None) -> list[PackedPlace]:
    """Bring what adapters add to a map into panels, by place; none for a map that none changes. The bank's own numbers
    are used no more."""
    if not isinstance(delta, MapDelta):
        return []
    found: dict[int, PackedPlace] = {}
    for adapter, products in delta.products.items():
        for one in products:
            place = found.setdefault(one.place, PackedPlace(one.place, one.up.shape[1], {}))
            place.pairs[adapter] = _packed(one)
    delta.products = {}
    return list(found.values())


def _packed(product: Product) -> PackedPair:
    return PackedPair(product.down.shape[1], pack_columns(product.down), pack_columns(product.up))


def pack_columns(matrix: Tensor) -> Tensor:
    """A matrix ``(rows, columns)`` in panels ``(ceil(columns / 16), rows, 16)``; what is added is zero."""
    rows, columns = matrix.shape
    panels = -(-columns // ADAPT_PANEL)
    padded = F.pad(matrix, (0, panels * ADAPT_PANEL - columns))
    return padded.view(rows, panels, ADAPT_PANEL).transpose(0, 1).contiguous()


class StepPieces:
    """Rows of the current step that have an adapter; keeps the arrays alive that the kernels read."""

    def __init__(self) -> None:
        self._kept: list[Ints] = []

    def fill(self, target: Pieces, adapters: Ints) -> None:
        """Tell the kernels the adapter of each row, 0 for none."""
        rows = np.flatnonzero(adapters)
        numbers = adapters[rows]
        sorting = np.argsort(numbers, kind="stable")
        order, numbers = rows[sorting].astype(np.int64), numbers[sorting]
        begins = np.flatnonzero(np.diff(numbers, prepend=-1)).tolist()
        pieces = [
            (numbers[begin], start, min(ADAPT_ROWS, end - start))
            for begin, end in zip(begins, [*begins[1:], len(order)], strict=True)
            for start in range(begin, end, ADAPT_ROWS)
        ]
        table = np.array(pieces, dtype=np.int64).reshape(-1, 3)
        self._kept += (order, table)
        target.count, target.pieces, target.order = len(table), table.ctypes.data, order.ctypes.data

    def clear(self) -> None:
        """Begin another step."""
        self._kept.clear()
