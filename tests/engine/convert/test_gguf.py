"""The reader of GGUF headers: what the format's library writes is read, and no corrupted file gets past the checks."""

from __future__ import annotations

import os
import resource
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.convert.gguf import MAX_HEADER_BYTES, GgufFile
from engine.errors import ModelLoadError

U32, U64, STRING, ARRAY = 4, 10, 8, 9


def text(value: str | bytes) -> bytes:
    """A string of the format."""
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def pair(key: str, kind: int, value: bytes) -> bytes:
    """A name and a value."""
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    """A tensor's description, the fastest dimension first."""
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def file(
    pairs: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    data: bytes = b"",
    *,
    counts: tuple[int, int] | None = None,
    head: bytes = b"GGUF" + struct.pack("<I", 3),
) -> bytes:
    """A file, well-formed or not."""
    pairs, tensors = pairs or [], tensors or []
    numbers = counts or (len(tensors), len(pairs))
    header = head + struct.pack("<QQ", *numbers) + b"".join(pairs) + b"".join(tensors)
    return header + b"\0" * (-len(header) % 32) + data


def opened(path: Path, content: bytes) -> GgufFile:
    """The header of a file of this content; the descriptor stays open for reading rows."""
    path.write_bytes(content)
    fd = os.open(path, os.O_RDONLY)
    try:
        return GgufFile(fd, path.name)
    except ModelLoadError:
        os.close(fd)
        raise


