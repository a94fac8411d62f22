"""Checklist of a model's tensors: the only place that states names and shapes of published tensors.

When a layer is built, it allocates its memory and records in one call which published tensor fills it: name, full
published shape, and the part that this rank holds. Built on torch's ``meta`` device nothing is allocated, so the same
code first gives the list by which a checkpoint is checked, and then the memory into which it is read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from engine.model.layers.layers import Delta, Linear, Memory
from engine.model.layers.parallel import ALONE, Parallel, Span

FLOATS = ("F32", "BF16", "F16")
"""Dtypes of unquantised weights, as named in safetensors files."""


@dataclass(frozen=True, slots=True)
class Home:
    """Destination of a part of a published tensor."""

    part: tuple[Span, ...]
    """Half-open range in each dimension of the published tensor."""
    target: Tensor
    """Memory of the part's shape; any view is allowed."""
    scale: Tensor | None = None
    """Scale of each row of the part, float32, where the memory is of 8-bit numbers (``engine.model.layers.scaled``)."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One published tensor."""

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    """Permitted dtypes."""
    homes: list[Home] = field(default_factory=list)


class Adaptable(Protocol):
    """Part of a model to whose result a low-rank product may be added (``engine.model.adapters``)."""

    delta: Delta | None
    """What is added in a step; None: no adapter has one for this part."""


@dataclass(frozen=True, slots=True)
class Site:
    """Published map that an adapter may change, and where its outputs are."""

    part: Adaptable
    inputs: int
    """Numbers of a row that goes in; of an embedding the vocabulary."""
    rows: int
    """Outputs as published."""
    first: int
    """Published output at which those begin that the part has."""
    place: int
    """Output of the part at which they stand."""
    count: int
    by_id: bool = False
    """Whether it is an embedding: rows go in as ids."""


@dataclass(slots=True)
class _Lists:
    pieces: dict[str, Piece] = field(default_factory=dict)
    linears: list[Linear] = field(default_factory=list)
    sites: dict[str, list[Site]] = field(default_factory=dict)
    ignored: set[str] = field(default_factory=set)
    ignored_suffixes: tuple[str, ...] = ()
    ignored_prefixes: tuple[str, ...] = ()


class Checklist:
    """Tensor names under one prefix; all lists derived from one root share their entries."""

    def __init__(self, memory: Memory, parallel: Parallel = ALONE) -> None:
        self.memory = memory
        self.parallel = parallel
        self._prefix = ""
        self._lists = _Lists()

    def under(self, *names: str | int) -> Checklist:
        """Return the list for names with this additional prefix: ``under("layers", 3)`` for ``layers.3.``."""
        other = Checklist(self.memory, self.parallel)
        other._lists = self._lists
        other._prefix = self._prefix + "".join(f"{name}." for name in names)
        return other

    def want(
        self,
        name: str,
        shape: tuple[int, ...],
        target: Tensor,
        *,
        part: dict[int, Span] | None = None,
        dtypes: tuple[str, ...] = FLOATS,
        scale: Tensor | None = None,
    ) -> None:
        """Request a published tensor, or a further part of one already on the list.

        Args:
            name: name below this list's prefix.
            shape: full shape as published.
            target: memory to fill, of the part's shape.
            part: range of this rank by dimension; omitted dimensions are taken whole.
            dtypes: permitted published dtypes.
            scale: takes a scale a row where the target is of 8-bit numbers.
        """
        given = part or {}
        spans = tuple(given.get(axis, (0, size)) for axis, size in enumerate(shape))
        assert tuple(target.shape) == tuple(stop - start for start, stop in spans), f"{name}: the target does not fit"
        full = self._prefix + name
        piece = self._lists.pieces.setdefault(full, Piece(full, shape, dtypes))
        assert (piece.shape, piece.dtypes) == (shape, dtypes), f"{full} was asked for in another shape"
        piece.homes.append(Home(spans, target, scale))

    def vector(self, name: str, size: int, *, part: Span | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Allocate a vector and put it on the list; ``dtype`` where it differs from the model's."""
        start, stop = part or (0, size)
        target = torch.empty(stop - start, dtype=dtype or self.memory.dtype, device=self.memory.device)
        self.want(name, (size,), target, part={0: (start, stop)})
        return target

    def ignore(self, *names: str) -> None:
        """Allow tensors with these names, which are not read."""
        self._lists.ignored.update(self._prefix + name for name in names)

    def ignore_suffixes(self, *suffixes: str) -> None:
        """Allow tensors with these name endings under any prefix, which are not read."""
        self._lists.ignored_suffixes += suffixes

    def ignore_prefixes(self, *prefixes: str) -> None:
        """Allow tensors with these name prefixes, which are not read: unused parts of a model."""
        self._lists.ignored_prefixes += tuple(self._prefix + prefix for prefix in prefixes)

    def pack(self, linear: Linear) -> Linear:
        """Register a linear map for packing after loading."""
        self._lists.linears.append(linear)
        return linear

    def adapt(self, name: str, site: Site) -> None:
        """Allow adapters to change a published map, or a further part of one that is on the list already."""
        self._lists.sites.setdefault(self._prefix + name, []).append(site)

    @property
    def sites(self) -> dict[str, list[Site]]:
        """Return what adapters may change, by the published map's name."""
        return self._lists.sites

    @property
    def pieces(self) -> dict[str, Piece]:
        """Return every requested tensor by name."""
        return self._lists.pieces

    @property
    def linears(self) -> list[Linear]:
        """Return every linear map registered for packing."""
        return self._lists.linears

    def ignores(self, name: str) -> bool:
        """Return whether a checkpoint may hold this tensor although it is not read."""
        lists = self._lists
        return name in lists.ignored or name.endswith(lists.ignored_suffixes) or name.startswith(lists.ignored_prefixes)


def targets(pieces: Iterable[Piece]) -> dict[str, Tensor]:
    """Return the memory of single-destination tensors by name."""
    return {piece.name: home.target for piece in pieces for home in piece.homes}
