"""Samples of bfloat16 weights, and a decoder of coded tensors that is written after the document, bit by bit."""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

from engine.model.coded.codec import NumpyCodec, WeightCodec
from engine.model.coded.layout import ALIGNMENT, HEADER_BYTES, Code, CodedHeader
from engine.model.coded.palette import choose_code

Words = NDArray[np.uint16]


def rounded(numbers: NDArray[np.float64]) -> Words:
    """Numbers as bfloat16, rounded to nearest even."""
    words = numbers.astype(np.float32).view(np.uint32)
    return ((words + 0x7FFF + ((words >> 16) & 1)) >> 16).astype(np.uint16)


def trained(count: int, seed: int = 0, *, odd: int = 0) -> Words:
    """Weights of few exponents, with ``odd`` words of any bits among them."""
    draw = np.random.default_rng(seed)
    words = rounded(draw.normal(0, 0.02, count))
    words[draw.integers(0, count, odd)] = draw.integers(0, 1 << 16, odd)
    return words


EVERY_WORD = np.arange(1 << 16, dtype=np.uint16)
"""Every bit pattern: zeros, denormals, infinities and NaN of all payloads, with both signs."""

SAMPLES = {
    "normal": trained(50_000),
    "odd ones": trained(20_001, 1, odd=700),
    "every word": EVERY_WORD,
    "every word, shuffled": np.random.default_rng(2).permutation(EVERY_WORD),
    "noise": np.random.default_rng(3).integers(0, 1 << 16, 9_000).astype(np.uint16),
    "denormals": np.tile(np.array([0x0000, 0x8000, 0x0001, 0x807F], np.uint16), 2_000),
    "not finite": np.tile(np.array([0x7F80, 0xFF80, 0x7FC1, 0xFFFF], np.uint16), 1_500),
    "ones": np.full(4_097, 0x3F80, np.uint16),
    "zeros": np.zeros(4_096, np.uint16),
    "one word": np.array([0x7FC1], np.uint16),
    "seventeen exponents": np.repeat(np.arange(100, 117, dtype=np.uint16) << 7, 500),
    "steep": np.repeat(np.arange(100, 116, dtype=np.uint16) << 7, 1 << np.arange(16)),
}
"""Weights that a codec must keep."""


def coded(words: Words, codec: WeightCodec | None = None, shape: tuple[int, ...] = ()) -> bytes:
    """A coded tensor."""
    codec = codec or NumpyCodec()
    weights = words.tobytes()
    code = choose_code(codec.count(weights))
    table, data = codec.encode(code, weights)
    size = HEADER_BYTES + len(table) + len(data)
    size += -size % ALIGNMENT
    header = CodedHeader(code, shape or (len(words),), size)
    return (header.pack() + table + bytes(data)).ljust(size, b"\0")


def split(blob: bytes) -> tuple[Code, bytes, bytes, int]:
    """Code, table and chunks of a well-formed coded tensor, and the number of weights."""
    entries, (weights,) = blob[9], struct.unpack_from("<Q", blob, 16)
    chunks = -(-weights // 4_096)
    table = blob[128 : 128 + 4 * chunks]
    sizes = struct.iter_unpack("<HH", table)
    length = sum(codes + 3 * escapes for codes, escapes in sizes) + weights
    begin = 128 + len(table)
    return Code(blob[32 : 32 + entries], blob[48 : 48 + entries]), table, blob[begin : begin + length], weights


def decoded_after_the_document(blob: bytes) -> Words:
    """Weights of a coded tensor, by the words of docs/compressed-weights.md and nothing of the engine."""
    (weights,) = struct.unpack_from("<Q", blob, 16)
    names, code, before = {}, 0, 0
    for place in range(blob[9]):
        length = blob[48 + place]
        code <<= length - before
        names[format(code, f"0{length}b")] = blob[32 + place]
        code, before = code + 1, length
    chunks = -(-weights // 4_096)
    at, found = 128 + 4 * chunks, []
    for chunk in range(chunks):
        size, escapes = struct.unpack_from("<HH", blob, 128 + 4 * chunk)
        count = min(4_096, weights - 4_096 * chunk)
        exponents = list(blob[at : at + count])
        if size != count:
            bits, exponents, word = "".join(format(byte, "08b") for byte in blob[at : at + size]), [], ""
            for bit in bits:
                word += bit
                if word in names and len(exponents) < count:
                    exponents.append(names[word])
                    word = ""
        at += size
        for _ in range(escapes):
            place, exponent = struct.unpack_from("<HB", blob, at)
            exponents[place] = exponent
            at += 3
        for exponent, rest in zip(exponents, blob[at : at + count], strict=True):
            found.append((rest >> 7) << 15 | exponent << 7 | (rest & 127))
        at += count
    return np.array(found, np.uint16)
