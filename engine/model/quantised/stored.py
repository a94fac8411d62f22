"""Packed matrices where they lie: which tensors of a checkpoint's files belong to which matrix, and reading them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import ModelLoadError
from engine.model.checklist import Checklist, Home, Piece
from engine.model.quantised.codec import Codec, Present, Region, Stored, decode_into
from engine.model.quantised.scheme import Scheme
from engine.model.safetensors import SafetensorsFile, TensorEntry, show_name

WEIGHT = ".weight"

STORED_DTYPES = {
    "U8": torch.uint8, "I8": torch.int8, "I32": torch.int32, "I64": torch.int64, "F32": torch.float32,
    "BF16": torch.bfloat16, "F16": torch.float16, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
"""Dtypes that packed numbers, scales and the rest are stored in."""

Located = tuple[SafetensorsFile, TensorEntry]


class StoredParts:
    """Reads the tensors of one module from files; a ``Source``."""

    def __init__(self, module: str, parts: dict[str, Located]) -> None:
        self._module = module
        self._parts = parts

    def read(self, suffix: str, begin: int = 0, end: int | None = None, *, lead: int = 1) -> Tensor:
        """See ``Source.read``.

        Raises:
            ModelLoadError: the file ends early.
        """
        file, entry = self._parts[suffix]
        dtype = STORED_DTYPES[entry.dtype]
        first, row = entry.shape[:lead], entry.shape[lead:]
        whole = end is None and begin == 0
        stop = math.prod(first) if end is None else end
        target = torch.empty(entry.shape if whole else (stop - begin, *row), dtype=dtype)
        if target.numel():
            # One number has no dimension whose bytes could be seen.
            view = target.reshape(-1).view(torch.uint8).numpy().data
            file.read_stretch(f"{self._module}.{suffix}", begin * math.prod(row) * dtype.itemsize, view)
        return target

    def name(self, suffix: str) -> str:
        """The full name as a message shows it."""
        return show_name(f"{self._module}.{suffix}")


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """One matrix: how it is decoded, and from what."""

    codec: Codec
    source: StoredParts

    def read_part(self, home: Home) -> None:
        """Decode a part of it into its memory.

        Raises:
            ModelLoadError: a number has no meaning, or the file ends early.
        """
        rows, columns = home.part
        decode_into(self.codec, self.source, home.target, Region(rows, columns))


class PackedTensors:
    """Collects, file by file, the tensors that stand for matrices on a checklist."""

    def __init__(self, scheme: Scheme | None, wanted: Checklist) -> None:
        self._scheme = scheme
        self._wanted = wanted
        self._modules: dict[str, dict[str, Located]] = {}

    def takes(self, file: SafetensorsFile, name: str, entry: TensorEntry) -> bool:
        """Whether a tensor that is not simply what the checklist asks for belongs to a packed matrix; it is then
        remembered.

        Raises:
            ModelLoadError: another file has one of the same name.
        """
        if self._scheme is None or self._scheme.matrix is None or entry.dtype not in STORED_DTYPES:
            return False
        module, _, suffix = name.rpartition(".")
        piece = self._wanted.pieces.get(module + WEIGHT)
        if piece is None or len(piece.shape) != 2:
            return False
        if suffix in self._scheme.ignored:
            return True
        parts = self._modules.setdefault(module, {})
        if suffix in parts:
            raise ModelLoadError(f"tensor {show_name(name)} is in both {parts[suffix][0].name} and {file.name}")
        parts[suffix] = file, entry
        return True

    def matrices(self) -> Iterator[tuple[str, PackedMatrix]]:
        """The matrices that were found, by the names of the checklist.

        Raises:
            ModelLoadError: a part is missing, misshaped or one too many; the message names it.
        """
        for module, parts in self._modules.items():
            assert self._scheme is not None, "nothing is taken without a scheme"
            assert self._scheme.matrix is not None, "nothing is taken without a codec"
            present = Present(module, {suffix: Stored(one.dtype, one.shape) for suffix, (_, one) in parts.items()})
            codec = self._scheme.matrix(present, _matrix_shape(self._wanted.pieces[module + WEIGHT]))
            spare = [suffix for suffix in parts if suffix not in codec.suffixes]
            if spare:
                raise ModelLoadError(
                    f"the checkpoint holds {present.name(spare[0])}, which its quantization_config has no use for"
                )
            yield module + WEIGHT, PackedMatrix(codec, StoredParts(module, parts))


def _matrix_shape(piece: Piece) -> tuple[int, int]:
    outputs, inputs = piece.shape
    return outputs, inputs
