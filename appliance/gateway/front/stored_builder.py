"""Checks that both APIs make of what is asked of files and batches, and the pieces of a file that comes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from appliance.common.batches.values import (
    ENDPOINTS,
    FILE_KEEP_S,
    LEAST_KEEP_S,
    MAX_FILE_BYTES,
    MAX_METADATA,
    MAX_METADATA_KEY_CHARS,
    MAX_METADATA_VALUE_CHARS,
    PIECE_BYTES,
    PURPOSE,
    StoredFile,
)
from appliance.common.errors import InvalidRequestError, PayloadTooLargeError, StoredNotFoundError
from appliance.gateway.stored_work import Upload

UPLOAD_S = 900.0
"""Seconds for a whole upload: 200 MiB at 1.9 Mbit/s."""

IDLE_S = 30.0
"""Seconds within which more of an upload must come."""

UNNAMED = "file.jsonl"
"""Name of a file whose upload gives none."""

MAX_KEY_CHARS = 255
"""Characters of a client's idempotency key, as with other APIs that take one."""

KEY_BYTES = 16
"""Bytes of its digest: what a client chose is written nowhere."""

_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


def is_id(text: str) -> bool:
    """Return whether a text can be the id of a file or a batch."""
    return _ID.fullmatch(text) is not None


def known_id(text: str, param: str = "id") -> str:
    """Return the id of a file or a batch that is asked for.

    Raises:
        StoredNotFoundError: it is none that anything here can have.
    """
    if not is_id(text):
        raise StoredNotFoundError("there is nothing of this id, or nothing that is yours", param=param)
    return text


def after_of(text: str) -> str:
    """Return the id of the entry behind which a list begins; empty for its beginning.

    Raises:
        InvalidRequestError: it is none.
    """
    if text and not is_id(text):
        raise InvalidRequestError("after must be the id of an entry of the list", param="after")
    return text


def key_of(text: str) -> str:
    """Return the digest of the key with which a client makes a batch once; empty where it gives none.

    Raises:
        InvalidRequestError: it is too long.
    """
    if len(text) > MAX_KEY_CHARS:
        raise InvalidRequestError(f"an idempotency key has at most {MAX_KEY_CHARS} characters", param="idempotency_key")
    return hashlib.blake2b(text.encode(), digest_size=KEY_BYTES).hexdigest() if text else ""


def keep_of(seconds: int, param: str) -> int:
    """Return the seconds for which an upload, or the results of a batch, are asked to be kept.

    Raises:
        InvalidRequestError: fewer or more than may be asked for.
    """
    if not LEAST_KEEP_S <= seconds <= FILE_KEEP_S:
        raise InvalidRequestError(
            f"{param} must be a whole number from {LEAST_KEEP_S} to {FILE_KEEP_S}", param=param.partition("[")[0]
        )
    return seconds


def input_file_of(file: object) -> str:
    """Return the id of the file of a new batch.

    Raises:
        InvalidRequestError: it is none.
    """
    if not isinstance(file, str) or not is_id(file):
        raise InvalidRequestError("input_file_id must be the id of a file", param="input_file_id")
    return file


def endpoint_of(endpoint: object) -> str:
    """Return the route of a new batch.

    Raises:
        InvalidRequestError: no batch can have it.
    """
    if not isinstance(endpoint, str) or endpoint not in ENDPOINTS:
        raise InvalidRequestError(f"endpoint must be one of {', '.join(ENDPOINTS)}", param="endpoint")
    return endpoint


def metadata_of(values: Mapping[Any, Any]) -> dict[str, str]:
    """Return the metadata of a new batch.

    Raises:
        InvalidRequestError: too many texts, or too long ones.
    """
    found = {key: value for key, value in values.items() if isinstance(key, str) and isinstance(value, str)}
    if (
        len(values) > MAX_METADATA
        or len(found) < len(values)
        or any(
            len(key) > MAX_METADATA_KEY_CHARS or len(value) > MAX_METADATA_VALUE_CHARS for key, value in found.items()
        )
    ):
        raise InvalidRequestError(
            f"metadata has at most {MAX_METADATA} texts of at most {MAX_METADATA_VALUE_CHARS} characters under names "
            f"of at most {MAX_METADATA_KEY_CHARS}",
            param="metadata",
        )
    return found


def file_too_large() -> PayloadTooLargeError:
    """Return the error of an upload with more bytes than a file may have."""
    return PayloadTooLargeError(
        f"a file has at most {MAX_FILE_BYTES} bytes; divide it",
        param="file",
        details={"limit_bytes": str(MAX_FILE_BYTES)},
    )


def upload_stopped() -> InvalidRequestError:
    """Return the error of an upload that is too slow."""
    return InvalidRequestError(
        f"the file did not arrive within {UPLOAD_S:g} s, or stopped for {IDLE_S:g} s", param="file"
    )


@dataclass(slots=True)
class Pieces:
    """Hands the bytes of an upload on, in pieces of the size that the store takes."""

    upload: Upload
    _piece: bytearray = field(default_factory=bytearray)

    async def add(self, data: bytes) -> None:
        """Take the next bytes.

        Raises:
            ApplianceError: for the caller.
        """
        self._piece += data
        while len(self._piece) >= PIECE_BYTES:
            piece = self._piece[:PIECE_BYTES]
            del self._piece[:PIECE_BYTES]
            await self.upload.write(piece)

    async def end(self, keep_s: int, purpose: str = PURPOSE) -> StoredFile:
        """Keep the file for a purpose, for so many seconds; 0: as long as files are kept.

        Raises:
            ApplianceError: for the caller.
        """
        if self._piece:
            await self.upload.write(self._piece)
        return await self.upload.end(keep_s, purpose)
