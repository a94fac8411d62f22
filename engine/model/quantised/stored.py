"""Packed matrices in a checkpoint's files: which tensors belong to which matrix, and reading them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import ModelLoadError
from engine.model.checkpoint.checklist import Checklist, Home
from engine.model.checkpoint.safetensors import SafetensorsFile, TensorEntry, show_name
from engine.model.quantised.codec import Codec, Present, Region, Stored, decode_into
from engine.model.quantised.scheme import Scheme

WEIGHT = ".weight"

STORED_DTYPES = {
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
"""Dtypes of stored numbers, scales and indices."""

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
            # A scalar has no dimension for a byte view.
            view = target.reshape(-1).view(torch.uint8).numpy().data
            file.read_stretch(f"{self._module}.{suffix}", begin * math.prod(row) * dtype.itemsize, view)
        return target

    def dtype(self, suffix: str) -> torch.dtype:
        """Return the dtype in which a tensor is stored."""
        return STORED_DTYPES[self._parts[suffix][1].dtype]

    def name(self, suffix: str) -> str:
        """Return the full tensor name for messages."""
        return show_name(f"{self._module}.{suffix}")


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """One packed matrix: its codec and its source."""

    codec: Codec
    source: StoredParts

    def read_part(self, home: Home) -> None:
        """Decode a part of it into its memory.

        Raises:
            ModelLoadError: a number is invalid, or the file ends early.
        """
        rows, columns = home.part
        decode_into(self.codec, self.source, home.target, Region(rows, columns))


@dataclass(frozen=True, slots=True)
class PackedStack:
    """Matrices of experts, published as ``(experts, inputs, outputs)`` and packed as one stack."""

    codec: Codec
    source: StoredParts
    outputs: int
    """Number of outputs of one expert."""

    def read_part(self, home: Home) -> None:
        """Decode a part of the stack into its memory.

        Raises:
            ModelLoadError: a number is invalid, or the file ends early.
        """
        (first, last), inputs, (start, stop) = home.part
        for expert in range(first, last):
            above = expert * self.outputs
            target = home.target[expert - first].t()
            decode_into(self.codec, self.source, target, Region((above + start, above + stop), inputs))


class PackedTensors:
    """Collects, file by file, the tensors of the packed matrices on a checklist."""

    def __init__(self, scheme: Scheme | None, wanted: Checklist) -> None:
        self._scheme = scheme
        self._wanted = wanted
        self._modules: dict[str, dict[str, Located]] = {}
        self._stacks: dict[str, dict[str, Located]] = {}
        """Tensors by the name of the published tensor that they represent."""

    def takes(self, file: SafetensorsFile, name: str, entry: TensorEntry) -> bool:
        """Return whether a tensor that is not itself on the checklist belongs to a packed matrix, and record it.

        Raises:
            ModelLoadError: another file contains a tensor with this name.
        """
        if self._scheme is None or entry.dtype not in STORED_DTYPES:
            return False
        module, _, suffix = name.rpartition(".")
        if self._scheme.stacked is not None:
            stack, _, _kind = name.rpartition("_")
            stacked = self._wanted.pieces.get(stack)
            if stacked is None or len(stacked.shape) != 3:
                return False
            return _remember(self._stacks.setdefault(stack, {}), file, suffix, name, entry)
        if self._scheme.matrix is None:
            return False
        piece = self._wanted.pieces.get(module + WEIGHT)
        if piece is None or len(piece.shape) != 2:
            return False
        if suffix in self._scheme.ignored:
            return True
        return _remember(self._modules.setdefault(module, {}), file, suffix, name, entry)

    def found(self) -> Iterator[tuple[str, PackedMatrix | PackedStack]]:
        """Yield the packed matrices and the stacked experts that were found, by their checklist names.

        Raises:
            ModelLoadError: a part is missing, misshaped or one too many; the message names it.
        """
        for module, parts in self._modules.items():
            assert self._scheme is not None, "nothing is taken without a scheme"
            assert self._scheme.matrix is not None, "nothing is taken without a codec"
            present, (outputs, inputs) = _present(module, parts), self._wanted.pieces[module + WEIGHT].shape
            codec = _checked(self._scheme.matrix(present, (outputs, inputs)), present, parts)
            yield module + WEIGHT, PackedMatrix(codec, StoredParts(module, parts))
        for name, parts in self._stacks.items():
            assert self._scheme is not None, "nothing is taken without a scheme"
            assert self._scheme.stacked is not None, "nothing is taken without a codec"
            module, _, stem = name.rpartition(".")
            present, (experts, inputs, outputs) = _present(module, parts), self._wanted.pieces[name].shape
            codec = _checked(self._scheme.stacked(present, stem, (experts, outputs, inputs)), present, parts)
            yield name, PackedStack(codec, StoredParts(module, parts), outputs)


def _remember(parts: dict[str, Located], file: SafetensorsFile, suffix: str, name: str, entry: TensorEntry) -> bool:
    if suffix in parts:
        raise ModelLoadError(f"tensor {show_name(name)} is in both {parts[suffix][0].name} and {file.name}")
    parts[suffix] = file, entry
    return True


def _present(module: str, parts: dict[str, Located]) -> Present:
    return Present(module, {suffix: Stored(one.dtype, one.shape) for suffix, (_, one) in parts.items()})


def _checked(codec: Codec, present: Present, parts: dict[str, Located]) -> Codec:
    """Return the codec, which must read every part."""
    spare = [suffix for suffix in parts if suffix not in codec.suffixes]
    if spare:
        raise ModelLoadError(
            f"the checkpoint holds {present.name(spare[0])}, which its quantization_config has no use for"
        )
    return codec
