"""Reads any stretch of a coded tensor as the bfloat16 numbers that it stands for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

from engine.errors import ModelLoadError
from engine.model.coded.codec import WeightCodec
from engine.model.coded.layout import CHUNK, ENTRY_BYTES, HEADER_BYTES, CodedHeader, chunk_offsets

ITEM_BYTES = 2
"""Bytes of a decoded weight."""

Read = Callable[[int, memoryview], None]
"""Fills memory with bytes of the file, from this many bytes behind the coded tensor's begin."""


class CodedReader:
    """One coded tensor, its table checked and held: eight bytes for each chunk."""

    def __init__(self, what: str, header: CodedHeader, read: Read, codec: WeightCodec) -> None:
        """Read and check the table.

        Args:
            what: file and tensor, for messages.
            header: its checked header.
            read: reads the file.
            codec: decodes chunks.

        Raises:
            ModelLoadError: the table breaks the format, or the file ends early.
        """
        self._what, self._header, self._read, self._codec = what, header, read, codec
        self._table = bytearray(ENTRY_BYTES * header.chunks)
        read(HEADER_BYTES, memoryview(self._table))
        self._offsets = chunk_offsets(what, header, self._table)

    def read_stretch(self, offset: int, target: memoryview) -> None:
        """Fill ``target`` with decoded bytes, starting at the decoded byte ``offset``.

        Raises:
            ModelLoadError: a chunk breaks the format, or the file ends early.
        """
        assert offset % ITEM_BYTES == 0 == target.nbytes % ITEM_BYTES, "a stretch has whole numbers"
        first = offset // ITEM_BYTES
        last = first + target.nbytes // ITEM_BYTES
        stretches = list(self._stretches(first, last))

        def decode(chunks: tuple[int, int]) -> None:
            self._decode(chunks, first, target)

        if self._codec.threads > 1 and len(stretches) > 1:
            with ThreadPoolExecutor(min(self._codec.threads, len(stretches))) as pool:
                for _ in pool.map(decode, stretches):
                    pass
        else:
            for one in stretches:
                decode(one)

    def _stretches(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Yield ranges of chunks, of a size that the codec takes at once, that cover these weights."""
        if first < last:
            begin, end = first // CHUNK, -(-last // CHUNK)
            yield from pairwise((*range(begin, end, self._codec.chunks_at_once), end))

    def _decode(self, chunks: tuple[int, int], first: int, target: memoryview) -> None:
        """Decode whole chunks into their part of ``target``, which begins at weight ``first``."""
        begin, end = (int(self._offsets[one]) for one in chunks)
        data = bytearray(end - begin)
        self._read(begin, memoryview(data))
        start, stop = chunks[0] * CHUNK, min(chunks[1] * CHUNK, self._header.weights)
        low, high = max(start, first), min(stop, first + target.nbytes // ITEM_BYTES)
        part = target[(low - first) * ITEM_BYTES : (high - first) * ITEM_BYTES]
        whole = (low, high) == (start, stop)
        room = part if whole else memoryview(bytearray((stop - start) * ITEM_BYTES))
        table = memoryview(self._table)[chunks[0] * ENTRY_BYTES : chunks[1] * ENTRY_BYTES]
        try:
            self._codec.decode(self._header.code, table, memoryview(data), room)
        except ModelLoadError as error:
            raise ModelLoadError(f"{self._what} cannot be decoded: {error}") from error
        if not whole:
            part[:] = room[(low - start) * ITEM_BYTES : (high - start) * ITEM_BYTES]
