"""Reader of the GGUF format, versions 2 and 3, that trusts no size in the file.

Format: ``"GGUF" | version u32 | tensors u64 | pairs u64 | pairs | tensor descriptions | padding | data``, little-endian
(ggml's docs/gguf.md). A pair is a name, a type and a value: a number, a string, or an array of one of both. A tensor is
described by a name, its dimensions (the fastest first), a type of ``engine.convert.ggml`` and where its data begins.

All of these checks precede the first read of data: every count and length is compared with a limit and with the
remaining bytes of the file before memory is allocated for it; names are unique; types are known; dimensions multiply
(in Python's integers) to whole blocks; data begins at the stated alignment, lies in the file and overlaps nothing. The
header is read through a buffer of bounded size; array numbers stay packed. Every violation is a ``ModelLoadError`` that
describes it.
"""

from __future__ import annotations

import math
import os
import stat
import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.convert.ggml import TYPES, BlockType
from engine.errors import ModelLoadError
from engine.model.checkpoint.safetensors import show_name

MAGIC = b"GGUF"
VERSIONS = (2, 3)

MAX_HEADER_BYTES = 256 << 20
"""Largest header in bytes; vocabularies of 262,144 tokens with their merges take 20 MiB."""

MAX_PAIRS = 4_096
"""Largest number of name-value pairs; published files have about 50."""

MAX_TENSORS = 1 << 17
"""Largest number of tensors; the largest published files have about 2,000."""

MAX_NAME_BYTES = 256
"""Largest length of a name in bytes; ggml allows 64 for tensors and 65,535 for keys, and uses 60."""

MAX_TEXT_BYTES = 1 << 20
"""Largest length of one string value in bytes; chat templates reach 20 KiB."""

MAX_STRINGS = 1 << 21
"""Largest number of strings in one array: a vocabulary or its merges."""

MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 16
DEFAULT_ALIGNMENT = 32

_CHUNK_BYTES = 1 << 20
"""Bytes of the header requested in one read."""

_STRING, _ARRAY, _BOOL = 8, 9, 7
_NUMBERS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "<u1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
"""Numeric value types; 7 is a boolean."""

