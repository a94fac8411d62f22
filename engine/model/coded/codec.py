"""Codecs of coded tensors: what decodes and codes chunks, and the one in numpy for machines without compiled kernels.

``engine.backends.native.coding`` has the compiled one. Both give the same bytes.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.errors import ModelLoadError
from engine.model.coded.layout import CHUNK, ESCAPE_BYTES, MAX_CODE_BITS, Code
from engine.model.coded.palette import ESCAPE_FLAG, code_table

Buffer = bytes | bytearray | memoryview

WINDOW = (1 << MAX_CODE_BITS) - 1
SPARE_BYTES = CHUNK * MAX_CODE_BITS // 8 + 4
"""Bytes that the codes of one chunk can lead past their begin, whatever they are."""


class WeightCodec(Protocol):
    """Decodes and codes whole chunks of one tensor. Buffers hold little-endian numbers."""

    name: str
    """What computes, for people."""
    chunks_at_once: int
    """Chunks that one call should get: enough to be fast, few enough for memory."""
    threads: int
    """Threads that may decode different chunks at the same time."""

    def count(self, weights: Buffer) -> list[int]:
        """Return how often each of the 256 exponents occurs in bfloat16 weights."""

    def encode(self, code: Code, weights: Buffer) -> tuple[bytes, bytearray]:
        """Return table and chunks of bfloat16 weights; they begin at the begin of a chunk."""

    def measure(self, code: Code, weights: Buffer) -> tuple[bytes, int]:
        """Return the table of bfloat16 weights, and the bytes of their chunks."""

    def decode(self, code: Code, table: Buffer, data: Buffer, target: memoryview) -> None:
        """Fill ``target`` with the bfloat16 weights of whole chunks.

        Raises:
            ModelLoadError: the chunks break the format.
        """


class NumpyCodec:
    """Codec of array operations, some ten times slower than compiled code and more on small tensors."""

    name = "numpy (slow: without compiled kernels)"
    chunks_at_once = 256
    threads = 1

    def count(self, weights: Buffer) -> list[int]:
        """See ``WeightCodec``."""
        found: list[int] = np.bincount(_exponents(_words(weights)), minlength=256).tolist()
        return found

    def measure(self, code: Code, weights: Buffer) -> tuple[bytes, int]:
        """See ``WeightCodec``."""
        words = _words(weights)
        bits, escapes = _lengths(np.array(code_table(code), np.uint32)[_exponents(words)])
        counts = _counts(len(words))
        coded = (bits + 7) >> 3
        plain = coded + ESCAPE_BYTES * escapes >= counts
        table = np.stack((np.where(plain, counts, coded), np.where(plain, 0, escapes)), 1).astype("<u2")
        return table.tobytes(), int(table[:, 0].sum() + ESCAPE_BYTES * table[:, 1].sum(dtype=np.int64)) + len(words)

    def encode(self, code: Code, weights: Buffer) -> tuple[bytes, bytearray]:
        """See ``WeightCodec``."""
        table, size = self.measure(code, weights)
        data, at = bytearray(size), 0
        words, codes = _words(weights), np.array(code_table(code), np.uint32)
        for chunk, (coded, escapes) in enumerate(np.frombuffer(table, "<u2").reshape(-1, 2).tolist()):
            some = words[chunk * CHUNK : (chunk + 1) * CHUNK]
            exponents = _exponents(some)
            found = codes[exponents]
            part = exponents if coded == len(some) else _packed(found)
            data[at : at + coded] = part.tobytes()
            at += coded
            if escapes:
                places = np.flatnonzero(found >= ESCAPE_FLAG)
                parts = (places & 255, places >> 8, exponents[places])
                data[at : at + ESCAPE_BYTES * escapes] = np.stack(parts, 1).astype(np.uint8).tobytes()
                at += ESCAPE_BYTES * escapes
            data[at : at + len(some)] = ((some >> 8 & 0x80) | (some & 0x7F)).astype(np.uint8).tobytes()
            at += len(some)
        return table, data

    def decode(self, code: Code, table: Buffer, data: Buffer, target: memoryview) -> None:
        """See ``WeightCodec``. All chunks are read in step: weight by weight, one operation for all of them."""
        words = np.frombuffer(target, "<u2")
        counts = _counts(len(words))
        coded, escapes = np.frombuffer(table, "<u2").reshape(-1, 2).astype(np.int64).T
        lengths = coded + ESCAPE_BYTES * escapes
        ends = np.cumsum(lengths + counts)
        if len(coded) != len(counts) or not coded.all() or bool((lengths > counts).any()) or ends[-1] != len(data):
            raise ModelLoadError("chunks of malformed lengths")
        begins = ends - lengths - counts
        source = np.frombuffer(data, np.uint8)
        exponents = np.zeros((len(counts), CHUNK), np.uint8)
        plain = coded == counts
        for chunk in np.flatnonzero(plain).tolist():
            exponents[chunk, : counts[chunk]] = source[begins[chunk] : begins[chunk] + counts[chunk]]
        if not plain.all():
            _read_codes(code, source, ~plain, (begins, coded, counts), exponents)
        for chunk in np.flatnonzero(escapes).tolist():
            first = int(begins[chunk] + coded[chunk])
            found = source[first : first + ESCAPE_BYTES * int(escapes[chunk])].reshape(-1, ESCAPE_BYTES)
            places = found[:, 0].astype(np.int64) | found[:, 1].astype(np.int64) << 8
            if places[-1] >= counts[chunk] or bool((np.diff(places) <= 0).any()):
                raise ModelLoadError("an escape of a malformed place")
            exponents[chunk, places] = found[:, 2]
        for chunk, (end, count) in enumerate(zip(ends.tolist(), counts.tolist(), strict=True)):
            rest = source[end - count : end].astype(np.uint16)
            merged = (rest & 0x80) << 8 | exponents[chunk, :count].astype(np.uint16) << 7 | (rest & 0x7F)
            words[chunk * CHUNK : chunk * CHUNK + count] = merged


def open_numpy_codec() -> WeightCodec:
    """Return the codec in numpy."""
    return NumpyCodec()


def _words(weights: Buffer) -> NDArray[np.uint16]:
    return np.frombuffer(weights, "<u2")


def _exponents(words: NDArray[np.uint16]) -> NDArray[np.uint8]:
    return (words >> 7 & 255).astype(np.uint8)


def _counts(weights: int) -> NDArray[np.int64]:
    """Return the number of weights of each chunk."""
    counts = np.full(-(-weights // CHUNK), CHUNK, np.int64)
    counts[-1] = weights - CHUNK * (len(counts) - 1)
    return counts


def _lengths(found: NDArray[np.uint32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the bits and the escapes of each chunk, from the codes of its weights."""
    begins = np.arange(0, len(found), CHUNK)
    bits, escapes = (found >> 16 & 255).astype(np.int64), (found >> 24).astype(np.int64)
    return np.add.reduceat(bits, begins), np.add.reduceat(escapes, begins)


