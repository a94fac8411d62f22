"""GGUF program: ``python -m engine.convert.to_gguf FOLDER TARGET DTYPE KERNELS FILE...``.

Writes a model folder as one GGUF file, in llama.cpp's form: values, tokenizer and tensors by the names of its
``gguf-py/gguf/constants.py``. FILEs are the folder's, by name. DTYPE is that of matrices: ``auto`` (as they are),
``float32``, ``float16``, ``bfloat16`` or ``q8_0``; vectors are float32, as llama.cpp stores them. KERNELS is the folder
of compiled kernels, or empty: it decodes compressed weights.

A model is written exactly or not at all: what is to be written is read by the converter's other direction
(``engine.convert.architecture``, ``engine.convert.tokenizer``), and must describe the model that the folder does.

The source is untrusted: the program locks itself down as ``engine.convert`` does, before it reads the first byte, and
reports in the same way. Equal sources give equal files.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401 - nothing can be imported later
import json
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.backends.native.coding import open_codec
from engine.convert.architecture import Target, read_model
from engine.convert.calls import converter_calls
from engine.convert.export import TOKENIZER, description_of, divisors_of, text_of, their_name
from engine.convert.ggml import TYPES, BlockType
from engine.convert.gguf import MAGIC, GgufTensor, Value
from engine.convert.output import STAGING_NUMBERS, all_finite, write_all
from engine.convert.program import EXIT_FILES, EXIT_REFUSED, EXIT_USAGE, end, limit_resources, progress_of, say
from engine.convert.quantise import CONFIG, DECODE, FLOATS, json_object
from engine.convert.rope import ROPE_FACTORS
from engine.convert.tokenizer import read_text
from engine.convert.values import Values
from engine.errors import LockdownError, ModelLoadError
from engine.model.checkpoint.config import ModelConfig
from engine.model.checkpoint.fields import Fields
from engine.model.checkpoint.registry import FAMILIES as READERS
from engine.model.checkpoint.safetensors import SafetensorsFile, show_name
from engine.model.coded.codec import WeightCodec
from engine.sandbox.lockdown import lock_down

VERSION, ALIGNMENT = 3, 32
"""Version of the format that is written, and bytes to which tensors are aligned: the format's usual ones."""

KINDS = {"float32": 0, "float16": 1, "q8_0": 8, "bfloat16": 30}
"""Numbers of types in the format."""

FILE_TYPES = {0: 0, 1: 1, 8: 7, 30: 32}
"""What ``general.file_type`` says of files whose matrices mostly have a type."""

STORED = {"F32": 0, "F16": 1, "BF16": 30}
"""Types that hold numbers of a checkpoint as they are."""

Q8_NUMBERS = 32
"""Numbers of a block of ``q8_0``."""

_STRING, _BOOL, _U32, _I32, _F32, _ARRAY = 8, 7, 4, 5, 6, 9


@dataclass(frozen=True, slots=True)
class Written:
    """One tensor of the file."""

    name: str
    kind: int
    shape: tuple[int, ...]
    target: Target | None
    """Where its numbers come from; None for the divisors of the rotation."""

    @property
    def size(self) -> int:
        """Return its bytes."""
        return math.prod(self.shape) // TYPES[self.kind].numbers * TYPES[self.kind].size


class Weights:
    """All tensors of a folder's weight files."""

    def __init__(self, files: list[SafetensorsFile]) -> None:
        self.files: dict[str, SafetensorsFile] = {}
        for file in files:
            for name in file.tensors:
                if name in self.files:
                    raise ModelLoadError(f"tensor {show_name(name)} is in both {self.files[name].name} and {file.name}")
                self.files[name] = file

    def dtype(self, name: str) -> str:
        """Return the dtype of a tensor."""
        return self.files[name].tensors[name].dtype

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self.files[name].tensors[name].shape

    def rows(self, name: str, first: int, last: int) -> NDArray[np.float32]:
        """Return rows of a matrix in float32; a vector is one of columns of one number.

        Raises:
            ModelLoadError: the file ends early, or a number is not finite.
        """
        file = self.files[name]
        width = math.prod(self.shape(name)[1:])
        each = width * FLOATS[self.dtype(name)]
        slab = bytearray((last - first) * each)
        file.read_stretch(name, first * each, memoryview(slab))
        found = DECODE[self.dtype(name)](slab).reshape(last - first, width)
        if not np.isfinite(found).all():
            raise ModelLoadError(f"{file.name}: tensor {show_name(name)} holds a number that is not finite")
        return found