Numbers = NDArray[np.generic]
Value = int | float | bool | str | list[str] | Numbers


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Position of a tensor: ``begin`` in bytes from the start of the file."""

    kind: BlockType
    shape: tuple[int, ...]
    """Shape with the slowest dimension first, the reverse of this format's order."""
    begin: int

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one row, the fastest dimension."""
        return self.shape[-1] // self.kind.numbers * self.kind.size

    @property
    def rows(self) -> int:
        """Return the number of rows."""
        return math.prod(self.shape[:-1])


class GgufFile:
    """Validated header over an open descriptor, which the caller still owns.

    Args:
        fd: open for reading.
        name: the file's name, for messages.

    Raises:
        ModelLoadError: the file breaks the format; the message names it.
    """

    def __init__(self, fd: int, name: str) -> None:
        self.name = name
        self._fd = fd
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ModelLoadError(f"{name} is not a regular file")
        self.size = status.st_size
        """Bytes of the file when it was opened."""
        header = _Header(self)
        pairs, tensors = _read_counts(header)
        self.values = _read_pairs(header, pairs)
        self.tensors = self._read_tensors(header, tensors)

    def read(self, offset: int, length: int) -> bytearray:
        """Read bytes of the file.

        Raises:
            ModelLoadError: the file ends early.
        """
        target = bytearray(length)
        view, done = memoryview(target), 0
        while done < length:
            count = os.preadv(self._fd, [view[done:]], offset + done)
            if count == 0:
                raise ModelLoadError(f"{self.name} ends early: it is truncated, or changed while it was read")
            done += count
        return target

    def read_rows(self, name: str, first: int, last: int) -> NDArray[np.float32]:
        """Decode rows of a tensor to float32, shape ``(last - first, columns)``.

        Raises:
            ModelLoadError: the file ends early, or a number is not finite.
        """
        tensor = self.tensors[name]
        data = self.read(tensor.begin + first * tensor.row_bytes, (last - first) * tensor.row_bytes)
        blocks = np.frombuffer(data, np.uint8).reshape(-1, tensor.kind.size)
        rows = tensor.kind.decode(blocks).reshape(last - first, tensor.shape[-1])
        if not np.isfinite(rows).all():
            raise ModelLoadError(f"{self.name}: tensor {show_name(name)} holds a number that is not finite")
        return rows

    def _read_tensors(self, header: _Header, count: int) -> dict[str, GgufTensor]:
        alignment = self.values.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise ModelLoadError(f"{self.name}: general.alignment is not a power of two from 8 to {MAX_ALIGNMENT}")
        found: list[tuple[str, BlockType, tuple[int, ...], int]] = []
        for _ in range(count):
            name = header.text(MAX_NAME_BYTES, "a tensor's name")
            rank = header.number("<u4")
            if not 1 <= rank <= MAX_DIMENSIONS:
                raise ModelLoadError(f"{self.name}: tensor {show_name(name)} has {rank} dimensions")
            shape = tuple(header.number("<u8") for _ in range(rank))[::-1]
            kind, offset = header.number("<u4"), header.number("<u8")
            if kind not in TYPES:
                raise ModelLoadError(
                    f"{self.name}: tensor {show_name(name)} is of the unsupported type {kind}; "
                    f"supported are {', '.join(one.name for one in TYPES.values())}"
                )
            if not all(shape) or shape[-1] % TYPES[kind].numbers:
                raise ModelLoadError(
                    f"{self.name}: tensor {show_name(name)} of shape {list(shape)} has no whole blocks"
                )
            if offset % alignment:
                raise ModelLoadError(f"{self.name}: the data of tensor {show_name(name)} is not aligned")
            found.append((name, TYPES[kind], shape, offset))
        start = -(-header.position // alignment) * alignment
        return self._place(found, start)

    def _place(self, found: list[tuple[str, BlockType, tuple[int, ...], int]], start: int) -> dict[str, GgufTensor]:
        """Index tensors by name, after checking that each has its own bytes inside the file."""
        tensors: dict[str, GgufTensor] = {}
        position = start
        for name, kind, shape, offset in sorted(found, key=lambda one: one[3]):
            tensor = GgufTensor(kind, shape, start + offset)
            end = tensor.begin + tensor.rows * tensor.row_bytes
            if name in tensors:
                raise ModelLoadError(f"{self.name}: there are two tensors {show_name(name)}")
            if tensor.begin < position:
                raise ModelLoadError(f"{self.name}: the data of tensor {show_name(name)} overlaps another's")
            if end > self.size:
                raise ModelLoadError(
                    f"{self.name}: tensor {show_name(name)} ends at byte {end} of a file of {self.size}: "
                    "it is truncated, or its header is false"
                )
            tensors[name] = tensor
            position = end
        return tensors


class _Header:
    """Reads the header sequentially, in pieces of bounded size."""

    def __init__(self, file: GgufFile) -> None:
        self.name = file.name
        self.position = 0
        self._file = file
        self._piece = bytearray()
        self._piece_at = 0
        self._end = min(file.size, MAX_HEADER_BYTES)

    def take(self, length: int, what: str) -> memoryview:
        """Return the next bytes."""
        if length > self._end - self.position:
            why = (
                "the file ends before"
                if self._end == self._file.size
                else f"within {MAX_HEADER_BYTES} bytes there is no"
            )
            raise ModelLoadError(f"{self.name}: {why} the end of {what}: it is truncated, or a length in it is false")
        if self.position + length > self._piece_at + len(self._piece):
            self._piece_at = self.position
            self._piece = self._file.read(self.position, min(max(length, _CHUNK_BYTES), self._end - self.position))
        begin = self.position - self._piece_at
        self.position += length
        return memoryview(self._piece)[begin : begin + length]

    def number(self, kind: str) -> int:
        """Read an integer."""
        data = self.take(int(kind[2]), "a number")
        return int.from_bytes(data, "little", signed=kind[1] == "i")

    def text(self, limit: int, what: str) -> str:
        """Read a string of at most ``limit`` bytes."""
        length = self.number("<u8")
        if length > limit:
            raise ModelLoadError(f"{self.name}: {what} has {length} bytes; at most {limit} are allowed")
        try:
            return bytes(self.take(length, what)).decode("utf-8")
        except UnicodeDecodeError as error:
            raise ModelLoadError(f"{self.name}: {what} is not UTF-8") from error

    def value(self, key: str) -> Value:
        """Read a type and the value that follows it."""
        kind = self.number("<u4")
        what = f"the value of {show_name(key)}"
        if kind == _ARRAY:
            return self._array(what)
        if kind == _STRING:
            return self.text(MAX_TEXT_BYTES, what)
        if kind not in _NUMBERS:
            raise ModelLoadError(f"{self.name}: {what} is of the unknown type {kind}")
        code = _NUMBERS[kind]
        if code[1] == "f":
            number: float = struct.unpack("<" + ("f" if code[2] == "4" else "d"), self.take(int(code[2]), what))[0]
            return number
        number_ = self.number(code)
        return bool(number_) if kind == _BOOL else number_

    def _array(self, what: str) -> Value:
        kind, count = self.number("<u4"), self.number("<u8")
        if kind == _STRING:
            if count > MAX_STRINGS:
                raise ModelLoadError(f"{self.name}: {what} has {count} strings; at most {MAX_STRINGS} are allowed")
            return [self.text(MAX_TEXT_BYTES, what) for _ in range(count)]
        if kind not in _NUMBERS:
            raise ModelLoadError(f"{self.name}: {what} is an array of the unsupported type {kind}")
        data = self.take(count * int(_NUMBERS[kind][2]), what)
        return np.frombuffer(bytes(data), _NUMBERS[kind])


def _read_counts(header: _Header) -> tuple[int, int]:
    """Read the numbers of pairs and tensors."""
    if bytes(header.take(4, "the magic")) != MAGIC:
        raise ModelLoadError(f"{header.name} is not a GGUF file: it does not begin with GGUF")
    version = header.number("<u4")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
        kind = "big-endian" if swapped else f"version {version}"
        raise ModelLoadError(f"{header.name} is a GGUF file of {kind}; supported are versions 2 and 3, little-endian")
    tensors, pairs = header.number("<u8"), header.number("<u8")
    if pairs > MAX_PAIRS or tensors > MAX_TENSORS:
        raise ModelLoadError(
            f"{header.name} says that it has {pairs} values and {tensors} tensors; "
            f"at most {MAX_PAIRS} and {MAX_TENSORS} are allowed"
        )
    return pairs, tensors


def _read_pairs(header: _Header, count: int) -> dict[str, Value]:
    values: dict[str, Value] = {}
    for _ in range(count):
        key = header.text(MAX_NAME_BYTES, "a key")
        if key in values:
            raise ModelLoadError(f"{header.name}: there are two values of {show_name(key)}")
        values[key] = header.value(key)
    return values
