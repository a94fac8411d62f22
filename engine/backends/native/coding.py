"""Compiled codec of coded tensors (``csrc/coded.c``), for loading and for conversions."""

from __future__ import annotations

import numpy as np

from engine.backends.native.library import Library, UnusableKernelsError, open_libraries
from engine.errors import ModelLoadError
from engine.model.coded.codec import Buffer, NumpyCodec, WeightCodec
from engine.model.coded.layout import CHUNK, ENTRY_BYTES, Code
from engine.model.coded.palette import code_table

WRONG = {1: "a malformed code", 2: "chunks of malformed lengths", 3: "a malformed chunk"}
"""What the library's answers mean."""

BYTES_AT_MOST = 2
"""Bytes of a weight in a chunk at the most."""


class NativeCodec:
    """Codec of compiled code; the interpreter lock is free while it works."""

    chunks_at_once = 256

    def __init__(self, library: Library, threads: int = 1) -> None:
        self._library = library
        self.threads = threads
        self.name = f"compiled kernels {library.variant}"

    def count(self, weights: Buffer) -> list[int]:
        """See ``WeightCodec``."""
        words, counts = np.frombuffer(weights, "<u2"), np.zeros(256, np.int64)
        self._library.count_exponents(words.ctypes.data, len(words), counts.ctypes.data)
        found: list[int] = counts.tolist()
        return found

    def measure(self, code: Code, weights: Buffer) -> tuple[bytes, int]:
        """See ``WeightCodec``."""
        table = _table_for(weights)
        size = self._encode(code, weights, table, None)
        return table.tobytes(), size

    def encode(self, code: Code, weights: Buffer) -> tuple[bytes, bytearray]:
        """See ``WeightCodec``."""
        table = _table_for(weights)
        data = np.empty(len(weights) // 2 * BYTES_AT_MOST, np.uint8)
        size = self._encode(code, weights, table, data)
        return table.tobytes(), bytearray(data[:size].data)

    def decode(self, code: Code, table: Buffer, data: Buffer, target: memoryview) -> None:
        """See ``WeightCodec``."""
        palette = [np.frombuffer(one, np.uint8) for one in (code.exponents, code.lengths)]
        given = [np.frombuffer(one, np.uint8) for one in (table, data, target)]
        weights = len(given[2]) // 2
        assert len(given[0]) == ENTRY_BYTES * -(-weights // CHUNK), "the table has an entry for each chunk"
        answer = self._library.decode_weights(
            [one.ctypes.data for one in palette],
            len(palette[0]),
            given[0].ctypes.data,
            (given[1].ctypes.data, len(given[1])),
            (given[2].ctypes.data, weights),
        )
        if answer:
            raise ModelLoadError(WRONG[answer])

    def _encode(
        self, code: Code, weights: Buffer, table: np.ndarray[tuple[int], np.dtype[np.uint8]], data: object
    ) -> int:
        words, codes = np.frombuffer(weights, "<u2"), np.array(code_table(code), np.uint32)
        target = data.ctypes.data if isinstance(data, np.ndarray) else 0
        return self._library.encode_weights(
            codes.ctypes.data, (words.ctypes.data, len(words)), table.ctypes.data, target
        )


def open_codec(kernels: str, threads: int = 1) -> WeightCodec:
    """Return the compiled codec out of a directory of kernels; the one in numpy where there are none that run."""
    if not kernels:
        return NumpyCodec()
    try:
        return NativeCodec(next(open_libraries(kernels)), threads)
    except UnusableKernelsError:
        return NumpyCodec()


def _table_for(weights: Buffer) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.zeros(ENTRY_BYTES * -(-(len(weights) // 2) // CHUNK), np.uint8)