def _packed(found: NDArray[np.uint32]) -> NDArray[np.uint8]:
    """Return codes one behind the other, the highest bit first, zeros up to a whole byte."""
    lengths = (found >> 16 & 255).astype(np.int64)
    ends = np.cumsum(lengths)
    below = np.repeat(ends, lengths) - 1 - np.arange(ends[-1])
    return np.packbits((np.repeat(found & 0xFFFF, lengths) >> below & 1).astype(np.uint8))


def _read_codes(
    code: Code,
    source: NDArray[np.uint8],
    which: NDArray[np.bool_],
    chunks: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]],
    exponents: NDArray[np.uint8],
) -> None:
    """Fill the exponents of coded chunks."""
    begins, coded, counts = (one[which] for one in chunks)
    lengths = np.frombuffer(code.lengths, np.uint8)
    windows = 1 << (MAX_CODE_BITS - lengths.astype(np.int64))
    symbols, bits = np.repeat(np.frombuffer(code.exponents, np.uint8), windows), np.repeat(lengths, windows)
    parts = [source[begin : begin + size] for begin, size in zip(begins.tolist(), coded.tolist(), strict=True)]
    stream = np.concatenate((*parts, np.zeros(SPARE_BYTES, np.uint8))).astype(np.uint32)
    ahead = stream[:-2] << 16 | stream[1:-1] << 8 | stream[2:]
    # What a code that begins at each bit would be, and where the next one would begin.
    shifts = np.arange(24 - MAX_CODE_BITS, 24 - MAX_CODE_BITS - 8, -1, dtype=np.uint32)
    found = (ahead[:, None] >> shifts & WINDOW).reshape(-1)
    following = np.arange(len(found)) + bits[found]
    starts, most = np.cumsum(coded) - coded, int(counts.max())
    places = np.empty((most + 1, len(starts)), np.int64)
    places[0] = starts * 8
    for weight in range(most):
        np.take(following, places[weight], out=places[weight + 1], mode="clip")
    if bool(((places[counts, np.arange(len(starts))] + 7) // 8 != starts + coded).any()):
        raise ModelLoadError("a chunk whose codes do not end with it")
    exponents[which, :most] = symbols[found[places[:-1]]].T
