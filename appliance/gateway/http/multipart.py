"""Bodies of ``multipart/form-data`` (RFC 7578), read as they arrive: parts in, no more than a delimiter held back.

Written here because it is one page for what the only such route needs, and a library reads bodies, headers and names in
more ways than a sender of a file uses. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

from appliance.common.errors import InvalidRequestError

MAX_PARTS = 16
"""Parts of one body: a file and a few fields."""

MAX_PART_HEAD_BYTES = 8 << 10
"""Bytes of the headers of one part."""

MAX_PREAMBLE_BYTES = 1 << 10
"""Bytes before the first part, which nobody reads."""

_TYPE = re.compile(r'multipart/form-data\s*;(?:.*;)?\s*boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))\s*(?:;.*)?', re.I)
"""Content type with its boundary, of at most 70 characters (RFC 2046, section 5.1.1)."""

_BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,./:=? -]*[0-9A-Za-z'()+_,./:=?-]")
_PARAMETER = re.compile(r';\s*(name|filename)=(?:"((?:[^"\\]|\\.)*)"|([^\s;"]+))', re.I)
_ESCAPED = re.compile(r'\\(["\\])')


@dataclass(frozen=True, slots=True)
class PartHead:
    """Beginning of a part."""

    name: str
    filename: str | None
    """Name of the file; None: the part is a field."""


class _State(Enum):
    PREAMBLE = auto()
    DELIMITER = auto()
    HEAD = auto()
    DATA = auto()
    EPILOGUE = auto()


def boundary_of(content_type: str) -> bytes:
    """Return the boundary that a content type names.

    Raises:
        InvalidRequestError: it is not ``multipart/form-data`` with a boundary.
    """
    match = _TYPE.fullmatch(content_type.strip())
    boundary = (match[1] or match[2]) if match is not None else ""
    if not _BOUNDARY.fullmatch(boundary):
        raise InvalidRequestError(
            "a file is sent as multipart/form-data with a boundary, in a part named file", param="content-type"
        )
    return boundary.encode("ascii")


class MultipartReader:
    """Reads one body."""

    def __init__(self, boundary: bytes) -> None:
        self._delimiter = b"\r\n--" + boundary
        self._held = bytearray(b"\r\n")  # so that the first delimiter is found like the others
        self._state = _State.PREAMBLE
        self._parts = 0

    @property
    def complete(self) -> bool:
        """Whether the last delimiter has come."""
        return self._state is _State.EPILOGUE

    def feed(self, data: bytes | bytearray) -> Iterator[PartHead | bytes]:
        """Yield the beginnings of parts and what they hold, in their order.

        Raises:
            InvalidRequestError: it is no such body.
        """
        self._held += data
        while True:
            if self._state is _State.EPILOGUE:
                self._held.clear()
                return
            if self._state is _State.DELIMITER:
                if len(self._held) < 2:
                    return
                self._begin_part()
            elif self._state is _State.HEAD:
                head = self._head()
                if head is None:
                    return
                yield head
            else:
                found = self._held.find(self._delimiter)
                sure = found if found >= 0 else max(0, len(self._held) - len(self._delimiter) + 1)
                if self._state is _State.DATA and sure:
                    yield bytes(self._held[:sure])
                elif self._state is _State.PREAMBLE and sure > MAX_PREAMBLE_BYTES:
                    raise _malformed("it does not begin with its boundary")
                if found < 0:
                    if self._state is _State.DATA:
                        del self._held[:sure]
                    return
                del self._held[: found + len(self._delimiter)]
                self._state = _State.DELIMITER

    def _begin_part(self) -> None:
        after = bytes(self._held[:2])
        del self._held[:2]
        if after == b"--":
            self._state = _State.EPILOGUE
            return
        self._parts += 1
        if after != b"\r\n":
            raise _malformed("a boundary has something behind it")
        if self._parts > MAX_PARTS:
            raise _malformed(f"it has more than {MAX_PARTS} parts")
        self._state = _State.HEAD

    def _head(self) -> PartHead | None:
        end = self._held.find(b"\r\n\r\n")
        if end < 0 or end > MAX_PART_HEAD_BYTES:
            if len(self._held) > MAX_PART_HEAD_BYTES:
                raise _malformed("the headers of a part are too long")
            return None
        lines = bytes(self._held[:end]).decode("utf-8", "replace").split("\r\n")
        del self._held[: end + 4]
        self._state = _State.DATA
        for line in lines:
            name, _, value = line.partition(":")
            if name.strip().lower() == "content-disposition" and value.strip().lower().startswith("form-data"):
                found = {
                    key.lower(): _ESCAPED.sub(r"\1", quoted) or plain
                    for key, quoted, plain in _PARAMETER.findall(value)
                }
                if "name" in found:
                    return PartHead(found["name"], found.get("filename"))
        raise _malformed("a part has no name")


def _malformed(why: str) -> InvalidRequestError:
    return InvalidRequestError(f"the body is no multipart/form-data: {why}", param="file")
