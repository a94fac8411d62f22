"""Layout of a coded tensor: bfloat16 weights in a safetensors file, exponents coded, every bit kept.

``docs/compressed-weights.md`` describes every byte. A tensor ``NAME`` is stored as ``NAME.coded_bf16``, a row of bytes:
a header of 128 bytes, a table with four bytes for each chunk of 4,096 weights, the chunks, zeros up to a multiple of
eight. All lengths are compared with each other, with the file's header and with the tensor's shape before memory is
allocated: decoded weights take at most twice the bytes of the file.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.errors import ModelLoadError

SUFFIX = ".coded_bf16"
"""End of a coded tensor's name in the file."""

METADATA = {"coded_bf16": "1"}
"""Entry of ``__metadata__`` that names the form, for people and other programs; readers go by names and headers."""

MAGIC = b"ATHNBF16"
VERSION = 1

HEADER_BYTES = 128
CHUNK = 4_096
"""Weights of a chunk; the last one of a tensor may have fewer."""

ENTRY_BYTES = 4
"""Bytes of a chunk's entry in the table."""

ESCAPE_BYTES = 3
"""Bytes of an exponent outside the palette."""

MAX_PALETTE = 16
"""Largest number of exponents that have codes."""

MAX_CODE_BITS = 11
"""Length of the longest code in bits: a table by which they are read takes 16 KiB, in the fastest cache."""

MAX_DIMENSIONS = 8
ALIGNMENT = 8
"""The bytes of a coded tensor are a multiple of this, so that tensors behind it stay aligned."""

_FIXED = struct.Struct("<8sBBB5xQQ16s16s8Q")


@dataclass(frozen=True, slots=True)
class Code:
    """Palette of a tensor: exponents in the order of their codes, and the lengths of these in bits."""

    exponents: bytes
    lengths: bytes

    def values(self) -> list[int]:
        """Return the codes as numbers, the highest bit first in the file: in order, as canonical Huffman codes are."""
        codes, code, before = [], 0, 0
        for length in self.lengths:
            code <<= length - before
            codes.append(code)
            code, before = code + 1, length
        return codes


@dataclass(frozen=True, slots=True)
class CodedHeader:
    """Checked header of a coded tensor."""

    code: Code
    shape: tuple[int, ...]
    size: int
    """Bytes of the coded tensor, this header included."""

    @property
    def weights(self) -> int:
        """Return the number of weights."""
        return math.prod(self.shape)

    @property
    def chunks(self) -> int:
        """Return the number of chunks."""
        return -(-self.weights // CHUNK)

    @property
    def data_begin(self) -> int:
        """Return where the first chunk begins, in bytes from the header's begin."""
        return HEADER_BYTES + ENTRY_BYTES * self.chunks

    def pack(self) -> bytes:
        """Return the bytes of the header."""
        return _FIXED.pack(
            MAGIC,
            VERSION,
            len(self.code.exponents),
            len(self.shape),
            self.weights,
            self.size,
            self.code.exponents,
            self.code.lengths,
            *self.shape,
            *[0] * (MAX_DIMENSIONS - len(self.shape)),
        )


def parse_coded_header(what: str, data: bytes, size: int) -> CodedHeader:
    """Validate the header of a coded tensor against its size.

    Args:
        what: file and tensor, for messages.
        data: the first ``HEADER_BYTES`` bytes.
        size: bytes of the tensor in the file.

    Raises:
        ModelLoadError: the header breaks the format.
    """
    if len(data) != HEADER_BYTES or data[: len(MAGIC)] != MAGIC:
        raise ModelLoadError(f"{what} is not a coded tensor")
    _, version, entries, rank, weights, stated, exponents, lengths, *sizes = _FIXED.unpack(data)
    if version != VERSION:
        raise ModelLoadError(f"{what} is coded in version {version}; supported is {VERSION}")
    if rank > MAX_DIMENSIONS or any(sizes[rank:]) or data[11:16] != bytes(5):
        raise ModelLoadError(f"{what} has a malformed shape in its coded header")
    header = CodedHeader(_checked_code(what, entries, exponents, lengths), tuple(sizes[:rank]), stated)
    if weights != header.weights or not weights:
        raise ModelLoadError(f"{what} says that it has {weights} weights; its shape has {header.weights}")
    # A chunk takes a byte for each weight and at least one for its exponents, at most two bytes for each weight.
    least = header.data_begin + weights + header.chunks
    most = header.data_begin + 2 * weights + ALIGNMENT - 1
    if stated != size or size % ALIGNMENT or not least <= size <= most:
        raise ModelLoadError(f"{what} has {size} bytes; its header says {stated} for {weights} weights")
    return header


def _checked_code(what: str, entries: int, exponents: bytes, lengths: bytes) -> Code:
    code = Code(exponents[:entries], lengths[:entries])
    if not 2 <= entries <= MAX_PALETTE or any(exponents[entries:]) or any(lengths[entries:]):
        raise ModelLoadError(f"{what} has a malformed palette")
    if len(set(code.exponents)) != entries:
        raise ModelLoadError(f"{what} has an exponent twice in its palette")
    if not all(1 <= one <= MAX_CODE_BITS for one in code.lengths) or list(code.lengths) != sorted(code.lengths):
        raise ModelLoadError(f"{what} has malformed lengths of codes")
    if sum(1 << (MAX_CODE_BITS - one) for one in code.lengths) != 1 << MAX_CODE_BITS:
        raise ModelLoadError(f"{what} has codes that are ambiguous or incomplete")
    return code


def chunk_offsets(what: str, header: CodedHeader, table: bytes | bytearray) -> NDArray[np.int64]:
    """Validate the table; return where each chunk begins, in bytes from the header's begin, and where the last one
    ends.

    Raises:
        ModelLoadError: a chunk is longer than its weights as they are, or the chunks do not fill the tensor.
    """
    coded, escapes = np.frombuffer(table, "<u2").reshape(-1, 2).astype(np.int64).T
    counts = np.full(header.chunks, CHUNK, np.int64)
    counts[-1] = header.weights - CHUNK * (header.chunks - 1)
    lengths = coded + ESCAPE_BYTES * escapes
    if not coded.all() or bool((lengths > counts).any()):
        raise ModelLoadError(f"{what} has a chunk of a malformed length")
    offsets = np.full(header.chunks + 1, header.data_begin, np.int64)
    offsets[1:] += np.cumsum(lengths + counts)
    if -int(offsets[-1]) // ALIGNMENT != -header.size // ALIGNMENT:
        raise ModelLoadError(f"{what} has chunks of {int(offsets[-1])} bytes in {header.size}")
    return offsets
