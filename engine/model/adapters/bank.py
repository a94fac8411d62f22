"""Adapters of one model in memory, and what they add in a step.

A map with adapters has a ``MapDelta``, which holds for each adapter ``(inputs, rank)`` and ``(rank, outputs)``. Before
a step the bank is told the adapter of each row; rows of one adapter are a *group*, whose product is taken at once, to
the rank and then to the outputs. Rows without an adapter are in no group: nothing is added to them, not even zero, and
a step in which no row has one does not come here.

All numbers lie in one arena, allocated once and never again: its bound is the host's (``EngineConfig.adapter_bytes``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from engine.errors import AdapterLoadError
from engine.model.adapters.files import AdapterFiles, Factors, Sites, open_adapter, read_factors

NUMBER_ALIGNMENT = 32
"""Numbers of which each adapter's part of the arena is a multiple: a cache line of 16-bit numbers."""


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """Where an adapter's files are."""

    folder: Path
    digest: bytes
    """Digest of its files, as the host computed it."""


class RowGroup(NamedTuple):
    """Rows of a step with one adapter."""

    adapter: int
    rows: Tensor
    """int64."""


class Product(NamedTuple):
    """What one adapter adds to some outputs of a map."""

    down: Tensor
    """``(inputs, rank)``."""
    up: Tensor
    """``(rank, count)``, with the adapter's scale."""
    place: int
    """First of these outputs."""


class MapDelta:
    """What all adapters of a model add to one map, or to an embedding."""

    def __init__(self, bank: AdapterBank, *, by_id: bool) -> None:
        """``by_id``: rows go in as ids, each of which stands for a row of ``down``."""
        self._bank = bank
        self._by_id = by_id
        self.products: dict[int, list[Product]] = {}
        """By adapter."""

    def add(self, x: Tensor, y: Tensor) -> None:
        """Add to those rows of ``y``, the result of ``x``, that have an adapter; other rows are not touched."""
        for adapter, rows in self._bank.groups:
            own = self.products.get(adapter)
            if own is None:
                continue
            given = x.index_select(0, rows)
            for down, up, place in own:
                narrow = down.index_select(0, given) if self._by_id else torch.mm(given, down)
                y[:, place : place + up.shape[1]].index_add_(0, rows, torch.mm(narrow, up))


class AdapterBank:
    """Adapters of one model, by number from 1."""

    def __init__(self, sites: Sites) -> None:
        self._sites = sites
        self.deltas: dict[int, MapDelta] = {}
        """By identity of the part of the model."""
        self.groups: Sequence[RowGroup] = ()
        """Rows that go through maps now, by adapter; none outside of a step."""
        self.arena: Tensor | None = None
        """Memory of all numbers; None once a backend has them in a form of its own."""
        self.held_bytes = 0
        """Bytes that adapters take at most."""
        self.numbers: dict[bytes, int] = {}
        """Number of each adapter that is there, by digest."""
        self.refused: list[tuple[AdapterSource, AdapterLoadError]] = []
        """Adapters that were left out, with the reason."""

    def load(self, sources: Sequence[AdapterSource], *, dtype: torch.dtype, most_bytes: int) -> None:
        """Read adapters; call once. One that cannot be used is left out, for the reason in ``refused``.

        Args:
            sources: in the order in which they are numbered.
            dtype: of their numbers in memory.
            most_bytes: of the arena; an adapter that does not fit in beside those before it is left out.
        """
        with ExitStack() as stack:
            opened: list[tuple[AdapterSource, AdapterFiles, int]] = []
            total = held = 0
            for source in sources:
                try:
                    files = open_adapter(source.folder, self._sites)
                    stack.callback(files.file.close)
                    size = -(-files.numbers // NUMBER_ALIGNMENT) * NUMBER_ALIGNMENT
                    needed = max(size, files.padded_numbers) * dtype.itemsize
                    if held + needed > most_bytes:
                        raise AdapterLoadError(f"it takes {needed} bytes, and {most_bytes - held} are left")
                except AdapterLoadError as error:
                    self.refused.append((source, error))
                    continue
                opened.append((source, files, total))
                total += size
                held += needed
            self.arena = torch.zeros(total, dtype=dtype)
            self.held_bytes = held
            for source, files, place in opened:
                try:
                    self._take(source, read_factors(files, self.arena[place:]))
                except AdapterLoadError as error:
                    self.refused.append((source, error))

    def _take(self, source: AdapterSource, factors: list[tuple[Factors, Tensor, Tensor]]) -> None:
        """Give an adapter its number, and each of its maps what it adds."""
        number = self.numbers[source.digest] = len(self.numbers) + 1
        for one, down, up in factors:
            for site in self._sites[one.name]:
                delta = self.deltas.get(id(site.part))
                if delta is None:
                    delta = self.deltas[id(site.part)] = MapDelta(self, by_id=site.by_id)
                    site.part.delta = delta
                part = up[:, site.first : site.first + site.count]
                delta.products.setdefault(number, []).append(Product(down, part, site.place))

    @contextmanager
    def step(self, adapters: Tensor, *, alone: bool = False) -> Iterator[None]:
        """Let maps that are applied in the block add what the rows' adapters add.

        Args:
            adapters: of each row, int64; 0 for none.
            alone: take each row's products alone, so that its numbers depend on no other row.
        """
        self.groups = _groups(adapters, alone=alone)
        try:
            yield
        finally:
            self.groups = ()

    def choose(self, adapters: Tensor, *, alone: bool = False) -> None:
        """Go on with other rows in the same step."""
        self.groups = _groups(adapters, alone=alone)


def _groups(adapters: Tensor, *, alone: bool) -> list[RowGroup]:
    rows = adapters.nonzero().flatten()
    if not len(rows):
        return []
    numbers = adapters[rows].tolist()
    if alone:
        return [RowGroup(number, rows[place : place + 1]) for place, number in enumerate(numbers)]
    by_adapter: dict[int, list[int]] = {}
    for number, row in zip(numbers, rows.tolist(), strict=True):
        by_adapter.setdefault(number, []).append(row)
    return [RowGroup(number, torch.tensor(own)) for number, own in by_adapter.items()]