def main(arguments: list[str]) -> int:
    """Convert; return the exit status."""
    if len(arguments) < 5 or arguments[2] not in ("auto", *KINDS):
        return EXIT_USAGE
    folder, target, dtype, kernels, *names = arguments
    limit_resources()
    try:
        fds = {name: os.open(os.path.join(folder, name), os.O_RDONLY | os.O_CLOEXEC) for name in names}
        output = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        codec = open_codec(kernels)
        lock_down(converter_calls((*fds.values(), output), (output,)))
    except OSError as error:
        return end(EXIT_FILES, f"{error.filename or folder}: {error.strerror}")
    except LockdownError as error:
        return end(EXIT_FILES, str(error))
    try:
        summary = export(fds, output, dtype, codec)
        os.fsync(output)
    except ModelLoadError as error:
        return end(EXIT_REFUSED, str(error))
    except MemoryError:
        return end(EXIT_REFUSED, "the conversion takes more memory than is allowed")
    except OSError as error:
        return end(EXIT_FILES, f"the result cannot be written: {error.strerror}")
    say(f"done {json.dumps(summary)}")
    return 0


def export(fds: dict[str, int], output: int, dtype: str, codec: WeightCodec) -> dict[str, object]:
    """Write a folder's model into an open file.

    Args:
        fds: descriptors of the folder's files, by name.
        output: open for writing, empty.
        dtype: of matrices: ``auto`` or of ``KINDS``.
        codec: decodes compressed weights.

    Returns:
        A summary for people.

    Raises:
        ModelLoadError: a file is malformed, or the model cannot be written exactly.
        OSError: the file cannot be written.
    """
    config = json_object(fds[CONFIG], CONFIG)
    weights = Weights(
        [SafetensorsFile(Path(one), lambda: codec, fds[one]) for one in fds if one.endswith(".safetensors")]
    )
    prefix, description = description_of(config)
    values: dict[str, Value] = {"general.architecture": prefix, **description, **text_of(fds, config, weights.shape)}
    divisors = divisors_of(config, description)
    tensors = {their_name(name): weights.shape(name) for name in weights.files if name != tied_head(config)}
    plain = TYPES[STORED["F32"]]
    model = read_model(
        Values(CONFIG, {**values}), {one: _entry(plain, shape) for one, shape in tensors.items()}, divisors
    )
    _same(config, dict(model.config))
    text = read_text(Values(TOKENIZER, {**values}), weights.shape("model.embed_tokens.weight")[0])
    written = [_written(target, weights, dtype) for target in model.targets]
    if divisors is not None:
        written.append(Written(ROPE_FACTORS, KINDS["float32"], (len(divisors),), None))
    mostly = written[0].kind
    about: dict[str, Value] = {"general.file_type": FILE_TYPES[mostly], "general.quantization_version": 2}
    _write_header(output, {**values, **about}, written)
    tell, done = progress_of(sum(one.size for one in written)), 0
    for one in written:
        for part in _encoded(one, weights, divisors):
            done += write_all(output, part)
            tell(done)
        write_all(output, bytes(-one.size % ALIGNMENT))
    return {
        "architecture": prefix,
        "tensors": len(written),
        "types": sorted({TYPES[one.kind].name for one in written}),
        "bytes": sum(one.size for one in written),
        "chat_template": "chat_template" in text.config,
    }


def tied_head(config: dict[str, object]) -> str:
    """Return the name of a head that a folder may hold although it is the embedding; empty where it is its own."""
    return "lm_head.weight" if config.get("tie_word_embeddings") is True else ""


def _entry(kind: BlockType, shape: tuple[int, ...]) -> GgufTensor:
    return GgufTensor(kind, shape, 0)


def _same(config: dict[str, object], regained: dict[str, object]) -> None:
    """Check that a description says what the one does that was regained from the values to be written.

    Raises:
        ModelLoadError: it says something that GGUF values of its architecture cannot.
    """
    both: list[ModelConfig] = []
    for one in (config, regained):
        fields = Fields(CONFIG, one)
        both.append(READERS[fields.architecture(tuple(READERS))].read(fields))
    mine, other = (replace(one, stop_ids=frozenset()) for one in both)
    if mine != other:
        parts = [name for name in ModelConfig.__dataclass_fields__ if getattr(mine, name) != getattr(other, name)]
        raise ModelLoadError(f"{CONFIG}: what it says of {', '.join(parts)} cannot be written as GGUF")