def library_file(path: Path) -> None:
    """A file that the format's library writes, with every kind of value and a tensor of each rank."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("u8", 255)
    writer.add_int8("i8", -128)
    writer.add_uint16("u16", 65_535)
    writer.add_int16("i16", -32_768)
    writer.add_uint32("u32", 2**32 - 1)
    writer.add_int32("i32", -(2**31))
    writer.add_uint64("u64", 2**64 - 1)
    writer.add_int64("i64", -(2**63))
    writer.add_float32("f32", 1.5)
    writer.add_float64("f64", 1e300)
    writer.add_bool("yes", True)
    writer.add_string("text", "\u00e9\U0001f600")
    writer.add_array("numbers", [1.5, -2.5])
    writer.add_array("words", ["a", "", "\u4f60"])
    writer.add_tensor("one", np.arange(5, dtype=np.float32))
    writer.add_tensor("two", np.arange(6, dtype=np.float16).reshape(2, 3))
    writer.add_tensor("three", np.arange(24, dtype=np.float32).reshape(2, 3, 4))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_what_the_library_writes_is_read(tmp_path: Path) -> None:
    """Every kind of value, and tensors of several ranks with their rows."""
    library_file(tmp_path / "a.gguf")
    found = opened(tmp_path / "a.gguf", (tmp_path / "a.gguf").read_bytes())
    expected = {
        "u8": 255,
        "i8": -128,
        "u16": 65_535,
        "i16": -32_768,
        "u32": 2**32 - 1,
        "i32": -(2**31),
        "u64": 2**64 - 1,
        "i64": -(2**63),
        "f32": 1.5,
        "f64": 1e300,
        "yes": True,
        "text": "\u00e9\U0001f600",
        "words": ["a", "", "\u4f60"],
    }
    assert {key: found.values[key] for key in expected} == expected
    assert found.values["yes"] is True
    assert found.values["numbers"].tolist() == [1.5, -2.5]
    assert {name: one.shape for name, one in found.tensors.items()} == {"one": (5,), "two": (2, 3), "three": (2, 3, 4)}
    assert found.read_rows("two", 1, 2).tolist() == [[3, 4, 5]]
    assert found.read_rows("three", 4, 6).tolist() == [[16, 17, 18, 19], [20, 21, 22, 23]]


F32 = bytes(range(4)) * 8
GOOD = [tensor("a", (8,), 0, 0)]

BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "the magic"),
    "another format": (b"PK\x03\x04" + bytes(60), "not a GGUF file"),
    "version 1": (file(head=b"GGUF" + struct.pack("<I", 1)), "version 1"),
    "version 4": (file(head=b"GGUF" + struct.pack("<I", 4)), "version 4"),
    "big-endian": (file(head=b"GGUF" + struct.pack(">I", 3)), "big-endian"),
    "2**64 - 1 pairs": (file(counts=(0, 2**64 - 1)), "at most"),
    "2**64 - 1 tensors": (file(counts=(2**64 - 1, 0)), "at most"),
    "more pairs than there are": (file([pair("a", U32, bytes(4))], counts=(0, 4_000)), "two values|ends before"),
    "key of 2**64 - 1 bytes": (file([struct.pack("<Q", 2**64 - 1)], counts=(0, 1)), "at most 256"),
    "key of 2**63 bytes": (file([struct.pack("<Q", 2**63)], counts=(0, 1)), "at most 256"),
    "text of 4 GiB": (file([text("a") + struct.pack("<IQ", STRING, 1 << 32)], counts=(0, 1)), "at most"),
    "text beyond the file": (file([text("a") + struct.pack("<IQ", STRING, 1 << 20)], counts=(0, 1)), "ends before"),
    "key that is not UTF-8": (file([text(b"\xff") + struct.pack("<I", U32) + bytes(4)], counts=(0, 1)), "UTF-8"),
    "unknown kind of value": (file([pair("a", 13, bytes(8))]), "unknown type 13"),
    "a key twice": (file([pair("a", U32, bytes(4))] * 2), "two values"),
    "array of arrays": (file([pair("a", ARRAY, struct.pack("<IQ", ARRAY, 1) + bytes(12))]), "unsupported type 9"),
    "array of 2**64 - 1": (file([pair("a", ARRAY, struct.pack("<IQ", U64, 2**64 - 1))]), "ends before"),
    "array of 2**61 (8 bytes each: 2**64)": (file([pair("a", ARRAY, struct.pack("<IQ", U64, 2**61))]), "ends before"),
    "array of endless texts": (file([pair("a", ARRAY, struct.pack("<IQ", STRING, 2**40))]), "at most"),
    "alignment of nothing": (file([pair("general.alignment", U32, bytes(4))]), "power of two"),
    "alignment of text": (file([pair("general.alignment", STRING, text("32"))]), "power of two"),
    "no dimensions": (file(None, [tensor("a", (), 0, 0)]), "0 dimensions"),
    "2**32 - 1 dimensions": (file(None, [text("a") + struct.pack("<I", 2**32 - 1)]), "dimensions"),
    "unknown type": (file(None, [tensor("a", (8,), 99, 0)], F32), "supported are F32"),
    "dimension of nothing": (file(None, [tensor("a", (8, 0), 0, 0)], F32), "whole blocks"),
    "half a block": (file(None, [tensor("a", (33,), 2, 0)], bytes(64)), "whole blocks"),
    "product that overflows": (file(None, [tensor("a", (2**32, 2**32, 4, 1), 0, 0)], F32), "ends at byte"),
    "dimension of 2**64 - 1": (file(None, [tensor("a", (2**64 - 1,), 0, 0)], F32), "ends at byte"),
    "offset beyond the file": (file(None, [tensor("a", (8,), 0, 1 << 40)], F32), "ends at byte"),
    "offset that wraps": (file(None, [tensor("a", (8,), 0, 2**64 - 32)], F32), "ends at byte"),
    "crooked offset": (file(None, [tensor("a", (4,), 0, 4)], F32), "not aligned"),
    "cut data": (file(None, GOOD, F32[:-1]), "truncated"),
    "overlap": (file(None, [tensor("a", (16,), 0, 0), tensor("b", (8,), 0, 32)], bytes(96)), "overlaps"),
    "the same place": (file(None, [tensor("a", (8,), 0, 0), tensor("b", (8,), 0, 0)], F32), "overlaps"),
    "a tensor twice": (file(None, [tensor("a", (8,), 0, 0), tensor("a", (8,), 0, 32)], bytes(64)), "two tensors"),
    "a long tensor name": (file(None, [tensor("x" * 300, (8,), 0, 0)], F32), "at most 256"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_every_kind_of_corruption_is_refused(name: str, tmp_path: Path) -> None:
    """A file that breaks the format is a load error that names the file and what is wrong."""
    content, message = BROKEN[name]
    with pytest.raises(ModelLoadError, match=message) as caught:
        opened(tmp_path / "bad.gguf", content)
    assert "bad.gguf" in str(caught.value)
    assert str(caught.value).isprintable()


def test_a_sound_small_file_is_read(tmp_path: Path) -> None:
    """Positive control of the hand-made files."""
    found = opened(tmp_path / "a.gguf", file([pair("a", U32, struct.pack("<I", 7))], GOOD, F32))
    assert found.values == {"a": 7}
    assert found.tensors["a"].shape == (8,)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    """A file cut at any byte is refused, whether in the header or in the data."""
    library_file(tmp_path / "a.gguf")
    content = (tmp_path / "a.gguf").read_bytes()
    # The library pads after the last tensor; what counts ends with its 96 bytes.
    whole = len(content) - (-96 % 32)
    opened(tmp_path / "b.gguf", content[:whole])
    for cut in range(whole):
        with pytest.raises(ModelLoadError):
            opened(tmp_path / "b.gguf", content[:cut])


def test_a_file_that_shrinks_is_an_error(tmp_path: Path) -> None:
    """Truncation after the header was checked is noticed while reading."""
    path = tmp_path / "a.gguf"
    found = opened(path, file(None, GOOD, F32))
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(ModelLoadError, match="ends early"):
        found.read_rows("a", 0, 1)


def sparse(path: Path, content: bytes) -> GgufFile:
    """The file with a hole of a terabyte behind it."""
    path.write_bytes(content)
    os.truncate(path, 1 << 40)
    fd = os.open(path, os.O_RDONLY)
    try:
        return GgufFile(fd, path.name)
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    "content",
    [
        file([pair("a", ARRAY, struct.pack("<IQ", U64, 1 << 36))]),
        file([pair("a", ARRAY, struct.pack("<IQ", STRING, 1 << 33))]),
        file([pair("a", STRING, struct.pack("<Q", 1 << 30))]),
    ],
    ids=["half a terabyte of numbers", "eight milliard texts", "a gigabyte of text"],
)
def test_a_large_file_cannot_make_the_header_large(content: bytes, tmp_path: Path) -> None:
    """With a terabyte behind the header lengths are still held against caps, and memory stays bounded."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ModelLoadError):
        sparse(tmp_path / "a.gguf", content)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < MAX_HEADER_BYTES


def change(content: bytes, draw: Callable[[st.SearchStrategy[int]], int]) -> bytes:
    """A few bytes changed, and perhaps a cut."""
    data = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(data[: draw(st.integers(0, len(data)) | st.just(len(data)))])


@settings(
    deadline=None, derandomize=True, max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_no_damage_to_a_file_gets_past_or_crashes(data: st.DataObject, tmp_path: Path) -> None:
    """Any change of bytes or length gives a load error, or tensors inside the file that can be read."""
    library_file(tmp_path / "a.gguf")
    content = change((tmp_path / "a.gguf").read_bytes(), data.draw)
    try:
        found = opened(tmp_path / "b.gguf", content)
    except ModelLoadError:
        return
    for name, one in found.tensors.items():
        assert one.begin + one.rows * one.row_bytes <= len(content)
        try:
            found.read_rows(name, 0, one.rows)
        except ModelLoadError as error:
            assert "not finite" in str(error)
