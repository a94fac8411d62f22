"""Quantisation program: ``python -m engine.convert.quantise SOURCE TARGET FORM KERNELS``, for one file of a folder.

FORM is ``int8`` or ``int4``. A safetensors file gets its matrices packed as compressed-tensors' ``pack-quantized``:
signed integers with a scale for each output (int8) or for each ``GROUP`` inputs of an output (int4). ``config.json``
gets the ``quantization_config`` that says so, ``model.safetensors.index.json`` the names of the packed tensors. Which
matrices are packed is decided by their names alone (``TARGETS``), so the three agree. KERNELS is the folder of compiled
kernels, or empty: it decodes a source that is compressed.

The source is untrusted: the program locks itself down as ``engine.convert`` does, before it reads the first byte, and
reports in the same way. Equal sources give equal targets on every machine: each number is the outcome of single
roundings, and errors are compared as sums of integers, whose order does not matter.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401 - nothing can be imported later
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.backends.native.coding import open_codec
from engine.convert.calls import converter_calls
from engine.convert.compress import class_of
from engine.convert.output import STAGING_NUMBERS, write_all
from engine.convert.program import EXIT_FILES, EXIT_REFUSED, EXIT_USAGE, end, limit_resources, progress_of, say
from engine.errors import LockdownError, ModelLoadError
from engine.model.checkpoint.safetensors import SafetensorsFile, TensorEntry, show_name
from engine.sandbox.lockdown import lock_down

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
"""Files that are rewritten beside those of weights."""

MAX_JSON_BYTES = 1 << 26
"""Largest of these two in bytes; an index has about 100 for each tensor."""

TARGETS = r".*(_proj|\.w[123])"
"""Modules whose matrices are packed: projections of attention, MLPs and experts. Embedding, head, norms and routers
stay as they are: they are small, or their errors reach every token."""

_PACKED = re.compile(rf"({TARGETS})\.weight")

GROUP = 32
"""Inputs that share a scale of int4: 4.5 bits a weight. Of athanor-mini groups of 64 and 128 diverge by 1.17 and 1.21
times as many nats, for 4.25 and 4.125 bits."""

FLOATS = {"F32": 4, "BF16": 2, "F16": 2}
"""Dtypes that are packed, and bytes of a number."""

SHRUNK = (32, 31, 30, 29, 28, 27)
"""Scales that int4 tries for each group, in 32nds of the one that no number exceeds; the least square error decides,
the larger scale where two are equal. Cutting the largest number a little leaves the others a finer step."""

ERROR_UNIT = float(1 << 24)
"""Square errors are counted in so many parts of a group's largest square: integers, whose sum is exact."""

