"""What a model wants from its checkpoint: the one place where names and shapes of published tensors are stated.

A layer that is built takes its memory and writes down, in one call, which published tensor fills it: name, full
published shape, and the part of it that this rank holds. Built on torch's ``meta`` device nothing is allocated, so the
same code first gives the list by which a checkpoint is checked, and then the memory into which it is read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.model.layers import Linear, Memory
from engine.model.parallel import ALONE, Parallel, Span

FLOATS = ("F32", "BF16", "F16")
"""Dtypes in which plain weights are published, as safetensors files call them."""


@dataclass(frozen=True, slots=True)
class Home:
    """Where a part of a published tensor goes."""

    part: tuple[Span, ...]
    """The half-open range of each dimension of the published tensor."""
    target: Tensor
    """Memory of the part's shape; any view will do."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One published tensor."""

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    """Those that it may have."""
    homes: list[Home] = field(default_factory=list)


@dataclass(slots=True)
class _Lists:
    pieces: dict[str, Piece] = field(default_factory=dict)
    linears: list[Linear] = field(default_factory=list)
    ignored: set[str] = field(default_factory=set)
    ignored_suffixes: tuple[str, ...] = ()
    ignored_prefixes: tuple[str, ...] = ()


class Checklist:
    """Names under one prefix; all that stem from one share what they collect."""

    def __init__(self, memory: Memory, parallel: Parallel = ALONE) -> None:
        self.memory = memory
        self.parallel = parallel
        self._prefix = ""
        self._lists = _Lists()

    def under(self, *names: str | int) -> Checklist:
        """The same list for names that begin with these parts: ``under("layers", 3)`` for ``layers.3.``."""
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
    ) -> None:
        """Ask for a published tensor, or for a further part of one that is on the list.

        Args:
            name: below this list's prefix.
            shape: as published, whole.
            target: filled with the part; of the part's shape.
            part: by dimension the range that this rank takes; dimensions that are left out are taken whole.
            dtypes: in which it may be published.
        """
        given = part or {}
        spans = tuple(given.get(axis, (0, size)) for axis, size in enumerate(shape))
        assert tuple(target.shape) == tuple(stop - start for start, stop in spans), f"{name}: the target does not fit"
        full = self._prefix + name
        piece = self._lists.pieces.setdefault(full, Piece(full, shape, dtypes))
        assert (piece.shape, piece.dtypes) == (shape, dtypes), f"{full} was asked for in another shape"
        piece.homes.append(Home(spans, target))

    def vector(self, name: str, size: int, *, part: Span | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Memory for a vector that is on the list; ``dtype`` where it is not the model's."""
        start, stop = part or (0, size)
        target = torch.empty(stop - start, dtype=dtype or self.memory.dtype, device=self.memory.device)
        self.want(name, (size,), target, part={0: (start, stop)})
        return target

    def ignore(self, *names: str) -> None:
        """Allow tensors of these names, which nothing reads."""
        self._lists.ignored.update(self._prefix + name for name in names)

    def ignore_suffixes(self, *suffixes: str) -> None:
        """Allow tensors whose names end like this, under any prefix, which nothing reads."""
        self._lists.ignored_suffixes += suffixes

    def ignore_prefixes(self, *prefixes: str) -> None:
        """Allow tensors whose names begin like this, which nothing reads: parts of a model that are not run."""
        self._lists.ignored_prefixes += tuple(self._prefix + prefix for prefix in prefixes)

    def pack(self, linear: Linear) -> Linear:
        """Remember a map that is to be packed after loading."""
        self._lists.linears.append(linear)
        return linear

    @property
    def pieces(self) -> dict[str, Piece]:
        """Every published tensor that was asked for, by its name."""
        return self._lists.pieces

    @property
    def linears(self) -> list[Linear]:
        """Every map to be packed."""
        return self._lists.linears

    def ignores(self, name: str) -> bool:
        """Whether a checkpoint may hold this tensor although it is not read."""
        lists = self._lists
        return name in lists.ignored or name.endswith(lists.ignored_suffixes) or name.startswith(lists.ignored_prefixes)


def targets(pieces: Iterable[Piece]) -> dict[str, Tensor]:
    """The memory of tensors that go to one place each, by name."""
    return {piece.name: home.target for piece in pieces for home in piece.homes}
