"""The safetensors reader: what the library writes is read, and no corrupted file gets past the checks."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from engine.errors import ModelLoadError
from engine.model.checkpoint.safetensors import MAX_HEADER_BYTES, MAX_SHOWN, SafetensorsFile, TensorEntry, parse_header

quick = settings(
    deadline=None, derandomize=True, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

TENSORS = {
    "a": torch.arange(12, dtype=torch.float32).view(3, 4),
    "b.weight": torch.arange(5).to(torch.bfloat16),
    "c": torch.tensor(2.5, dtype=torch.float16),
    "d": torch.zeros(2, 0, 3),
}


def write(
    path: Path, header: object, data: bytes = b"", *, raw: bytes | None = None, length: int | None = None
) -> Path:
    """A file with any header, well-formed or not."""
    body = raw if raw is not None else json.dumps(header).encode()
    path.write_bytes((len(body) if length is None else length).to_bytes(8, "little") + body + data)
    return path


def entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, object]:
    """One tensor of a header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    """Names, shapes, dtypes and bytes are those that were saved, metadata or not."""
    for number, metadata in enumerate((None, {"format": "pt"})):
        path = tmp_path / f"{number}.safetensors"
        save_file(TENSORS, path, metadata=metadata)
        with SafetensorsFile(path) as file:
            assert set(file.tensors) == set(TENSORS)
            for name, tensor in TENSORS.items():
                found = file.tensors[name]
                assert found.shape == tuple(tensor.shape)
                target = torch.empty_like(tensor)
                if tensor.numel():
                    view = memoryview(target.view(-1).view(torch.uint8).numpy())
                    file.read_stretch(name, 0, view)
                assert torch.equal(target, tensor)


A4 = {"a": entry([1], 0, 4)}

BROKEN = {
    "empty file": {"raw": b"", "length": None},
    "no room for the header": {"header": A4, "length": 1 << 20},
    "header longer than allowed": {"header": A4, "length": MAX_HEADER_BYTES + 1},
    "length of 2**64 - 1": {"header": A4, "length": 2**64 - 1},
    "not JSON": {"raw": b"{nonsense"},
    "not an object": {"raw": b"[1]"},
    "leading space": {"raw": b" {}"},
    "not UTF-8": {"raw": b'{"\xff": 1}'},
    "a key twice": {"raw": b'{"a": 1, "a": 2}'},
    "NaN": {"raw": b'{"a": NaN}'},
    "deep nesting": {"raw": b'{"a":' * 100_000 + b"1" + b"}" * 100_000},
    "a long number": {"raw": b'{"a": ' + b"9" * 10_000 + b"}"},
    "no description": {"header": {"a": 3}},
    "missing key": {"header": {"a": {"dtype": "F32", "shape": [1]}}},
    "extra key": {"header": {"a": {**entry([1], 0, 4), "more": 1}}, "data": b"1234"},
    "unknown dtype": {"header": {"a": entry([1], 0, 4, "F31")}, "data": b"1234"},
    "dtype of another type": {"header": {"a": {**entry([1], 0, 4), "dtype": ["F32"]}}, "data": b"1234"},
    "negative dimension": {"header": {"a": entry([-1], 0, 4)}, "data": b"1234"},
    "two negative dimensions": {"header": {"a": entry([-1, -1], 0, 4)}, "data": b"1234"},
    "fractional dimension": {"header": {"a": entry([1.0], 0, 4)}, "data": b"1234"},  # type: ignore[list-item]
    "true as a dimension": {"header": {"a": entry([True], 0, 4)}, "data": b"1234"},
    "product that overflows 64 bits": {"header": {"a": entry([2**32, 2**32, 2], 0, 4)}, "data": b"1234"},
    "dimension beyond 64 bits": {"header": {"a": entry([2**64 + 1], 0, 4)}, "data": b"1234"},
    "too many dimensions": {"header": {"a": entry([1] * 9, 0, 4)}, "data": b"1234"},
    "size unlike the shape": {"header": {"a": entry([2], 0, 4)}, "data": b"1234"},
    "offsets backwards": {"header": {"a": entry([1], 4, 0)}, "data": b"1234"},
    "negative offset": {"header": {"a": entry([1], -4, 0)}, "data": b"1234"},
    "three offsets": {"header": {"a": {**entry([1], 0, 4), "data_offsets": [0, 4, 8]}}, "data": b"1234"},
    "beyond the file": {"header": A4, "data": b"123"},
    "hole at the start": {"header": {"a": entry([1], 4, 8)}, "data": bytes(8)},
    "hole between": {"header": {"a": entry([1], 0, 4), "b": entry([1], 8, 12)}, "data": bytes(12)},
    "overlap": {"header": {"a": entry([2], 0, 8), "b": entry([1], 4, 8)}, "data": bytes(8)},
    "same place twice": {"header": {"a": entry([1], 0, 4), "b": entry([1], 0, 4)}, "data": bytes(4)},
    "bytes left over": {"header": A4, "data": b"12345"},
    "data without tensors": {"header": {}, "data": b"1"},
}