_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class PackedForm:
    """How numbers are packed."""

    bits: int
    group: int
    """Inputs that share a scale; 0 for all of an output."""
    scale: str
    """Dtype of the scales."""

    @property
    def most(self) -> int:
        """Return the largest number; the smallest is its negative."""
        return (1 << (self.bits - 1)) - 1

    def groups(self, inputs: int) -> int:
        """Return the scales of an output."""
        return -(-inputs // self.group) if self.group else 1

    def words(self, inputs: int) -> int:
        """Return the words of 32 bits of an output."""
        return -(-inputs * self.bits // 32)


FORMS = {"int8": PackedForm(8, 0, "F32"), "int4": PackedForm(4, GROUP, "BF16")}


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of the target."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int
    """Its bytes."""


@dataclass(slots=True)
class Class:
    """What came of one class of tensors."""

    tensors: int = 0
    before: int = 0
    after: int = 0
    error: float = 0.0
    """Sum of squares of what rounding changed, and of the numbers themselves."""
    squares: float = 0.0


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
        if name in (CONFIG, INDEX):
            summary = rewrite_json(fd, output, name, form)
        else:
            summary = quantise(SafetensorsFile(Path(name), lambda: codec, fd), output, FORMS[form])
        os.fsync(output)
    except ModelLoadError as error:
        return end(EXIT_REFUSED, str(error))
    except MemoryError:
        return end(EXIT_REFUSED, f"reading {name} takes more memory than is allowed")
    except OSError as error:
        return end(EXIT_FILES, f"the result cannot be written: {error.strerror}")
    say(f"done {json.dumps(summary)}")
    return 0


def quantise(source: SafetensorsFile, output: int, form: PackedForm) -> dict[str, object]:
    """Write a file's tensors into an open output file, its matrices packed.

    Args:
        source: opened with a codec.
        output: open for writing, empty.
        form: of ``FORMS``.

    Returns:
        A summary for people: bytes of the source as plain tensors (``before``) and of the target (``after``), and for
        each class of tensors its number, these bytes and the relative error of its numbers.

    Raises:
        ModelLoadError: the source breaks its format, is packed already, or holds a number that is not finite.
        OSError: the output cannot be written.
    """
    tell = progress_of(sum(entry.data_bytes for entry in source.tensors.values()))
    planned = [(name, entry, parts_of(source, name, entry, form)) for name, entry in source.tensors.items()]
    parts = [part for _, _, found in planned for part in found]
    names = {part.name for part in parts}
    if len(names) != len(parts):
        raise ModelLoadError(f"{source.name}: it has tensors under the names that packed ones get")
    _write_header(output, parts)
    classes: dict[str, Class] = {}
    done = 0
    for name, entry, found in planned:
        sums = classes.setdefault(class_of(name), Class())
        sums.tensors += 1
        sums.before += entry.data_bytes
        sums.after += sum(part.size for part in found)
        if len(found) == 1:
            for slab in _slabs(source, name):
                write_all(output, memoryview(slab))
        else:
            _write_packed(source, name, output, form, sums)
        done += entry.data_bytes
        tell(done)
    return {
        "tensors": len(planned),
        "packed": sum(len(found) > 1 for _, _, found in planned),
        "before": sum(one.before for one in classes.values()),
        "after": sum(one.after for one in classes.values()),
        "classes": {
            name: [one.tensors, one.before, one.after, math.sqrt(one.error / one.squares) if one.squares else 0.0]
            for name, one in classes.items()
        },
    }


def parts_of(source: SafetensorsFile, name: str, entry: TensorEntry, form: PackedForm) -> tuple[Part, ...]:
    """Return the tensors that a tensor becomes: itself, or packed numbers, shape and scales.

    Raises:
        ModelLoadError: by its name it is packed, and cannot be.
    """
    found = _PACKED.fullmatch(name)
    if found is None:
        return (Part(name, entry.dtype, entry.shape, entry.data_bytes),)
    if len(entry.shape) != 2 or entry.dtype not in FLOATS or not entry.data_bytes:
        shape = f"dtype {entry.dtype} and shape {list(entry.shape)}"
        raise ModelLoadError(f"{source.name}: tensor {show_name(name)} has {shape}; a matrix of floats is packed")
    module, (outputs, inputs) = found[1], entry.shape
    words, groups = form.words(inputs), form.groups(inputs)
    return (
        Part(f"{module}.weight_packed", "I32", (outputs, words), 4 * outputs * words),
        Part(f"{module}.weight_shape", "I64", (2,), 16),
        Part(f"{module}.weight_scale", form.scale, (outputs, groups), FLOATS[form.scale] * outputs * groups),
    )


def pack(rows: NDArray[np.float32], form: PackedForm) -> tuple[NDArray[np.uint32], NDArray[np.float32], float]:
    """Round rows of a matrix. Pure.

    Returns:
        Words ``(rows, words)``, scales ``(rows, groups)``, and the sum of the squares of what rounding changed.
    """
    count, inputs = rows.shape
    groups, width = form.groups(inputs), form.group or inputs
    padded = np.zeros((count, groups * width), np.float32)
    padded[:, :inputs] = rows
    grouped = padded.reshape(count, groups, width)
    largest = np.abs(grouped).max(axis=2, keepdims=True)
    tries = SHRUNK if form.group else SHRUNK[:1]
    best: NDArray[np.int64] | None = None
    for share in tries:
        scale = _held(np.maximum(largest * np.float32(share / SHRUNK[0]) / np.float32(form.most), _LEAST), form.scale)
        numbers = np.clip(np.rint(grouped / scale), -form.most, form.most)
        if len(tries) == 1:
            kept, scales = numbers, scale
            break
        relative = (numbers * scale - grouped) / np.maximum(largest, _LEAST)
        errors = np.rint(relative * relative * np.float32(ERROR_UNIT)).astype(np.int64).sum(axis=2, keepdims=True)
        if best is None:
            best, kept, scales = errors, numbers, scale
        else:
            better = errors < best
            best = np.where(better, errors, best)
            kept, scales = np.where(better, numbers, kept), np.where(better, scale, scales)
    words = _words(kept.reshape(count, -1)[:, :inputs], form)
    return words, scales.reshape(count, groups), _squares(kept * scales - grouped)


def _squares(values: NDArray[np.float32]) -> float:
    """Sum of squares, for people: its last bits depend on the machine."""
    flat = values.reshape(-1).astype(np.float64)
    return float(np.dot(flat, flat))


_LEAST = np.float32(2.0**-100)
"""Least scale: of a group of zeros, and of numbers so small that their scale would be no normal number."""


def _held(scale: NDArray[np.float32], dtype: str) -> NDArray[np.float32]:
    """Round scales as they are stored."""
    return scale if dtype == "F32" else (_upper(scale).astype(np.uint32) << np.uint32(16)).view(np.float32)


def _upper(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round finite numbers to bfloat16, to nearest even: its bits."""
    words = np.ascontiguousarray(values).view(np.uint32)
    return ((words + (((words >> 16) & 1) + 0x7FFF)) >> 16).astype(np.uint16)


def _words(numbers: NDArray[np.float32], form: PackedForm) -> NDArray[np.uint32]:
    """Pack numbers into words, the first in the lowest bits, offset so that none is negative; the last word of a row is
    filled up with zeros."""
    count, inputs = numbers.shape
    share = 32 // form.bits
    offset = np.zeros((count, form.words(inputs) * share), np.uint32)
    offset[:, :inputs] = (numbers + np.float32(form.most + 1)).astype(np.uint32)
    lanes = offset.reshape(count, -1, share)
    words = np.zeros(lanes.shape[:2], np.uint32)
    for lane in range(share):
        words |= lanes[:, :, lane] << np.uint32(lane * form.bits)
    return words


def _write_header(output: int, parts: list[Part]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    place = 0
    for part in parts:
        span = [place, place + part.size]
        header[part.name] = {"dtype": part.dtype, "shape": list(part.shape), "data_offsets": span}
        place += part.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    write_all(output, len(text).to_bytes(8, "little") + text)


def _write_packed(source: SafetensorsFile, name: str, output: int, form: PackedForm, sums: Class) -> None:
    outputs, inputs = source.tensors[name].shape
    scales = []
    for rows in _rows(source, name):
        if not np.isfinite(rows).all():
            raise ModelLoadError(f"{source.name}: tensor {show_name(name)} holds a number that is not finite")
        words, found, changed = pack(rows, form)
        write_all(output, words.astype("<u4").reshape(-1).view(np.uint8).data)
        scales.append(found)
        sums.error += changed
        sums.squares += _squares(rows)
    write_all(output, np.array([outputs, inputs], "<i8").view(np.uint8).data)
    every = np.concatenate(scales)
    stored = every.astype("<f4") if form.scale == "F32" else _upper(every).astype("<u2")
    write_all(output, np.ascontiguousarray(stored).reshape(-1).view(np.uint8).data)


def _rows(source: SafetensorsFile, name: str) -> Iterator[NDArray[np.float32]]:
    """Yield slabs of a matrix's rows in float32, of bounded size."""
    entry = source.tensors[name]
    outputs, inputs = entry.shape
    row = inputs * FLOATS[entry.dtype]
    step = max(STAGING_NUMBERS // inputs, 1)
    for first in range(0, outputs, step):
        slab = bytearray(min(step, outputs - first) * row)
        source.read_stretch(name, first * row, memoryview(slab))
        yield DECODE[entry.dtype](slab).reshape(-1, inputs)


DECODE: dict[str, Callable[[bytearray], NDArray[np.float32]]] = {
    "F32": lambda data: np.frombuffer(data, "<f4"),
    "F16": lambda data: np.frombuffer(data, "<f2").astype(np.float32),
    "BF16": lambda data: (np.frombuffer(data, "<u2").astype(np.uint32) << np.uint32(16)).view(np.float32),
}
"""Bytes of each dtype as numbers."""


def _slabs(source: SafetensorsFile, name: str) -> Iterator[bytearray]:
    """Yield a tensor's bytes in slabs."""
    size, step = source.tensors[name].data_bytes, 4 * STAGING_NUMBERS
    for begin in range(0, size, step):
        slab = bytearray(min(step, size - begin))
        source.read_stretch(name, begin, memoryview(slab))
        yield slab


def rewrite_json(fd: int, output: int, name: str, form: str) -> dict[str, object]:
    """Write ``config.json`` or an index as it is for packed matrices.

    Raises:
        ModelLoadError: it is no JSON object of its form, or the model is packed already.
        OSError: the output cannot be written.
    """
    value = json_object(fd, name)
    changed = _config(value, FORMS[form]) if name == CONFIG else _index(value)
    write_all(output, json.dumps(changed, indent=2).encode() + b"\n")
    return {}


def _config(value: dict[str, object], form: PackedForm) -> dict[str, object]:
    inner = value.get("text_config")
    for one in (value, inner if isinstance(inner, dict) else {}):
        if one.get("quantization_config", one.get("compression_config")) is not None:
            raise ModelLoadError(f"{CONFIG}: the model is packed already; quantise the one that it was made from")
    weights = {
        "num_bits": form.bits,
        "type": "int",
        "symmetric": True,
        "strategy": "group" if form.group else "channel",
        "group_size": form.group or None,
        "dynamic": False,
    }
    group = {"targets": [f"re:{TARGETS}$"], "weights": weights, "input_activations": None, "output_activations": None}
    packing = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [],
    }
    return {**value, "quantization_config": packing}


def _index(value: dict[str, object]) -> dict[str, object]:
    mapping = value.get("weight_map")
    if not isinstance(mapping, dict) or not all(isinstance(one, str) for one in mapping.values()):
        raise ModelLoadError(f"{INDEX}: weight_map is not a JSON object of file names")
    changed: dict[str, str] = {}
    for name, file in mapping.items():
        found = _PACKED.fullmatch(name)
        if found is None:
            changed[name] = file
        else:
            kinds = ("packed", "shape", "scale")
            changed |= {f"{found[1]}.weight_{kind}": file for kind in kinds}
    return {"metadata": {}, "weight_map": changed}


def json_object(fd: int, name: str) -> dict[str, object]:
    """Read an open file with one JSON object.

    Raises:
        ModelLoadError: it is too large, or no JSON object.
    """
    try:
        value = json.loads(read_bytes(fd, name, MAX_JSON_BYTES).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{name} is not well-formed JSON") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{name} is not a JSON object")
    return value


def read_bytes(fd: int, name: str, most: int) -> bytes:
    """Read an open file of a bounded size.

    Raises:
        ModelLoadError: it is larger.
    """
    size = os.fstat(fd).st_size
    if size > most:
        raise ModelLoadError(f"{name} has {size} bytes; at most {most} are allowed")
    data = bytearray(size)
    done = 0
    while done < size and (count := os.preadv(fd, [memoryview(data)[done:]], done)):
        done += count
    return bytes(data[:done])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