def _written(target: Target, weights: Weights, dtype: str) -> Written:
    stored = weights.dtype(target.name)
    if stored not in FLOATS:
        raise ModelLoadError(f"tensor {show_name(target.name)} is packed: convert the folder that it was made from")
    kind = STORED[stored] if dtype == "auto" else KINDS[dtype]
    if len(target.shape) == 1:
        kind = KINDS["float32"]
    elif target.shape[1] % TYPES[kind].numbers:
        kind = STORED[stored]
    return Written(target.source, kind, target.shape, target)


def _encoded(one: Written, weights: Weights, divisors: list[float] | None) -> Iterator[memoryview]:
    """Yield a tensor's bytes, in slabs of whole heads."""
    target = one.target
    if target is None:
        yield np.array(divisors, "<f4").view(np.uint8).data
        return
    count, width = target.shape[0], math.prod(target.shape[1:])
    head = count // target.heads if target.heads else 1
    step = max(STAGING_NUMBERS // (width * head), 1) * head
    for first in range(0, count, step):
        rows = weights.rows(target.name, first, min(first + step, count))
        if target.heads:
            # Halves of a head, as they are published, become neighbours.
            rows = rows.reshape(len(rows) // head, 2, head // 2, width).swapaxes(1, 2).reshape(rows.shape)
        yield encode(np.ascontiguousarray(rows), one.kind, one.name)


def encode(rows: NDArray[np.float32], kind: int, name: str) -> memoryview:
    """Encode rows as bytes of a type of the format, rounded to nearest.

    Raises:
        ModelLoadError: a number is too large for the type.
    """
    data: NDArray[np.generic] = rows.astype("<f4", copy=False)
    if kind == KINDS["q8_0"]:
        return _q8(rows, name)
    if kind == KINDS["float16"]:
        with np.errstate(over="ignore"):  # reported below, with the tensor's name
            data = rows.astype("<f2")
    elif kind == KINDS["bfloat16"]:
        words = rows.view(np.uint32)
        data = ((words + (((words >> 16) & 1) + 0x7FFF)) >> 16).astype("<u2")
    if kind != KINDS["float32"] and not all_finite(data):
        raise ModelLoadError(f"tensor {name} holds a number that is too large for the type")
    return np.ascontiguousarray(data).reshape(-1).view(np.uint8).data


def _q8(rows: NDArray[np.float32], name: str) -> memoryview:
    """Blocks of 32 numbers: a float16 scale, and bytes; rounded as ggml's ``quantize_row_q8_0_ref`` rounds."""
    blocks = rows.reshape(-1, Q8_NUMBERS)
    scale = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(scale == 0, np.float32(0), np.float32(1) / scale)
        half = scale.astype("<f2")
    if not all_finite(half):
        raise ModelLoadError(f"tensor {name} holds a number that is too large for the type")
    scaled = blocks * inverse
    numbers = np.trunc(scaled + np.copysign(np.float32(0.5), scaled)).astype(np.int8)
    return np.concatenate((half.view(np.uint8), numbers.view(np.uint8)), axis=1).reshape(-1).data


def _write_header(output: int, values: dict[str, Value], written: list[Written]) -> None:
    parts = [MAGIC, _u32(VERSION), _u64(len(written)), _u64(len(values))]
    for key, value in values.items():
        parts += [_text(key), *_value(value)]
    place = 0
    for one in written:
        parts += [_text(one.name), _u32(len(one.shape)), *(_u64(size) for size in reversed(one.shape))]
        parts += [_u32(one.kind), _u64(place)]
        place += one.size + -one.size % ALIGNMENT
    header = b"".join(parts)
    write_all(output, header + bytes(-len(header) % ALIGNMENT))


def _value(value: Value) -> list[bytes]:
    if isinstance(value, bool):
        return [_u32(_BOOL), bytes([value])]
    if isinstance(value, str):
        return [_u32(_STRING), _text(value)]
    if isinstance(value, int):
        return [_u32(_U32), _u32(value)]
    if isinstance(value, float):
        return [_u32(_F32), np.float32(value).tobytes()]
    if isinstance(value, list):
        return [_u32(_ARRAY), _u32(_STRING), _u64(len(value)), *(_text(one) for one in value)]
    return [_u32(_ARRAY), _u32(_I32), _u64(len(value)), value.astype("<i4").tobytes()]


def _text(text: str) -> bytes:
    data = text.encode()
    return _u64(len(data)) + data


def _u32(number: int) -> bytes:
    return number.to_bytes(4, "little")


def _u64(number: int) -> bytes:
    return number.to_bytes(8, "little")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
