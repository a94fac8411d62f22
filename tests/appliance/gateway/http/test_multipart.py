"""multipart/form-data: what was sent comes out, however it is cut; what is none is refused."""

from __future__ import annotations

import itertools
import random

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.common.errors import InvalidRequestError
from appliance.gateway.http.multipart import (
    MAX_PART_HEAD_BYTES,
    MAX_PARTS,
    MAX_PREAMBLE_BYTES,
    MultipartReader,
    PartHead,
    boundary_of,
)

HEAD = b'content-disposition: form-data; name="file"; filename="x.jsonl"\r\n\r\n'


def read(body: bytes, boundary: bytes, cuts: list[int]) -> tuple[list[tuple[PartHead, bytes]], bool, int]:
    """Parts of a body that comes in pieces, whether it is complete, and the largest number of bytes held back."""
    reader, parts, held = MultipartReader(boundary), list[tuple[PartHead, bytearray]](), 0
    edges = [0, *sorted(cuts), len(body)]
    for start, end in itertools.pairwise(edges):
        for event in reader.feed(body[start:end]):
            if isinstance(event, PartHead):
                parts.append((event, bytearray()))
            else:
                parts[-1][1].extend(event)
        held = max(held, len(reader._held))
    return [(head, bytes(data)) for head, data in parts], reader.complete, held


@given(
    st.binary(max_size=300),
    st.text(st.characters(codec="utf-8", exclude_characters='"\\\r\n%'), max_size=20),
    st.integers(),
)
def test_httpx_forms_come_back_however_they_are_cut(data: bytes, name: str, seed: int) -> None:
    """A form as the official client sends it, cut anywhere: fields, the file's name and bytes."""
    request = httpx.Request(
        "POST", "http://a/", data={"purpose": "batch", "n": "1"}, files={"file": (name or "x", data)}
    )
    body, boundary = request.read(), boundary_of(request.headers["content-type"])
    draw = random.Random(seed)
    cuts = [draw.randrange(len(body)) for _ in range(draw.randrange(40))]
    parts, complete, _ = read(body, boundary, cuts)
    assert complete
    assert [(head.name, content) for head, content in parts] == [("purpose", b"batch"), ("n", b"1"), ("file", data)]
    assert parts[2][0].filename is not None


def test_no_more_than_a_delimiter_is_held_back() -> None:
    """Bytes of a file leave at once, also those that look like the beginning of a boundary."""
    body = b"--b\r\n" + HEAD + b"\r\n--x" * 50_000 + b"\r\n--b--\r\nepilogue"
    parts, complete, held = read(body, b"b", list(range(0, len(body), 1_000)))
    assert complete
    assert parts == [(PartHead("file", "x.jsonl"), b"\r\n--x" * 50_000)]
    assert held < 100


@pytest.mark.parametrize(
    "body",
    [
        b"x" * (MAX_PREAMBLE_BYTES + 10),
        b"--b!" + HEAD,
        b"--b\r\nx: y\r\n\r\n",
        b"--b\r\ncontent-disposition: form-data\r\n\r\n",
        b"--b\r\n" + b"x" * (MAX_PART_HEAD_BYTES + 1),
        (b"--b\r\n" + HEAD + b"\r\n") * (MAX_PARTS + 1),
    ],
)
def test_what_is_no_form_is_refused(body: bytes) -> None:
    """No boundary at the beginning, something behind one, parts without a name, heads and parts without an end."""
    with pytest.raises(InvalidRequestError):
        read(body, b"b", [])


def test_a_cut_form_is_not_complete() -> None:
    """Without the last boundary a form is not whole; with it (control) it is."""
    whole = b"--b\r\n" + HEAD + b"data\r\n--b--"
    assert read(whole, b"b", [])[1]
    assert not any(read(whole[:length], b"b", [])[1] for length in range(len(whole)))


@pytest.mark.parametrize(
    ("text", "boundary"),
    [
        ("multipart/form-data; boundary=abc", b"abc"),
        ('Multipart/Form-Data; charset=utf-8; boundary="a b"', b"a b"),
        ("multipart/form-data", None),
        ("multipart/mixed; boundary=abc", None),
        ("multipart/form-data; boundary=" + "x" * 71, None),
        ('multipart/form-data; boundary="a\r\nb"', None),
        ("", None),
    ],
)
def test_boundaries(text: str, boundary: bytes | None) -> None:
    """The boundary that a content type names, or a clear error."""
    if boundary is None:
        with pytest.raises(InvalidRequestError):
            boundary_of(text)
    else:
        assert boundary_of(text) == boundary
