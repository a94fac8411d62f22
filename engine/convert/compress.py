"""Weight compression program: ``python -m engine.convert.compress SOURCE TARGET FORM KERNELS``, for one safetensors
file.

FORM is ``coded`` (bfloat16 tensors are coded where that makes them smaller, see ``engine.model.coded``) or ``plain``
(coded tensors are decoded). KERNELS is the folder of compiled kernels, or empty. The target is read again through the
engine's own reader, and every bit is compared with the source.

The source is untrusted: the program locks itself down as ``engine.convert`` does, before it reads the first byte, and
reports in the same way. Equal sources give equal targets, with kernels and without.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401 - nothing can be imported later
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.backends.native.coding import open_codec
from engine.convert.calls import converter_calls
from engine.convert.output import write_all
from engine.convert.program import EXIT_FILES, EXIT_REFUSED, EXIT_USAGE, end, limit_resources, progress_of, say
from engine.errors import LockdownError, ModelLoadError
from engine.model.checkpoint.safetensors import SafetensorsFile, TensorEntry, show_name
from engine.model.coded.codec import WeightCodec
from engine.model.coded.layout import ALIGNMENT, CHUNK, HEADER_BYTES, METADATA, SUFFIX, CodedHeader
from engine.model.coded.palette import choose_code
from engine.sandbox.lockdown import lock_down

CODED, PLAIN = "coded", "plain"
FORMS = (CODED, PLAIN)

LEAST_WEIGHTS = 1_024
"""Smaller tensors stay as they are: a header of 128 bytes would be a tenth of what they take."""

SLAB_BYTES = 2 * CHUNK * 1_024
"""Bytes of weights in memory at a time: 8 MiB, whole chunks."""

PASSES = 4
"""Times that the source is read: exponents are counted, codes measured, the target written, then compared."""

CLASSES = (
    ("norms", ("norm",)),
    ("embedding", ("embed", "wte")),
    ("head", ("lm_head",)),
    ("experts", (".experts.", ".experts_")),
    ("attention", ("attn", "attention")),
    ("MLP", ("mlp", "feed_forward", "ffn")),
)
"""Tensor classes of the report, by what their names contain; the first that fits."""

OTHER = "other"


@dataclass(frozen=True, slots=True)
class Planned:
    """One tensor of the target."""

    name: str
    entry: TensorEntry
    header: CodedHeader | None = None
    """None for one that is stored as it is."""
    table: bytes = b""

    @property
    def size(self) -> int:
        """Return its bytes in the target."""
        return self.entry.data_bytes if self.header is None else self.header.size


class Work:
    """Counts bytes of all passes and tells them as a share of the source's."""

    def __init__(self, source: SafetensorsFile) -> None:
        self._total = sum(entry.data_bytes for entry in source.tensors.values())
        self._done = 0
        self._tell = progress_of(self._total)

    def add(self, count: int) -> None:
        """Count bytes of one pass."""
        self._done += count
        self._tell(self._done // PASSES)


def main(arguments: list[str]) -> int:
    """Write the target; return the exit status."""
    if len(arguments) != 4 or arguments[2] not in FORMS:
        return EXIT_USAGE
    source, target, form, kernels = arguments
    name = os.path.basename(source)
    limit_resources()
    try:
        fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
        output = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        codec = open_codec(kernels)
        lock_down(converter_calls((fd, output), (output,)))
    except OSError as error:
        return end(EXIT_FILES, f"{error.filename or source}: {error.strerror}")
    except LockdownError as error:
        return end(EXIT_FILES, str(error))
    try:
        file = SafetensorsFile(Path(name), lambda: codec, fd)
        summary = rewrite(file, output, form, codec)
    except ModelLoadError as error:
        return end(EXIT_REFUSED, str(error))
    except MemoryError:
        return end(EXIT_REFUSED, f"reading {name} takes more memory than is allowed")
    except OSError as error:
        return end(EXIT_FILES, f"the result cannot be written: {error.strerror}")
    say(f"done {json.dumps(summary)}")
    return 0


def rewrite(source: SafetensorsFile, output: int, form: str, codec: WeightCodec) -> dict[str, object]:
    """Write a file's tensors into an open output file in one form, and compare.

    Args:
        source: opened with a codec.
        output: open for reading and writing, empty.
        form: of ``FORMS``.
        codec: codes and decodes.

    Returns:
        A summary for people: bytes are those of plain tensors (``before``) and of the target (``after``).

    Raises:
        ModelLoadError: the source breaks its format, or what was written is not what was read.
        OSError: the output cannot be written.
    """
    work = Work(source)
    planned = [_plan(source, name, entry, form, codec, work) for name, entry in source.tensors.items()]
    _write(source, output, planned, codec, work)
    os.fsync(output)
    _compare(source, SafetensorsFile(Path(source.name), lambda: codec, output), work)
    classes: dict[str, list[int]] = {}
    for one in planned:
        count = classes.setdefault(class_of(one.name), [0, 0, 0])
        for place, number in enumerate((1, one.entry.data_bytes, one.size)):
            count[place] += number
    return {
        "tensors": len(planned),
        "coded": sum(one.header is not None for one in planned),
        "before": sum(one.entry.data_bytes for one in planned),
        "after": sum(one.size for one in planned),
        "classes": classes,
        "codec": codec.name,
    }


def class_of(name: str) -> str:
    """Return the class of a tensor in the report."""
    return next((one for one, parts in CLASSES if any(part in name for part in parts)), OTHER)


def _plan(source: SafetensorsFile, name: str, entry: TensorEntry, form: str, codec: WeightCodec, work: Work) -> Planned:
    """Decide how a tensor is stored; both passes over one that is not looked at count as done."""
    if form == PLAIN or entry.dtype != "BF16" or entry.data_bytes < 2 * LEAST_WEIGHTS:
        work.add(2 * entry.data_bytes)
        return Planned(name, entry)
    if name + SUFFIX in source.tensors:
        raise ModelLoadError(f"{source.name}: tensor {show_name(name)} is there twice: coded and as it is")
    counts = [0] * 256
    for slab in _slabs(source, name, work.add):
        counts = [one + other for one, other in zip(counts, codec.count(slab), strict=True)]
    code = choose_code(counts)
    table, data_bytes = b"", 0
    for slab in _slabs(source, name, work.add):
        part, size = codec.measure(code, slab)
        table, data_bytes = table + part, data_bytes + size
    size = HEADER_BYTES + len(table) + data_bytes
    size += -size % ALIGNMENT
    if size >= entry.data_bytes:
        return Planned(name, entry)
    return Planned(name, entry, CodedHeader(code, entry.shape, size), table)


def _write(source: SafetensorsFile, output: int, planned: list[Planned], codec: WeightCodec, work: Work) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(METADATA if _any_coded(planned) else {})}}
    place = 0
    for one in planned:
        span = [place, place + one.size]
        if one.header is None:
            header[one.name] = {"dtype": one.entry.dtype, "shape": list(one.entry.shape), "data_offsets": span}
        else:
            header[one.name + SUFFIX] = {"dtype": "U8", "shape": [one.size], "data_offsets": span}
        place += one.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    write_all(output, len(text).to_bytes(8, "little") + text)
    for one in planned:
        slabs = _slabs(source, one.name, work.add)
        if one.header is None:
            for slab in slabs:
                write_all(output, memoryview(slab))
        else:
            _write_coded(output, one.header, one.table, slabs, codec)


