"""Reader of the safetensors format that trusts no size in the file.

Format: ``length u64 LE | header JSON | data``. The header maps names to ``{"dtype", "shape", "data_offsets"}``, with
offsets relative to the data; ``__metadata__`` is free text and is ignored (huggingface.co/docs/safetensors).

All of these checks precede the first read or allocation of data: the header fits the file and ``MAX_HEADER_BYTES``;
names are unique; dtypes are known; ``product(shape) * item size`` (Python ints, so it cannot overflow) equals the
length between the offsets; sorted by offset, the tensors cover the file from 0 to its end without overlap or gap. Data
is read with ``pread`` into memory that the caller has allocated: no mmap, so a file that shrinks later causes an error
and not a signal.

A coded tensor (``engine.model.coded``) appears under its own name, with the shape and dtype of the weights that it
stands for, and is decoded while it is read.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from engine.errors import ModelLoadError
from engine.model.coded.codec import WeightCodec
from engine.model.coded.layout import HEADER_BYTES, SUFFIX, CodedHeader, parse_coded_header
from engine.model.coded.reading import CodedReader

MAX_HEADER_BYTES = 100_000_000
"""Largest JSON header in bytes; the limit of the reference implementation."""

MAX_TENSORS = 1_000_000
"""Largest number of tensors in one file; the largest published checkpoints have about 100,000 in all files together."""

MAX_RANK = 8
"""Largest number of dimensions; weights have at most 5."""

MAX_READ_BYTES = 1 << 26
"""Largest single read in bytes: large enough to be limited by the drive, small enough to be interruptible."""

MAX_SHOWN = 96
"""Characters of an untrusted tensor name that a message repeats."""

MAX_NAMED = 4
"""Number of tensors that one message names."""

LENGTH_BYTES = 8
"""Size of the header's length field in bytes."""

DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E5M2": 1,
    "F8_E4M3": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
}
"""Bytes of one number of every dtype with a whole number of bytes."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Position of a tensor: ``begin .. end`` in bytes from the start of the file, half-open."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    coded: CodedHeader | None = None
    """Header of a coded tensor, whose bytes are not those of its dtype and shape."""

    @property
    def data_bytes(self) -> int:
        """Return the bytes of its numbers, decoded."""
        return DTYPE_BYTES[self.dtype] * math.prod(self.shape)


OpenCodec = Callable[[], WeightCodec]
"""Gives what decodes coded tensors; called when the first one is read."""


class SafetensorsFile:
    """Open file with a validated header. A context manager."""

    def __init__(
        self,
        path: Path,
        open_codec: OpenCodec | None = None,
        fd: int | None = None,
        max_header_bytes: int = MAX_HEADER_BYTES,
    ) -> None:
        """Open the file and validate its header.

        Args:
            path: of the file.
            open_codec: gives what decodes coded tensors; None: they appear as the bytes that they are.
            fd: descriptor of the file where it is open already; it stays the caller's.
            max_header_bytes: largest header that is parsed.

        Raises:
            ModelLoadError: the file cannot be opened or breaks the format; the message names the file.
        """
        self.name = path.name
        self._open_codec = open_codec
        self._reader: tuple[int, CodedReader] | None = None
        self._is_own = fd is None
        self._max_header_bytes = max_header_bytes
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if fd is None else fd
        except OSError as error:
            raise ModelLoadError(f"{self.name} cannot be opened: {error.strerror}") from error
        try:
            self.tensors = self._read_header()
            if open_codec is not None:
                self.tensors = self._with_coded(self.tensors)
        except ModelLoadError:
            self.close()
            raise

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file, if it is this object's own."""
        if self._is_own:
            os.close(self._fd)

    def read_stretch(self, name: str, offset: int, target: memoryview) -> None:
        """Fill ``target`` with the tensor's bytes starting at ``offset``.

        Raises:
            ModelLoadError: the file ends early, or a coded tensor breaks its format.
        """
        entry = self.tensors[name]
        assert 0 <= offset <= entry.data_bytes - target.nbytes, "the stretch does not lie in the tensor"
        if entry.coded is None:
            self._read_exactly(target, entry.begin + offset)
        else:
            self._coded_reader(name, entry, entry.coded).read_stretch(offset, target)

    def _coded_reader(self, name: str, entry: TensorEntry, header: CodedHeader) -> CodedReader:
        """Return the reader of a coded tensor; the last one is kept, as a tensor is read in many stretches."""
        kept = self._reader
        if kept is not None and kept[0] == entry.begin:
            return kept[1]
        assert self._open_codec is not None, "without a codec no tensor is taken for a coded one"

        def read(offset: int, target: memoryview) -> None:
            self._read_exactly(target, entry.begin + offset)

        reader = CodedReader(f"{self.name}: tensor {show_name(name)}", header, read, self._open_codec())
        self._reader = entry.begin, reader
        return reader

    def _with_coded(self, tensors: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
        """Return the tensors with coded ones under their own names."""
        found: dict[str, TensorEntry] = {}
        for name, entry in tensors.items():
            own, what = name.removesuffix(SUFFIX), f"{self.name}: tensor {show_name(name)}"
            if own != name:
                if entry.dtype != "U8" or len(entry.shape) != 1 or entry.shape[0] < HEADER_BYTES:
                    raise ModelLoadError(f"{what} is not a coded tensor")
                if own in tensors:
                    raise ModelLoadError(f"{what} is there twice: coded and as it is")
                data = bytearray(HEADER_BYTES)
                self._read_exactly(memoryview(data), entry.begin)
                header = parse_coded_header(what, bytes(data), entry.shape[0])
                entry = TensorEntry("BF16", header.shape, entry.begin, entry.end, header)
            found[own] = entry
        return found

    def _read_exactly(self, target: memoryview, offset: int) -> None:
        done = 0
        while done < target.nbytes:
            try:
                count = os.preadv(self._fd, [target[done : done + MAX_READ_BYTES]], offset + done)
            except OSError as error:
                raise ModelLoadError(f"{self.name} cannot be read: {error.strerror}") from error
            if count == 0:
                raise ModelLoadError(f"{self.name} ends early: it changed while it was read")
            done += count

    def _read_header(self) -> dict[str, TensorEntry]:
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            raise ModelLoadError(f"{self.name} is not a regular file")
        if status.st_size < LENGTH_BYTES:
            raise ModelLoadError(f"{self.name} is too short for a header")
        prefix = bytearray(LENGTH_BYTES)
        self._read_exactly(memoryview(prefix), 0)
        length = int.from_bytes(prefix, "little")
        if length > self._max_header_bytes or length > status.st_size - LENGTH_BYTES:
            raise ModelLoadError(f"{self.name} says that its header has {length} bytes: more than allowed or there")
        header = bytearray(length)
        self._read_exactly(memoryview(header), LENGTH_BYTES)
        return parse_header(self.name, bytes(header), status.st_size - LENGTH_BYTES - length)


def parse_header(name: str, header: bytes, data_bytes: int) -> dict[str, TensorEntry]:
    """Validate a JSON header against the size of the data that follows it.

    Args:
        name: the file's name, for messages.
        header: the header without its length.
        data_bytes: bytes of the file after the header.

    Returns:
        The tensors by name, in the order of their data.

    Raises:
        ModelLoadError: the header breaks the format.
    """
    if not header.startswith(b"{"):
        raise ModelLoadError(f"{name}: the header does not begin with a JSON object")
    try:
        raw = json.loads(header.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{name}: the header is not well-formed JSON") from error
    raw.pop("__metadata__", None)
    if len(raw) > MAX_TENSORS:
        raise ModelLoadError(f"{name}: {len(raw)} tensors; at most {MAX_TENSORS} are allowed")
    start = LENGTH_BYTES + len(header)
    entries = [(tensor, _entry(name, tensor, value, start)) for tensor, value in raw.items()]
    entries.sort(key=lambda item: (item[1].begin, item[1].end))
    position = start
    for tensor, entry in entries:
        if entry.begin != position:
            shown = show_name(tensor)
            raise ModelLoadError(f"{name}: tensor {shown} overlaps another or leaves a hole before it")
        position = entry.end
    if position != start + data_bytes:
        raise ModelLoadError(f"{name}: tensors take {position - start} bytes, the file has {data_bytes}")
    return dict(entries)


def show_name(name: str) -> str:
    """Format an untrusted name for a message: quoted, printable, short."""
    return ascii(name[:MAX_SHOWN])


def show_names(names: list[str]) -> str:
    """Format some untrusted names for a message; beyond ``MAX_NAMED`` they are counted."""
    shown = ", ".join(show_name(name) for name in names[:MAX_NAMED])
    more = len(names) - MAX_NAMED
    return f"{shown} and {more} more" if more > 0 else shown


def _entry(name: str, tensor: str, value: object, start: int) -> TensorEntry:
    shown = show_name(tensor)
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise ModelLoadError(f"{name}: tensor {shown} is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise ModelLoadError(f"{name}: tensor {shown} has an unknown dtype")
    if not _sizes(shape) or len(shape) > MAX_RANK:
        raise ModelLoadError(f"{name}: tensor {shown} has a malformed shape")
    if not _sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ModelLoadError(f"{name}: tensor {shown} has malformed offsets")
    size = DTYPE_BYTES[dtype] * math.prod(shape)
    if size != offsets[1] - offsets[0]:
        raise ModelLoadError(f"{name}: tensor {shown} has {offsets[1] - offsets[0]} bytes, its shape needs {size}")
    return TensorEntry(dtype, tuple(shape), start + offsets[0], start + offsets[1])


def _sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(one) is int and 0 <= one < 1 << 63 for one in value)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a key occurs twice")
    return values


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is not JSON")