@pytest.mark.parametrize("name", BROKEN)
def test_every_kind_of_corruption_is_refused(name: str, tmp_path: Path) -> None:
    """A file that breaks the format is a load error that names the file, never another exception."""
    path = tmp_path / "bad.safetensors"
    fields = dict(BROKEN[name])
    if name == "empty file":
        path.write_bytes(b"")
    else:
        write(path, fields.pop("header", None), fields.pop("data", b""), **fields)
    with pytest.raises(ModelLoadError, match=r"bad\.safetensors"):
        SafetensorsFile(path)


def test_an_untrusted_name_is_shown_short_and_printable(tmp_path: Path) -> None:
    """A message repeats no control characters and no megabytes of a name."""
    name = "\x1b[31m\n" + "x" * 10_000
    with pytest.raises(ModelLoadError) as caught:
        SafetensorsFile(write(tmp_path / "bad.safetensors", {name: entry([2], 0, 4)}, b"1234"))
    text = str(caught.value)
    assert text.isprintable()
    assert len(text) < MAX_SHOWN + 200


def test_missing_files_and_other_things_than_files(tmp_path: Path) -> None:
    """A missing file, a directory and a device are load errors."""
    for path in (tmp_path / "none.safetensors", tmp_path, Path("/dev/zero")):
        with pytest.raises(ModelLoadError):
            SafetensorsFile(path)


def test_a_file_that_shrinks_is_an_error(tmp_path: Path) -> None:
    """Truncation after the header was checked is noticed while reading."""
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.zeros(1_000)}, path)
    with SafetensorsFile(path) as file:
        os.truncate(path, path.stat().st_size - 1)
        with pytest.raises(ModelLoadError, match="ends early"):
            file.read_stretch("a", 0, memoryview(bytearray(4_000)))


@quick
@given(
    st.lists(
        st.tuples(st.sampled_from(["F32", "F16", "BF16", "U8", "I64"]), st.lists(st.integers(0, 4), max_size=3)),
        max_size=5,
    ),
    st.integers(0, 3),
)
def test_any_well_formed_header_is_taken(tensors: list[tuple[str, list[int]]], padding: int) -> None:
    """Tensors laid end to end, with spaces after the JSON, are read as they are described."""
    sizes = {"F32": 4, "F16": 2, "BF16": 2, "U8": 1, "I64": 8}
    header, place = {}, 0
    for number, (dtype, shape) in enumerate(tensors):
        size = sizes[dtype] * int(torch.tensor(shape).prod()) if shape else sizes[dtype]
        header[f"t{number}"] = entry(shape, place, place + size, dtype)
        place += size
    body = json.dumps(header).encode() + b" " * padding
    start = 8 + len(body)
    expected = {
        name: TensorEntry(value["dtype"], tuple(value["shape"]), *(start + one for one in value["data_offsets"]))
        for name, value in header.items()
    }
    assert parse_header("x", body, place) == expected


@quick
@given(data=st.data())
def test_no_damage_to_a_file_gets_past_or_crashes(data: st.DataObject, tmp_path: Path) -> None:
    """Any change of bytes or length gives a load error or a description inside the file; where we accept, the
    library does too and sees the same."""
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.zeros(3, 2), "b": torch.zeros(4, dtype=torch.bfloat16)}, path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(content)) | st.just(len(content)))
    path.write_bytes(content[:cut])
    try:
        with SafetensorsFile(path) as file:
            tensors = file.tensors
    except ModelLoadError:
        return
    assert all(8 <= one.begin <= one.end <= cut for one in tensors.values())
    try:
        with safe_open(path, "pt") as reference:
            assert set(reference.keys()) == set(tensors)
            for name in tensors:
                assert tuple(reference.get_slice(name).get_shape()) == tensors[name].shape
    except SafetensorError as error:
        pytest.fail(f"we accept what the library refuses: {error}")