def _any_coded(planned: list[Planned]) -> bool:
    """Return whether a target has a coded tensor."""
    return any(one.header is not None for one in planned)


def _write_coded(
    output: int, header: CodedHeader, table: bytes, slabs: Iterator[bytearray], codec: WeightCodec
) -> None:
    written = write_all(output, header.pack() + table)
    for slab in slabs:
        written += write_all(output, memoryview(codec.encode(header.code, slab)[1]))
    write_all(output, bytes(header.size - written))


def _compare(source: SafetensorsFile, target: SafetensorsFile, work: Work) -> None:
    """Check that the target, read as the engine reads it, has the source's tensors with every bit."""
    if set(source.tensors) != set(target.tensors):
        raise ModelLoadError(f"{source.name}: what was written has other tensors than what was read")
    for name, entry in source.tensors.items():
        other = target.tensors[name]
        same = (entry.dtype, entry.shape) == (other.dtype, other.shape)
        pairs = zip(_slabs(source, name, work.add), _slabs(target, name, lambda _: None), strict=True)
        if not same or any(one != two for one, two in pairs):
            raise ModelLoadError(f"{source.name}: tensor {show_name(name)} was not written as it was read")


def _slabs(file: SafetensorsFile, name: str, done: Callable[[int], None]) -> Iterator[bytearray]:
    """Yield a tensor's bytes in slabs."""
    size = file.tensors[name].data_bytes
    for begin in range(0, size, SLAB_BYTES):
        slab = bytearray(min(SLAB_BYTES, size - begin))
        file.read_stretch(name, begin, memoryview(slab))
        done(len(slab))
        yield slab


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
